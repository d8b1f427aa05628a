# SPDX-License-Identifier: Apache-2.0
"""Faster ``plan`` for serving engines that write the page tables themselves: the page table is not copied."""

from __future__ import annotations

from typing import Any, Optional, Union

import numpy as np
import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..attention.index_arrays import range_buffer, segment_lens, to_host
from ..attention.locks import one_at_a_time
from ..attention.options import resolve_dtypes
from ..attention.plan_options import AttentionOptions
from .batch import BatchDecodeWithPagedKVCacheWrapper
from .plan import DecodePlan
from .planning import check_buffers, check_options, host_lengths, module_of, plan_work, store_options

Dtype = Optional[Union[str, torch.dtype]]


@flashinfer_api(trace=None)
@one_at_a_time
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    q_data_type: Dtype = None,
    kv_data_type: Dtype = None,
    data_type: Dtype = None,
    sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    non_blocking: bool = True,
    fixed_split_size: Optional[int] = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Optional[torch.Tensor] = None,
) -> None:
    """Plan again with the module of an earlier ``plan``, without copying the page table.

    Bind it to a wrapper: ``wrapper.plan = functools.partial(fast_decode_plan, wrapper)``. With CUDA graphs the caller
    has written the wrapper's buffers already; otherwise the tensors given here are used as they are.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
        A wrapper that ``plan`` has prepared once.
    global_override_indptr_cpu : Optional[torch.Tensor]
        ``indptr`` on the host, which saves the copy.
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, \
logits_soft_cap, q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta, non_blocking, \
fixed_split_size, disable_split_kv, q_len_per_req
        As in :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`. With ``page_size`` 1 all ``last_page_len`` are 1.
    """
    op = "fast_decode_plan"
    if q_len_per_req > 1 and self._backend == "auto":
        raise ArgumentError(f"{op}: the wrapper must have a prior plan for q_len_per_req = {q_len_per_req}, got none")
    if self._cached_module is None:
        raise ArgumentError(f"{op}: the wrapper must have a prior plan, got no module")
    batch_size = len(last_page_len)
    check_options(self, op, q_len_per_req, fixed_split_size)
    check_buffers(self, op, batch_size, len(indices))
    q_data_type = q_data_type if q_data_type is not None else data_type or "float16"
    dtypes = resolve_dtypes(op, q_data_type, kv_data_type, self._cached_o_data_type, data_type)
    if (dtypes.q, dtypes.kv) != (self._cached_q_data_type, self._cached_kv_data_type):
        raise ArgumentError(
            f"{op}: dtypes of q and kv must be {self._cached_q_data_type} and {self._cached_kv_data_type} (of the "
            f"prior plan, whose module is used), got {dtypes.q} and {dtypes.kv}"
        )
    on_host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    is_exact = fixed_split_size is not None or disable_split_kv or dtypes.kv is torch.uint8
    indptr_host: Any
    kv_lens: Optional[np.ndarray]
    if page_size == 1:
        (indptr_host,) = to_host(op, indptr=on_host)
        kv_lens = np.ascontiguousarray(segment_lens(op, "indptr", indptr_host))
    else:
        indptr_host, kv_lens = host_lengths(
            op, on_host, last_page_len, None, page_size, 1, is_exact or q_len_per_req > 1
        )
    if q_len_per_req > 1 and kv_lens is not None and kv_lens.size and kv_lens.min() < q_len_per_req:
        raise ArgumentError(
            f"{op}: requests must have at least {q_len_per_req} keys each, got one with an empty KV range"
        )

    self._plan_info = None  # if the rest fails, no valid plan remains
    if not self._use_cuda_graph:
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
    elif q_len_per_req > 1 and self._qo_indptr_buf is not None:
        self._qo_indptr_buf.copy_(range_buffer(batch_size + 1, self.device) * q_len_per_req)
    store_options(
        self,
        batch_size=batch_size,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_len_per_req=q_len_per_req,
        dtypes=dtypes,
        options=AttentionOptions(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
    )
    self._planned = DecodePlan(indptr_host, kv_lens, fixed_split_size or -1, disable_split_kv or self._is_nvfp4)
    self._cached_module = module_of(self)  # changes with the soft cap, the window and the position encoding
    try:
        plan_work(self)
    except Exception as error:
        raise RuntimeError(f"Error in standard plan: {error}") from error
