# SPDX-License-Identifier: Apache-2.0
"""Paged prefill of causal text with spans, such as images, whose tokens see each other."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.checks import canonicalize_torch_dtype, check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.kv_cache import PagedCache
from ..attention.run import Result
from ..attention.scales import Scale
from ..jit.attention.customize import bidirectional_ranges_arguments
from ..trace.templates.prefill import paged_prefill_ranges_trace
from .paged import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchPrefillWithCausalBidirectionalRangesWrapper"]

_OP = "BatchPrefillWithCausalBidirectionalRangesWrapper"


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    r"""Paged prefill in which a query sees the keys up to its own position, and those of one range on both sides.

    Query row ``i`` at position ``p`` sees the key at position ``j`` if ``j <= p`` or
    ``ranges[i, 0] <= j <= ranges[i, 1]``, and with a window only if ``|p - j| <= window_left``.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, \
    paged_kv_last_page_len_buf
        As for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    pos_encoding_mode : str
        ``"NONE"``.
    q_data_type, kv_data_type, o_data_type : Union[str, torch.dtype, None]
        Dtypes of the queries, the cache and the output (that of the queries if None), which ``plan`` takes too.
    head_dim_qk, head_dim_vo : int
        Head dimensions, which ``plan`` takes too.

    Examples
    --------
    A prompt of six tokens, of which tokens 2 to 4 are an image.

    >>> types = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    >>> workspace = torch.empty(32 << 20, dtype=torch.uint8)
    >>> Wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper
    >>> wrapper = Wrapper(workspace, **types, head_dim_qk=64, head_dim_vo=64)
    >>> rows, pages = torch.tensor([0, 6]).int(), torch.tensor([0, 1]).int()
    >>> wrapper.plan(rows, pages, torch.tensor([0]).int(), torch.tensor([6]).int(), 4, 2, 64, 16, **types)
    >>> ranges = torch.tensor([[-1, -1], [-1, -1], [2, 4], [2, 4], [2, 4], [-1, -1]]).int()
    >>> out = wrapper.run(torch.randn(6, 4, 64).half(), torch.randn(1, 2, 16, 2, 64).half(), ranges)
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: Union[str, torch.dtype] = torch.bfloat16,
        kv_data_type: Union[str, torch.dtype] = torch.bfloat16,
        o_data_type: Union[str, torch.dtype, None] = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"{_OP}: pos_encoding_mode must be 'NONE', got {pos_encoding_mode!r}")
        q, kv = canonicalize_torch_dtype(q_data_type), canonicalize_torch_dtype(kv_data_type)
        o = q if o_data_type is None else canonicalize_torch_dtype(o_data_type)
        self._made_for = {
            "q_data_type": q,
            "kv_data_type": kv,
            "o_data_type": o,
            "head_dim_qk": head_dim_qk,
            "head_dim_vo": head_dim_vo,
        }
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            backend="fa2",
            jit_args=bidirectional_ranges_arguments("fa2", q, kv, o, torch.int32, head_dim_qk, head_dim_vo),
            variant_owns_mask=True,
        )

    @explain_type_errors
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = True,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype, None] = None,
        kv_data_type: Union[str, torch.dtype, None] = None,
        o_data_type: Union[str, torch.dtype, None] = None,
        non_blocking: bool = True,
        prefix_len_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        uniform_q_len: Optional[int] = None,
    ) -> None:
        r"""Plan a batch as :meth:`BatchPrefillWithPagedKVCacheWrapper.plan` does.

        Parameters
        ----------
        window_left : int
            Positions on both sides of a query that it may see, -1 for all: keys up to it on the left, and those of its
            range on the right.
        causal : bool
            True; the ranges are what a query sees besides.
        pos_encoding_mode : str
            ``"NONE"``.
        head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type
            Those that the wrapper was made for, which None stands for.
        custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr, logits_soft_cap, \
        max_sequence_kv
            None.
        use_fp16_qk_reduction, rope_scale, rope_theta, token_pos_in_items_len
            Accepted; without a rotation and without items they change nothing.
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, page_size, \
        sm_scale, non_blocking, seq_lens, seq_lens_q, block_tables, max_token_per_sequence, \
        fixed_split_size, disable_split_kv, uniform_q_len
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        op = f"{_OP}.plan"
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"{op}: pos_encoding_mode must be 'NONE', got {pos_encoding_mode!r}")
        given = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "o_data_type": o_data_type}
        sizes = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_qk if head_dim_vo is None else head_dim_vo}
        for name, value in {**given, **sizes}.items():
            wanted = self._made_for[name]
            found = canonicalize_torch_dtype(value) if name in given and value is not None else value  # type: ignore[arg-type]
            if found is not None and found != wanted:
                raise ArgumentError(f"{op}: {name} must be {wanted} (the wrapper's), got {found}")
        for name, unused in {
            "custom_mask": custom_mask,
            "packed_custom_mask": packed_custom_mask,
            "prefix_len_ptr": prefix_len_ptr,
            "token_pos_in_items_ptr": token_pos_in_items_ptr,
            "max_item_len_ptr": max_item_len_ptr,
            "max_sequence_kv": max_sequence_kv,
        }.items():
            if unused is not None:
                raise ArgumentError(f"{op}: {name} must be None (ranges are the mask), got a value")
        if logits_soft_cap:
            raise ArgumentError(f"{op}: logits_soft_cap must be None, got {logits_soft_cap}")
        if not causal:
            raise ArgumentError(f"{op}: causal must be True (ranges are what a query sees besides), got {causal}")
        super().plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo,
            causal=True,
            sm_scale=sm_scale,
            window_left=window_left,
            q_data_type=self._made_for["q_data_type"],
            kv_data_type=self._made_for["kv_data_type"],
            o_data_type=self._made_for["o_data_type"],
            non_blocking=non_blocking,
            seq_lens=seq_lens,
            seq_lens_q=seq_lens_q,
            block_tables=block_tables,
            max_token_per_sequence=max_token_per_sequence,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            uniform_q_len=uniform_q_len,
        )

    begin_forward = plan

    @flashinfer_api(trace=paged_prefill_ranges_trace)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        ranges: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        window_left: Optional[int] = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Result:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``(qo_indptr[-1], num_qo_heads, head_dim_qk)``.
        paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        ranges : torch.Tensor
            int32 ``(rows of q, 2)``, contiguous: positions of the first and the last key of the request that the row
            sees besides, ``(-1, -1)`` for none.
        *args
            ``sm_scale``, if it is not that of ``plan``.
        q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, lse_base, lse_layout
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            ``(tokens, num_qo_heads, head_dim_vo)``, and the LSE.
        """
        self._check_ranges(q, ranges)
        return self._run_alone(
            q, paged_kv_cache, (ranges, *args), q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl,
            window_left, None, None, None, None, lse_base, lse_layout,
        )  # fmt: skip

    @staticmethod
    def _check_ranges(q: torch.Tensor, ranges: torch.Tensor) -> None:
        op = f"{_OP}.run"
        check_tensors(op, q=q, ranges=ranges)
        if ranges.dtype != torch.int32 or ranges.device != q.device:
            raise ArgumentError(f"{op}: ranges must be int32 on {q.device}, got {ranges.dtype} on {ranges.device}")
        if ranges.shape != (q.shape[0], 2) or not ranges.is_contiguous():
            raise ArgumentError(
                f"{op}: ranges must have shape ({q.shape[0]}, 2) (rows of q) and be contiguous, got "
                f"{tuple(ranges.shape)} with strides {ranges.stride()}"
            )
