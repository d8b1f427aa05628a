# SPDX-License-Identifier: Apache-2.0
"""Selection of the k largest elements of rows, and their positions in a paged or ragged batch.

Elements are selected by value and, among equal values, by index: the smaller first, or the larger if ``tie_break``
says so. NaN is larger than any number, and the two zeros are equal.
"""

from __future__ import annotations

from enum import IntEnum
from numbers import Integral
from typing import Optional

import torch

from .._compat.unsupported import needs
from .._runtime.allocation import new_empty
from .._runtime.checks import check_tensors
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.integer_math import round_up
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..topk_varlen import top_k_varlen
from ..trace.templates.topk import top_k_page_table_transform_trace, top_k_ragged_transform_trace, top_k_trace
from .launch import get_num_cached_for_topk as get_num_cached_for_topk
from .launch import get_topk_module, plan

__all__ = ["TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform", "top_k_varlen"]

_ANY, _BY_INDEX, _BY_VALUE = 0, 1, 2  # TopKOrder of topk.h
_MAX_PAGE_SIZE = 1 << 30

_native_top_k = NativeFunction(get_topk_module, "top_k")
_native_top_k_page_table_transform = NativeFunction(get_topk_module, "top_k_page_table_transform")
_native_top_k_ragged_transform = NativeFunction(get_topk_module, "top_k_ragged_transform")


class TopKTieBreak(IntEnum):
    """Tie-break: the choice among elements equal to the k-th largest."""

    NONE = 0  #: no preference; the same as SMALL
    SMALL = 1  #: those with the smallest indices
    LARGE = 2  #: those with the largest indices

    def __str__(self) -> str:
        return self.name.lower()


def roundup_kbyte(x: int) -> int:
    """Round ``x`` bytes up to whole KiB; returns bytes."""
    return round_up(x, 1024)


def can_implement_filtered_topk() -> bool:
    """Return True: tie-breaks and windows of rows are supported on every device."""
    return True


def can_use_clusters_topk(*args: object, **kwargs: object) -> bool:
    """Return False: this package has no Blackwell kernels."""
    return False


_CLUSTERS = "kernels for Blackwell GPUs (SM100), which this package does not have"
get_fast_topk_clusters = needs("get_fast_topk_clusters", _CLUSTERS)
topk_clusters_exact = needs("topk_clusters_exact", _CLUSTERS)
topk_clusters_page_table_transform = needs("topk_clusters_page_table_transform", _CLUSTERS)
topk_clusters_ragged_transform = needs("topk_clusters_ragged_transform", _CLUSTERS)


def _integer(op: str, name: str, x: int) -> int:
    if type(x) is int or isinstance(x, torch.SymInt):
        return x
    if not isinstance(x, Integral):
        raise TypeError(f"{op}: {name} must be an int, got a {type(x).__name__}")
    return int(x)


def _checked(op: str, input: torch.Tensor, k: int) -> int:
    """Validate k and the rank of the input, which determine the outputs; the launcher checks the rest."""
    k = _integer(op, "k", k)
    try:
        rank = input.dim()
    except AttributeError:
        check_tensors(op, input=input)
        raise
    if rank != 2:
        raise ArgumentError(f"{op}: input must have 2 dimensions, got {rank}")
    if not 1 <= k < 2**31:
        raise ArgumentError(f"{op}: k must be at least 1 and less than 2**31, got {k}")
    return k


def _prefers_large(op: str, tie_break: int) -> bool:
    if tie_break not in (0, 1, 2):
        raise ArgumentError(f"{op}: tie_break must be a TopKTieBreak: none, small or large, got {tie_break!r}")
    return tie_break == 2


# Destination-passing ops: torch.compile puts them into graphs, eager mode calls them directly.


@register_custom_op("flashinfer::radix_topk", mutates_args=("values", "indices"))
@called("top_k")
def _top_k(
    values: torch.Tensor, indices: torch.Tensor, input: torch.Tensor, k: int, order: int, prefer_large: bool
) -> None:
    capacity, blocks = plan(input, k)
    by_torch = order == _BY_VALUE and input.is_cuda and capacity < k
    order = _BY_INDEX if by_torch else order
    _native_top_k[input.is_cuda](values, indices, input, k, order, prefer_large, capacity, blocks)
    if by_torch:  # too many elements to sort in shared memory
        ordered, permutation = torch.sort(values, dim=1, descending=True, stable=True)
        values.copy_(ordered)
        indices.copy_(indices.gather(1, permutation))


