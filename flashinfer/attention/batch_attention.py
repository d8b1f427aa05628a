# SPDX-License-Identifier: Apache-2.0
"""Mixed batches: requests that prefill and requests that decode in one launch."""

from __future__ import annotations

from typing import Optional, Union

import numpy as np
import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from ..trace.templates.batch_attention import batch_attention_trace
from .composite_wrapper import CompositeWrapper
from .index_arrays import last_page_lens, segment_lens, to_host
from .kv_cache import PagedCache
from .scales import Scale

__all__ = ["BatchAttention"]

_FLOAT_WORKSPACE_BYTES = 384 << 20
_MAX_HEAD_DIM = 256


class BatchAttention(CompositeWrapper):
    r"""Attention of a batch in which some requests have one row and others thousands.

    The planner gives short requests tiles that stream keys and long ones tiles that share them, and both run in the
    same launch: this is paged prefill with its own workspaces, lengths instead of last pages, and the LSE always
    returned.

    Parameters
    ----------
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    device : Union[str, torch.device]
        Device of the tensors.

    Examples
    --------
    One request of 5 rows over 20 keys, one of 1 row over 7 keys.

    >>> attention = flashinfer.BatchAttention(device="cpu")
    >>> rows, pages = torch.tensor([0, 5, 6]), torch.tensor([0, 2, 3])
    >>> attention.plan(rows, pages, torch.arange(3), torch.tensor([20, 7]), 32, 8, 64, 64, 16, causal=True)
    >>> q, cache = torch.randn(6, 32, 64).bfloat16(), torch.randn(3, 2, 16, 8, 64).bfloat16()
    >>> out, lse = attention.run(q, cache)
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(self, kv_layout: str = "NHD", device: Union[str, torch.device] = "cuda") -> None:
        self.device = torch.device(device)
        self._lock.follow_streams(self.device)
        scratch = torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch, kv_layout)
        self.float_workspace_buffer = scratch
        self.int_workspace_buffer = self._wrapper._int_workspace_buffer
        self.page_locked_int_workspace_buffer = self._wrapper._pin_memory_int_workspace_buffer
        self._kv_layout = kv_layout
        self._use_profiler = False
        self._logits_soft_cap = 0.0  #: soft cap of the last plan

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: Optional[float] = None,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = torch.bfloat16,
        kv_data_type: Union[str, torch.dtype] = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plan a batch. Index arrays on the GPU are copied to the host, which waits for the GPU.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``(batch_size + 1,)``: rows of ``q`` of each request.
        kv_indptr, kv_indices : torch.Tensor
            Page table: ``(batch_size + 1,)`` offsets, and the page ids.
        kv_len_arr : torch.Tensor
            ``(batch_size,)``: keys of each request.
        head_dim_qk, head_dim_vo : int
            At most 256.
        causal : bool
            Whether row ``i`` sees keys up to ``i + kv_len - qo_len`` only.
        use_profiler : bool
            Whether ``run`` will be given a profiler buffer. Kernels here write no events into it.

        The other arguments are those of :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
        """
        op = "BatchAttention.plan"
        if max(head_dim_qk, head_dim_vo) > _MAX_HEAD_DIM:
            raise ArgumentError(f"{op}: head_dim must be at most {_MAX_HEAD_DIM}, got {head_dim_qk} and {head_dim_vo}")
        rows, pages, lengths = to_host(op, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_len_arr=kv_len_arr)
        counts = segment_lens(op, "kv_indptr", pages)
        if lengths.shape != counts.shape:
            raise ArgumentError(f"{op}: kv_len_arr must have shape {counts.shape} (batch size), got {lengths.shape}")
        too_long = np.flatnonzero(lengths > counts * page_size)
        if too_long.size:
            i = int(too_long[0])
            raise ArgumentError(
                f"{op}: kv_len_arr[{i}] must be at most {counts[i] * page_size} ({counts[i]} pages of {page_size}), "
                f"got {lengths[i]}"
            )
        self._wrapper.plan(
            torch.from_numpy(rows),
            torch.from_numpy(pages),
            kv_indices,
            last_page_lens(lengths, pages, page_size),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo=head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        self._use_profiler = use_profiler
        self._logits_soft_cap = self._wrapper._logits_soft_cap

    @flashinfer_api(trace=batch_attention_trace)
    def run(
        self,
        q: torch.Tensor,
        kv_cache: PagedCache,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: Optional[float] = 0.0,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_cache_sf: Optional[PagedCache] = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``(rows, num_qo_heads, head_dim_qk)``, any strides but a contiguous last dimension.
        kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            The paged cache.
        out, lse : Optional[torch.Tensor]
            Output buffers.
        k_scale, v_scale : Optional[Union[float, torch.Tensor]]
            Scales of stored keys and values.
        logits_soft_cap : Optional[float]
            Replaces the planned one, which is used if this is 0 or None; an error if none was planned.
        profiler_buffer : Optional[torch.Tensor]
            Needed after ``plan(use_profiler=True)``; left as it is.
        kv_cache_sf : Optional[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]]
            Scale factors of an NVFP4 cache.

        Returns
        -------
        out : torch.Tensor
            ``(rows, num_qo_heads, head_dim_vo)``.
        lse : torch.Tensor
            ``(rows, num_qo_heads)`` float32, base 2.
        """
        self._wrapper._require_plan()
        if self._use_profiler and profiler_buffer is None:
            raise ArgumentError(
                "BatchAttention.run: profiler_buffer must be a tensor (use_profiler was planned), got None"
            )
        logits_soft_cap = max(logits_soft_cap or 0.0, 0.0)
        if logits_soft_cap and not self._logits_soft_cap:
            raise ArgumentError(
                f"BatchAttention.run: logits_soft_cap must be 0 (plan had no logits_soft_cap), got {logits_soft_cap}"
            )
        logits_soft_cap = logits_soft_cap or self._logits_soft_cap
        if logits_soft_cap != self._wrapper._logits_soft_cap:
            self._wrapper._logits_soft_cap = logits_soft_cap
        result = self._wrapper.run(
            q,
            kv_cache,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=True,
            kv_cache_sf=kv_cache_sf,
        )
        return result[0], result[1]

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Check for a plan only: one module serves equal and different strides of keys and values."""
        self._wrapper.prewarm_paged_kv_stride_variant(variant)
