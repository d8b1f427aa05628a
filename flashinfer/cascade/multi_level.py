# SPDX-License-Identifier: Apache-2.0
"""Attention over prefixes that requests share at several levels, each level read once for all that share it."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.composite_wrapper import CompositeWrapper
from ..attention.kv_cache import PagedCache
from ..trace.templates.cascade_attention import multi_level_cascade_trace
from .levels import Level
from .merge import merge_state_in_place

__all__ = ["MultiLevelCascadeAttentionWrapper"]

_OP = "MultiLevelCascadeAttentionWrapper"
Tensors = Sequence[torch.Tensor]


def _check_lengths(where: str, expected: int, **lists: Sequence[Any]) -> None:
    for name, values in lists.items():
        if len(values) != expected:
            raise ArgumentError(f"{_OP}.{where}: {name} must have {expected} elements (num_levels), got {len(values)}")


class MultiLevelCascadeAttentionWrapper(CompositeWrapper):
    r"""Attention over levels of keys: a prompt that all requests share, prefixes of groups, keys of single requests.

    Each level is a batch of its own over the same queries: ``qo_indptr_arr[level]`` says which rows share the keys of
    an entry. A level reads the keys of an entry once for all its rows, and the results of the levels are merged by
    their scores. Level 0 is shared most; the last holds what belongs to a single request. Two levels, one whose keys
    many rows share and one of requests that decode, are one launch on a GPU that can hold both (SM90).

    Parameters
    ----------
    num_levels : int
        How many levels there are.
    float_workspace_buffer : torch.Tensor
        Scratch that all levels use, one after the other; its device is that of the wrapper. 128 MiB are plenty.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    use_cuda_graph : bool
        Whether ``run`` will be captured; then the four lists of buffers are needed, one tensor per level in each, as
        for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr
        Buffers of each level, in CUDA graph mode.

    Examples
    --------
    Seven requests that share a prompt of 64 tokens, with 10 tokens each after it.

    >>> wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(32 << 20, dtype=torch.uint8))
    >>> cache = torch.randn(4 + 7, 2, 16, 8, 64).half()
    >>> shared = torch.tensor([0, 7]), torch.tensor([0, 4]), torch.arange(4), torch.tensor([16])
    >>> own = torch.arange(8), torch.arange(8), torch.arange(4, 11), torch.full((7,), 10)
    >>> wrapper.plan(*([a.int(), b.int()] for a, b in zip(shared, own)), 32, 8, 64, 16)
    >>> wrapper.run(torch.randn(7, 32, 64).half(), cache).shape
    torch.Size([7, 32, 64])
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Optional[Tensors] = None,
        paged_kv_indptr_buf_arr: Optional[Tensors] = None,
        paged_kv_indices_buf_arr: Optional[Tensors] = None,
        paged_kv_last_page_len_buf_arr: Optional[Tensors] = None,
    ) -> None:
        if num_levels < 1:
            raise ArgumentError(f"{_OP}: num_levels must be at least 1, got {num_levels}")
        self._use_cuda_graph = use_cuda_graph
        buffers: list[tuple[Optional[torch.Tensor], ...]] = [(None,) * 4] * num_levels
        if use_cuda_graph:
            given = {
                "qo_indptr_buf_arr": qo_indptr_buf_arr,
                "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
                "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
                "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
            }
            _check_lengths("__init__", num_levels, **{name: values or () for name, values in given.items()})
            buffers = list(zip(*(values or () for values in given.values()), strict=True))
        self._batch_prefill_wrappers = [
            Level(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph=use_cuda_graph,
                qo_indptr_buf=qo_indptr,
                paged_kv_indptr_buf=kv_indptr,
                paged_kv_indices_buf=kv_indices,
                paged_kv_last_page_len_buf=last_page_len,
            )
            for qo_indptr, kv_indptr, kv_indices, last_page_len in buffers
        ]
        self._num_levels = num_levels
        self._is_fused: Optional[bool] = None  #: True if ``run`` is one launch; a CUDA graph keeps its first choice
        self._float_workspace_buffer = float_workspace_buffer
        self._kv_layout = kv_layout
        self.device = float_workspace_buffer.device
        self._lock.follow_streams(self.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Tensors) -> None:
        """Replace the workspaces: one for scratch, one for the plan of each level. ``plan`` must be called again."""
        _check_lengths("reset_workspace_buffer", self._num_levels, int_workspace_buffers=int_workspace_buffers)
        self._float_workspace_buffer = float_workspace_buffer
        self._is_fused = None
        for wrapper, int_workspace in zip(self._batch_prefill_wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace)

    @flashinfer_api(trace=None)
    @explain_type_errors
    def plan(
        self,
        qo_indptr_arr: Tensors,
        paged_kv_indptr_arr: Tensors,
        paged_kv_indices_arr: Tensors,
        paged_kv_last_page_len: Tensors,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: Union[str, torch.dtype] = "float16",
        kv_data_type: Union[str, torch.dtype, None] = None,
    ) -> None:
        """Plan every level. The first four arguments are lists with one tensor per level, level 0 shared most.

        Parameters
        ----------
        qo_indptr_arr : List[torch.Tensor]
            ``(entries + 1,)`` of each level: rows of ``q`` that share the keys of an entry.
        paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : List[torch.Tensor]
            Page tables of each level, into one cache.
        causal : bool
            Whether the last level is causal. The others are keys before all queries and never are.

        The other arguments are those of :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, for all levels.
        """
        tables = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        _check_lengths("plan", self._num_levels, **dict(zip(names, tables, strict=True)))
        last = self._num_levels - 1
        for level, (wrapper, *table) in enumerate(zip(self._batch_prefill_wrappers, *tables, strict=True)):
            wrapper.plan(
                *table,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == last,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

        self._plan_launches()

    begin_forward = plan

    def _plan_launches(self) -> None:
        """Make the native plans: one for two levels that can share a launch, otherwise one per level."""
        *shared, own = self._batch_prefill_wrappers
        if self._is_fused is None or not self._use_cuda_graph:
            self._is_fused = len(shared) == 1 and own.suits(shared[0])
        if self._is_fused:
            self._is_fused = own.plan_with(shared[0])
        if not self._is_fused:
            for wrapper in self._batch_prefill_wrappers:
                wrapper.plan_alone()

    @flashinfer_api(trace=multi_level_cascade_trace)
    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> torch.Tensor:
        """Compute attention of ``q`` over the keys of all levels.

        Parameters
        ----------
        q : torch.Tensor
            ``(rows, num_qo_heads, head_dim)``.
        paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            The cache that all levels index.

        Returns
        -------
        torch.Tensor
            ``(rows, num_qo_heads, head_dim)``.
        """
        *shared, own = self._batch_prefill_wrappers
        if self._is_fused:
            return own.run(q, paged_kv_cache)
        out, lse = own.run(q, paged_kv_cache, return_lse=True)
        for wrapper in shared:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Check for a plan only: one module serves equal and different strides of keys and values."""
        for wrapper in self._batch_prefill_wrappers:
            wrapper.prewarm_paged_kv_stride_variant(variant)
