# SPDX-License-Identifier: Apache-2.0
"""Functions of the plan of batch decode: validation, lengths, page tables, the module and its arguments."""

from __future__ import annotations

from typing import Any, Optional, Union

import numpy as np
import torch

from .._runtime.checks import narrowed
from .._runtime.errors import ArgumentError
from ..attention.index_arrays import (
    as_tensor,
    kv_lens_given,
    kv_lens_of_pages,
    range_buffer,
    rows_on_host,
    segment_lens,
    to_device,
    to_host,
)
from ..attention.modules import get_batch_decode_module, get_batch_prefill_module
from ..attention.options import Dtypes
from ..attention.plan_options import AttentionOptions
from ..attention.run import check_batch_size, check_heads, keeps_plan

__all__ = [
    "check_buffers",
    "check_options",
    "host_lengths",
    "module_of",
    "native_arguments",
    "plan_again",
    "plan_work",
    "store_options",
    "store_tables",
]

_INT32 = torch.int32


def check_options(wrapper: Any, op: str, q_len_per_req: int, fixed_split_size: Optional[int]) -> None:
    if q_len_per_req < 1:
        raise ArgumentError(f"{op}: q_len_per_req must be at least 1, got {q_len_per_req}")
    if fixed_split_size is not None and not wrapper._use_tensor_cores:
        raise ArgumentError(f"{op}: fixed_split_size must be None without use_tensor_cores, got {fixed_split_size}")
    if q_len_per_req > 1:
        if not wrapper._use_tensor_cores:
            raise ArgumentError(f"{op}: q_len_per_req must be 1 without use_tensor_cores=True, got {q_len_per_req}")
        if wrapper._backend not in ("auto", "fa2"):
            raise NotImplementedError(
                f"{op}: q_len_per_req must be 1 with backend {wrapper._backend!r}, got {q_len_per_req}; usable: fa2"
            )
    if wrapper._use_cuda_graph and wrapper._frozen_q_len not in (None, q_len_per_req):
        raise ArgumentError(
            f"{op}: q_len_per_req must be {wrapper._frozen_q_len} (frozen by the first plan, use_cuda_graph=True), "
            f"got {q_len_per_req}"
        )


def check_buffers(wrapper: Any, op: str, batch_size: int, num_indices: int) -> None:
    if not wrapper._use_cuda_graph:
        return
    check_batch_size(wrapper, op, batch_size)
    assert wrapper._paged_kv_indices_buf is not None
    if num_indices > len(wrapper._paged_kv_indices_buf):
        raise ArgumentError(
            f"{op}: indices must have at most {len(wrapper._paged_kv_indices_buf)} elements (length of "
            f"paged_kv_indices_buffer), got {num_indices}"
        )


def host_lengths(
    op: str,
    indptr: torch.Tensor,
    last_page_len: torch.Tensor,
    seq_lens: Optional[torch.Tensor],
    page_size: int,
    q_len_per_req: int,
    is_exact: bool,
) -> tuple[Union[np.ndarray, torch.Tensor], Optional[np.ndarray]]:
    """Return the page offsets and the keys of each request on the host, in at most one copy from the device.

    The keys are None if page offsets are enough for planning: ``last_page_len`` is on the device, and reading it
    would wait. ``is_exact`` forces exact key counts, for plans whose splits must depend on the keys only. The
    native plan checks that offsets are non-decreasing.
    """
    if last_page_len.is_cuda and seq_lens is None and not (indptr.is_cuda or is_exact or q_len_per_req > 1):
        if indptr.dtype is not _INT32 or not indptr.is_contiguous():
            indptr = narrowed(indptr, f"{op}: indptr").contiguous()
        shape = last_page_len.shape
        if len(shape) != 1 or indptr.shape != (shape[0] + 1,):
            raise ArgumentError(
                f"{op}: last_page_len must have shape ({indptr.numel() - 1},) (batch size), got {tuple(shape)}"
            )
        return indptr, None
    lengths = {"last_page_len": last_page_len} if seq_lens is None else {"seq_lens": seq_lens}
    indptr_host, lens = to_host(op, indptr=indptr, **lengths)
    if seq_lens is None:
        kv_lens = kv_lens_of_pages(op, "indptr", indptr_host, lens, page_size)
    else:
        kv_lens = kv_lens_given(op, lens, segment_lens(op, "indptr", indptr_host))
    if q_len_per_req > 1 and kv_lens.size and kv_lens.min() < q_len_per_req:
        raise ArgumentError(
            f"{op}: a request must have at least q_len_per_req = {q_len_per_req} keys (its first query would have "
            f"an empty KV range), got {kv_lens.min()}"
        )
    return indptr_host, kv_lens


def store_tables(
    wrapper: Any, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, non_blocking: bool
) -> None:
    if wrapper._use_cuda_graph:
        assert wrapper._paged_kv_indptr_buf is not None and wrapper._paged_kv_indices_buf is not None
        assert wrapper._paged_kv_last_page_len_buf is not None
        wrapper._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
        numbers = narrowed(indices, f"{wrapper._op}.plan: indices")
        wrapper._paged_kv_indices_buf[: len(indices)].copy_(numbers, non_blocking=non_blocking)
        wrapper._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
    else:
        wrapper._paged_kv_indptr_buf = wrapper._indptr_on_device(indptr, 0, non_blocking)
        where: tuple[Any, ...] = (wrapper.device, non_blocking)
        wrapper._paged_kv_indices_buf = to_device(wrapper._op, "indices", indices, *where)
        wrapper._paged_kv_last_page_len_buf = to_device(wrapper._op, "last_page_len", last_page_len, *where)


