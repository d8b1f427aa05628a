# SPDX-License-Identifier: Apache-2.0
"""Append keys and values to a paged cache."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import NativeFunction
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.page import append_paged_kv_cache_trace, append_paged_mla_kv_cache_trace
from . import modules
from .modules import PagedCache, get_page_module, halves, is_hnd, table_as_int32

_native_append = NativeFunction(get_page_module, "append_paged_kv_cache")
_native_append_mla = NativeFunction(get_page_module, "append_paged_mla_kv_cache")


@register_custom_op("flashinfer::append_paged_kv_cache", mutates_args=("cache", "value_cache"))
def _append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    value_cache: Optional[torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    is_hnd: bool,
) -> None:
    append, validate = _native_append[append_key.is_cuda], modules.VALIDATE
    if not append(
        append_key, append_value, cache, value_cache, is_hnd, validate, batch_indices, positions, kv_indices, kv_indptr
    ):  # index tensors that are not int32
        table = table_as_int32("append_paged_kv_cache", batch_indices, positions, kv_indices, kv_indptr)
        append(append_key, append_value, cache, value_cache, is_hnd, validate, *table)


@register_custom_op("flashinfer::append_paged_mla_kv_cache", mutates_args=("ckv_cache", "kpe_cache"))
def _append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    append, validate = _native_append_mla[append_ckv.is_cuda], modules.VALIDATE
    if not append(
        append_ckv, append_kpe, ckv_cache, kpe_cache, validate, batch_indices, positions, kv_indices, kv_indptr
    ):  # index tensors that are not int32
        table = table_as_int32("append_paged_mla_kv_cache", batch_indices, positions, kv_indices, kv_indptr)
        append(append_ckv, append_kpe, ckv_cache, kpe_cache, validate, *table)


@flashinfer_api(trace=append_paged_kv_cache_trace)
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    r"""Write keys and values of a batch of tokens into their pages.

    Row ``t`` goes to page ``kv_indices[kv_indptr[b] + p // page_size]``, entry ``p % page_size``, with
    ``b = batch_indices[t]`` and ``p = positions[t]``. The page tables describe the cache after the append.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``(nnz, num_kv_heads, head_dim)``; any dtype, strided but for the last dimension.
    batch_indices, positions : torch.Tensor
        ``(nnz,)`` request of each row (negative: the row is skipped) and its place in the request; see
        :func:`get_batch_indices_positions`.
    paged_kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        ``(num_pages, 2, page_size, num_kv_heads, head_dim)`` with keys before values, or a tuple of two tensors without
        the second dimension; with ``"HND"``, heads stand before entries. Without the page dimension, pages hold one
        token. Dtype of ``append_key``: nothing is converted. Any strides but the last; keys and values may differ.
    kv_indices : torch.Tensor
        ``(>= kv_indptr[-1],)`` pages of all requests, one after the other.
    kv_indptr : torch.Tensor
        ``(batch_size + 1,)`` where each request's pages begin.
    kv_last_page_len : torch.Tensor
        ``(batch_size,)`` not read: positions say the same.
    kv_layout : str
        ``"NHD"`` or ``"HND"``; another is a ``KeyError``.

    Notes
    -----
    Index tensors that are not int32 are converted; otherwise nothing is copied. A row that has no slot (a position
    beyond the pages of its request, a page outside of the cache) is an error on the CPU, and nothing is written. On
    CUDA such a row is skipped; with ``FLASHINFER_VALIDATE_INPUTS=1`` at import it is an error there too, at the price
    of waiting for the GPU, and a module built with ``FLASHINFER_JIT_DEBUG=1`` stops at a device assertion.

    Examples
    --------
    >>> k, v = torch.randn(2, 5, 8, 128)  # five tokens: three of request 0, two of request 1
    >>> cache = torch.zeros(4, 2, 16, 8, 128)  # four pages of 16 tokens
    >>> indptr, indices, last = torch.tensor([0, 1, 2]), torch.tensor([3, 0]), torch.tensor([3, 2])
    >>> lengths = flashinfer.get_seq_lens(indptr, last, 16)
    >>> b, p = flashinfer.get_batch_indices_positions(torch.tensor([0, 3, 5]), lengths, 5)
    >>> flashinfer.append_paged_kv_cache(k, v, b, p, cache, indices, indptr, last)
    """
    op = "append_paged_kv_cache"
    cache, value_cache = halves(op, "paged_kv_cache", paged_kv_cache)
    _append_paged_kv_cache(
        append_key,
        append_value,
        batch_indices,
        positions,
        cache,
        value_cache,
        kv_indices,
        kv_indptr,
        is_hnd(op, kv_layout),
    )


@flashinfer_api(trace=append_paged_mla_kv_cache_trace)
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    r"""Write compressed keys and their rotary parts into their pages, for multi-head latent attention.

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``(nnz, head_dim_ckv)`` and ``(nnz, head_dim_kpe)``, 512 and 64 in published models; one dtype.
    ckv_cache, kpe_cache : torch.Tensor
        ``(num_pages, page_size, head_dim_ckv)`` and ``(num_pages, page_size, head_dim_kpe)``, dtype of the rows.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
        As in :func:`append_paged_kv_cache`, rows without a slot included.

    Examples
    --------
    >>> ckv, kpe = torch.randn(3, 512).bfloat16(), torch.randn(3, 64).bfloat16()
    >>> pages, rope_pages = torch.zeros(1, 16, 512).bfloat16(), torch.zeros(1, 16, 64).bfloat16()
    >>> request, slot = torch.zeros(3).int(), torch.arange(3).int()
    >>> indices, indptr, last = torch.tensor([0]).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int()
    >>> flashinfer.append_paged_mla_kv_cache(ckv, kpe, request, slot, pages, rope_pages, indices, indptr, last)
    >>> torch.equal(pages[0, :3], ckv)
    True
    """
    _append_paged_mla_kv_cache(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr
    )
