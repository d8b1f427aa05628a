# SPDX-License-Identifier: Apache-2.0
"""Attention over a prefix that all requests share, in dense tensors, and over the keys of each request, in pages.

Older than :class:`flashinfer.MultiLevelCascadeAttentionWrapper`, which has any number of levels and keeps all of them
in one cache.
"""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.composite_wrapper import CompositeWrapper
from ..attention.kv_cache import PagedCache
from ..decode import BatchDecodeWithPagedKVCacheWrapper
from ..prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from ..trace.templates.cascade_attention import shared_prefix_decode_trace, shared_prefix_prefill_trace
from .merge import merge_state_in_place

__all__ = ["BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper"]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(CompositeWrapper):
    r"""Decoding of requests that share a prefix: the queries of all of them read it together.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch; its device is that of the wrapper.
    kv_layout : str
        ``"NHD"`` or ``"HND"``, of the cache and of the shared keys and values.

    Examples
    --------
    >>> wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8))
    >>> pages = torch.arange(8, dtype=torch.int32)
    >>> wrapper.begin_forward(pages, pages[:7], torch.full((7,), 10, dtype=torch.int32), 32, 8, 64, 16)
    >>> shared = torch.randn(64, 8, 64).half()
    >>> q, cache = torch.randn(7, 32, 64).half(), torch.randn(7, 2, 16, 8, 64).half()
    >>> wrapper.forward(q, shared, shared, cache).shape
    torch.Size([7, 32, 64])
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._batch_decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces. ``begin_forward`` must be called again before ``forward``."""
        self._batch_decode_wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @flashinfer_api(trace=None)
    @explain_type_errors
    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Union[str, torch.dtype] = "float16",
    ) -> None:
        """Plan the part of each request: the first three arguments are its page table, without the prefix."""
        self._batch_decode_wrapper.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode="NONE",
            q_data_type=data_type,
            kv_data_type=data_type,
        )

    @flashinfer_api(trace=shared_prefix_decode_trace)
    @explain_type_errors
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache
    ) -> torch.Tensor:
        """Attention of one token per request over the prefix and the request's own keys.

        Parameters
        ----------
        q : torch.Tensor
            ``(batch_size, num_qo_heads, head_dim)``.
        k_shared, v_shared : torch.Tensor
            ``(shared_len, num_kv_heads, head_dim)``, or ``(num_kv_heads, shared_len, head_dim)`` for HND.
        unique_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            The paged cache of the rest.

        Returns
        -------
        torch.Tensor
            ``(batch_size, num_qo_heads, head_dim)``.
        """
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, causal=False, kv_layout=self._kv_layout, return_lse=True
        )
        merge_state_in_place(out, lse, *self._batch_decode_wrapper.run(q, unique_kv_cache, return_lse=True))
        return out

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(CompositeWrapper):
    r"""Prefill or append of float16 requests that share a prefix: the queries of all of them read it together.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Scratch; its device is that of the wrapper.
    kv_layout : str
        ``"NHD"`` or ``"HND"``, of the cache and of the shared keys and values.
    """

    @flashinfer_api(trace=None)
    @explain_type_errors
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._batch_prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        self._table: Optional[tuple[torch.Tensor, ...]] = None
        self._planned: Optional[tuple] = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces."""
        self._batch_prefill_wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._planned = None

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Check for a page table only: one module serves equal and different strides of keys and values."""
        if self._table is None:
            raise RuntimeError(
                f"{type(self).__name__}.prewarm_paged_kv_stride_variant: begin_forward() must be called before, got no "
                "page table"
            )

    @flashinfer_api(trace=None)
    @explain_type_errors
    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Store the page tables of the requests; ``forward`` plans, because it has the argument ``causal``."""
        table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        # Copy arrays on the host, because callers may overwrite them before forward(). Arrays on a GPU must stay
        # unchanged: a copy would be a launch.
        self._table = tuple(x if x.is_cuda else x.clone() for x in table)
        self._sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._planned = None

    @flashinfer_api(trace=shared_prefix_prefill_trace)
    @explain_type_errors
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> torch.Tensor:
        """Attention over the prefix, all of which every row sees, and the request's own keys.

        Parameters
        ----------
        q : torch.Tensor
            ``(rows, num_qo_heads, head_dim)``.
        k_shared, v_shared : torch.Tensor
            ``(shared_len, num_kv_heads, head_dim)``, or ``(num_kv_heads, shared_len, head_dim)`` for HND.
        unique_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
            The paged cache of the rest.
        causal : bool
            Whether the request's own keys are seen causally.
        use_fp16_qk_reduction : bool
            Ignored: products are always accumulated in float32.
        sm_scale : Optional[float]
            1 / sqrt(head_dim) if None.
        rope_scale, rope_theta : Optional[float]
            Not used: there is no encoding of positions here.

        Returns
        -------
        torch.Tensor
            ``(rows, num_qo_heads, head_dim)``.
        """
        if self._table is None:
            raise ArgumentError(
                "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward: begin_forward() must be called before "
                "forward(), got no plan"
            )
        options = {
            "causal": causal,
            "use_fp16_qk_reduction": use_fp16_qk_reduction,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        key = (q.dtype, *options.values())
        if self._planned != key:
            self._planned = None
            self._batch_prefill_wrapper.plan(*self._table, *self._sizes, q_data_type=q.dtype, **options)
            self._planned = key
        out, lse = self._batch_prefill_wrapper.run(q, unique_kv_cache, return_lse=True)
        shared = single_prefill_with_kv_cache(
            q,
            k_shared,
            v_shared,
            causal=False,
            kv_layout=self._kv_layout,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            return_lse=True,
        )
        merge_state_in_place(out, lse, *shared)
        return out

    def end_forward(self) -> None:
        """Do nothing; published callers call it."""