@register_custom_op("flashinfer::radix_topk_page_table_transform", mutates_args=("out", "out_raw_indices"))
@called("top_k_page_table_transform")
def _top_k_page_table_transform(
    out: torch.Tensor,
    out_raw_indices: Optional[torch.Tensor],
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    row_to_batch: Optional[torch.Tensor],
    row_starts: Optional[torch.Tensor],
    page_table_row_starts: Optional[torch.Tensor],
    k: int,
    page_shift: int,
    order: int,
    prefer_large: bool,
) -> None:
    _native_top_k_page_table_transform[input.is_cuda](
        out,
        out_raw_indices,
        input,
        src_page_table,
        lengths,
        row_to_batch,
        row_starts,
        page_table_row_starts,
        k,
        page_shift,
        order,
        prefer_large,
        *plan(input, k),
    )


@register_custom_op("flashinfer::radix_topk_ragged_transform", mutates_args=("out",))
@called("top_k_ragged_transform")
def _top_k_ragged_transform(
    out: torch.Tensor,
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    row_starts: Optional[torch.Tensor],
    k: int,
    order: int,
    prefer_large: bool,
) -> None:
    _native_top_k_ragged_transform[input.is_cuda](
        out, input, offsets, lengths, row_starts, k, order, prefer_large, *plan(input, k)
    )


# The public functions.