def store_options(
    wrapper: Any,
    *,
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    q_len_per_req: int,
    dtypes: Dtypes,
    options: AttentionOptions,
) -> None:
    check_heads(f"{wrapper._op}.plan", num_qo_heads, num_kv_heads)
    wrapper._batch_size = batch_size
    wrapper._num_qo_heads, wrapper._num_kv_heads = num_qo_heads, num_kv_heads
    wrapper._head_dim, wrapper._page_size = head_dim, page_size
    wrapper._head_dim_vo = head_dim if wrapper._jit is None else wrapper._jit.head_dim_vo
    wrapper._planned_q_len = q_len_per_req
    wrapper._store_dtypes(dtypes)
    wrapper._page_shape = (page_size, num_kv_heads) if wrapper._layout == 0 else (num_kv_heads, page_size)
    if wrapper._use_tensor_cores:
        rows = range_buffer(batch_size + 1, wrapper.device)
        if not wrapper._use_cuda_graph and q_len_per_req == 1:
            wrapper._qo_indptr_buf = rows
        elif not wrapper._use_cuda_graph or wrapper._frozen_q_len is None:
            wrapper._qo_indptr_buf = rows * q_len_per_req  # separate tensor: a graph keeps its address
    wrapper._set_parameters(options)


def module_of(wrapper: Any) -> Any:
    if wrapper._jit_module is not None:
        return wrapper._jit_module
    key = (
        wrapper._dtypes,
        wrapper._head_dim,
        wrapper._pos_encoding,
        wrapper._window_left >= 0,
        wrapper._logits_soft_cap > 0,
        wrapper._module_backend(),
    )
    if key != wrapper._module_key:
        d, tail, backend = key[0], (_INT32, key[1], *key[1:-1]), key[-1]
        if wrapper._use_tensor_cores:
            module = get_batch_prefill_module(backend, d.compute, d.kv, d.o, *tail, False, device=wrapper._device_kind)
        else:
            module = get_batch_decode_module(d.compute, d.kv, d.o, *tail, device=wrapper._device_kind)
        wrapper._module_key, wrapper._module_found = key, module
    return wrapper._module_found


def native_arguments(wrapper: Any) -> tuple[Any, ...]:
    """Return the arguments of the native plan after the workspaces."""
    planned = wrapper._planned
    indptr, kv_lens = as_tensor(planned.indptr), as_tensor(planned.kv_lens)
    batch_size, q_len = indptr.shape[0] - 1, wrapper._planned_q_len
    if wrapper._use_tensor_cores:
        assert q_len is not None
        qo_indptr = rows_on_host(batch_size, q_len)
        return (
            qo_indptr,
            indptr,
            kv_lens,
            batch_size * q_len,
            batch_size,
            wrapper._num_qo_heads,
            wrapper._num_kv_heads,
            wrapper._page_size,
            wrapper._use_cuda_graph,
            wrapper._head_dim,
            wrapper._head_dim,
            q_len > 1,  # causal
            wrapper._window_left,
            planned.fixed_split_size,
            planned.disable_split_kv,
            0,  # num_colocated_ctas
            q_len,
        )
    return (
        indptr,
        kv_lens,
        q_len,
        wrapper._num_qo_heads,
        wrapper._num_kv_heads,
        wrapper._page_size,
        wrapper._use_cuda_graph,
        wrapper._window_left,
        planned.fixed_split_size,
        planned.disable_split_kv,
    )


def plan_again(wrapper: Any, covers: bool) -> None:
    """Plan again after parameters changed. ``covers``: the old plan covers all keys that these make visible."""
    if keeps_plan(wrapper, covers):
        wrapper._cached_module = module_of(wrapper)
        return
    if wrapper._plan_info is not wrapper._planned_info:  # an engine replaced the plan: read the batch from its tables
        indptr, last_page_len = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf
        assert indptr is not None and last_page_len is not None and wrapper._planned_q_len is not None
        indptr_host, kv_lens = host_lengths(
            f"{wrapper._op}.forward", indptr, last_page_len, None, wrapper._page_size, wrapper._planned_q_len, True
        )
        wrapper._planned = wrapper._planned.with_batch(indptr_host, kv_lens)
    wrapper._plan_info = None  # if the rest fails, no valid plan remains
    wrapper._cached_module = module_of(wrapper)
    plan_work(wrapper)


def plan_work(wrapper: Any) -> None:
    module = wrapper._cached_module
    wrapper._plan_info = wrapper._planned_info = wrapper._native_plan(
        module.plan if wrapper._use_tensor_cores else module.plan_with_lens, *native_arguments(wrapper)
    )
    if wrapper._use_cuda_graph:
        wrapper._frozen_q_len = wrapper._planned_q_len