@flashinfer_api(trace=top_k_trace)
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Select the k largest elements of each row.

    Parameters
    ----------
    input : torch.Tensor
        ``(rows, d)``, float32, float16 or bfloat16; the last dimension is contiguous.
    k : int
        At least 1. Where it is ``d`` or more, all ``d`` elements are taken, in their natural order unless ``sorted``.
    sorted : bool
        List by descending value, and equal values by ascending index.
    deterministic : bool
        List in an order that is the same in every call: by ascending index, unless ``sorted``.
    tie_break : TopKTieBreak
        Which of the elements equal to the k-th largest are taken.
    dsa_graph_safe : bool
        Accepted for compatibility: every call can be captured in a CUDA graph.

    Returns
    -------
    values : torch.Tensor
        ``(rows, min(k, d))``, dtype of ``input``. The sign of a zero and the bits of a NaN may be others than there.
    indices : torch.Tensor
        ``(rows, min(k, d))``, int64.

    Examples
    --------
    >>> logits = torch.randn(4, 128256)
    >>> values, indices = flashinfer.top_k(logits, 50, sorted=True)
    """
    k = _checked("top_k", input, k)
    rows, d = input.shape
    taken = k if k < d else d
    values, indices = new_empty(input, input.dtype, rows, taken), new_empty(input, torch.int64, rows, taken)
    order = _BY_VALUE if sorted else _BY_INDEX if deterministic else _ANY
    if d > 0:
        _top_k(values, indices, input, taken, order, _prefers_large("top_k", tie_break))
    return values, indices


topk = top_k


@flashinfer_api(trace=top_k_page_table_transform_trace)
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Optional[torch.Tensor] = None,
    page_table_row_starts: Optional[torch.Tensor] = None,
    *,
    page_size: int = 1,
    out: Optional[torch.Tensor] = None,
    out_raw_indices: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""Select the k largest scores of each row and return their positions in a paged cache.

    Row ``i`` reads its columns ``[row_starts[i], row_starts[i] + lengths[i])``. For each of the k largest, at ``r``
    within that window, it returns ``src_page_table[b, e] * page_size + r % page_size`` with
    ``e = page_table_row_starts[i] + r // page_size`` and ``b = row_to_batch[i]``. A window of at most ``k`` columns is
    listed in order; ``-1`` fills what is left. A window that its row of the page table does not cover is an error on
    the CPU; on CUDA what is not covered gives ``-1``.

    Parameters
    ----------
    input : torch.Tensor
        Scores ``(rows, max_len)``, float32, float16 or bfloat16. The last dimension is contiguous; rows may lie apart.
    src_page_table : torch.Tensor
        ``(requests, max_pages)``, int32, last dimension contiguous.
    lengths : torch.Tensor
        ``(rows,)``, int32. Here and below such tensors are contiguous.
    k : int
        At least 1.
    row_to_batch : Optional[torch.Tensor]
        ``(rows,)``, int32: row of the page table; default: the same row.
    deterministic : bool
        List by ascending ``r`` instead of in any order.
    tie_break : TopKTieBreak
        Which of the scores equal to the k-th largest are taken.
    dsa_graph_safe : bool
        Accepted for compatibility: every call can be captured in a CUDA graph.
    row_starts : Optional[torch.Tensor]
        ``(rows,)``, int32; default 0.
    page_table_row_starts : Optional[torch.Tensor]
        ``(rows,)``, int32: entry of the window's first page. Default: ``row_starts``, which only ``page_size = 1`` has.
    page_size : int
        A power of two.
    out : Optional[torch.Tensor]
        ``(rows, k)``, int32, contiguous; written and returned.
    out_raw_indices : Optional[torch.Tensor]
        As ``out``: receives ``r``, or -1.

    Returns
    -------
    torch.Tensor
        ``(rows, k)``, int32.

    Examples
    --------
    >>> scores, lengths = torch.randn(2, 4096), torch.tensor([100, 4096], dtype=torch.int32)
    >>> pages = torch.arange(2 * 64, dtype=torch.int32).view(2, 64)
    >>> slots = flashinfer.top_k_page_table_transform(scores, pages, lengths, 512, page_size=64)
    """
    op = "top_k_page_table_transform"
    k, page_size = _checked(op, input, k), _integer(op, "page_size", page_size)
    if not 1 <= page_size <= _MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ArgumentError(f"{op}: page_size must be a power of two in [1, 2^30], got {page_size}")
    if page_size > 1 and row_starts is not None and page_table_row_starts is None:
        raise ArgumentError(
            f"{op}: page_table_row_starts must be a tensor (row_starts may lie inside a page of {page_size}), got None"
        )
    if out is None:
        out = new_empty(input, torch.int32, input.shape[0], k)
    _top_k_page_table_transform(
        out,
        out_raw_indices,
        input,
        src_page_table,
        lengths,
        row_to_batch,
        row_starts,
        page_table_row_starts,
        k,
        page_size.bit_length() - 1,
        _BY_INDEX if deterministic else _ANY,
        _prefers_large(op, tie_break),
    )
    return out


@flashinfer_api(trace=top_k_ragged_transform_trace)
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""Select the k largest scores of each row and return their positions in a ragged batch.

    Like :func:`top_k_page_table_transform`, but returns ``r + offsets[i]``.

    Parameters
    ----------
    input : torch.Tensor
        Scores ``(rows, max_len)``, float32, float16 or bfloat16. Rows may lie apart, as in a buffer that is wider.
    offsets : torch.Tensor
        ``(rows,)``, int32.
    lengths : torch.Tensor
        ``(rows,)``, int32.
    k : int
        At least 1.
    deterministic, tie_break, dsa_graph_safe, row_starts
        As for :func:`top_k_page_table_transform`.

    Returns
    -------
    torch.Tensor
        ``(rows, k)``, int32; -1 where a window has fewer than ``k`` columns.

    Examples
    --------
    >>> scores, lengths = torch.randn(2, 4096), torch.tensor([100, 4096], dtype=torch.int32)
    >>> offsets = torch.tensor([0, 100], dtype=torch.int32)
    >>> tokens = flashinfer.top_k_ragged_transform(scores, offsets, lengths, 512)
    """
    op = "top_k_ragged_transform"
    k = _checked(op, input, k)
    out = new_empty(input, torch.int32, input.shape[0], k)
    order, prefer_large = _BY_INDEX if deterministic else _ANY, _prefers_large(op, tie_break)
    _top_k_ragged_transform(out, input, offsets, lengths, row_starts, k, order, prefer_large)
    return out
