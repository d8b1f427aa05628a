# SPDX-License-Identifier: Apache-2.0
"""Request and position of each token of a ragged batch."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.checks import as_int32, check_shape_dtype_device
from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.page import get_batch_indices_positions_trace, get_seq_lens_trace
from .modules import get_page_module

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)  # integer types that torch can subtract


@register_custom_op("flashinfer::get_batch_indices_positions", mutates_args=("batch_indices", "positions"))
def _get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    indptr, lengths = as_int32("get_batch_indices_positions", append_indptr=append_indptr, seq_lens=seq_lens)
    get_page_module(backend_of(append_indptr)).get_batch_indices_positions(indptr, lengths, batch_indices, positions)


def _buffer(name: str, buffer: Optional[torch.Tensor], nnz: int, like: torch.Tensor) -> torch.Tensor:
    if buffer is None:
        return like.new_empty(nnz, dtype=torch.int32)  # torch.empty with a device: 0.2 us more
    check_shape_dtype_device(buffer, (nnz,), torch.int32, like.device, f"get_batch_indices_positions: {name}")
    return buffer


@flashinfer_api(trace=get_batch_indices_positions_trace)
@explain_type_errors
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: Optional[torch.Tensor] = None,
    positions: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Compute the request and the position of each appended token.

    Parameters
    ----------
    append_indptr : torch.Tensor
        ``(batch_size + 1,)``; rows ``append_indptr[b]`` to ``append_indptr[b + 1]`` belong to request ``b``. Offsets
        rise; those on a GPU are not looked at, and where they fall the result means nothing.
    seq_lens : torch.Tensor
        ``(batch_size,)`` lengths after the append; see :func:`get_seq_lens`.
    nnz : int
        Number of rows.
    batch_indices, positions : Optional[torch.Tensor]
        ``(nnz,)`` int32 buffers to write to, such as those of a captured graph.

    Returns
    -------
    Tuple[torch.Tensor, torch.Tensor]
        ``batch_indices`` and ``positions``, int32 ``(nnz,)``: row ``t`` of request ``b`` has position
        ``t + seq_lens[b] - append_indptr[b + 1]``. Rows of no request have -1 and 0: an append skips them.

    Examples
    --------
    >>> flashinfer.get_batch_indices_positions(torch.tensor([0, 3, 5]), torch.tensor([3, 8]), 6)
    (tensor([ 0,  0,  0,  1,  1, -1], dtype=torch.int32), tensor([0, 1, 2, 6, 7, 0], dtype=torch.int32))
    """
    if not 0 <= nnz < 2**31:
        raise ArgumentError(f"get_batch_indices_positions: nnz must be 0 or more and less than 2**31, got {nnz}")
    batch_indices = _buffer("batch_indices", batch_indices, nnz, append_indptr)
    positions = _buffer("positions", positions, nnz, append_indptr)
    _get_batch_indices_positions(append_indptr, seq_lens, batch_indices, positions)
    return batch_indices, positions


@flashinfer_api(trace=get_seq_lens_trace)
@explain_type_errors
def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    r"""Compute the number of tokens of each request in a paged cache, on any device, without a compiled module.

    Parameters
    ----------
    kv_indptr : torch.Tensor
        ``(batch_size + 1,)`` where each request's pages begin. Offsets rise; those on a GPU are not looked at, and a
        request whose offsets fall has no pages there.
    kv_last_page_len : torch.Tensor
        ``(batch_size,)`` entries in use of the last page; 0 for a request without pages.
    page_size : int
        Tokens per page.

    Returns
    -------
    torch.Tensor
        ``(batch_size,)``: ``max(pages - 1, 0) * page_size + kv_last_page_len``.

    Examples
    --------
    >>> flashinfer.get_seq_lens(torch.tensor([0, 2, 3]), torch.tensor([5, 16]), 16)  # two pages, then one
    tensor([21, 16])
    """
    for name, numbers in (("kv_indptr", kv_indptr), ("kv_last_page_len", kv_last_page_len)):
        if numbers.dtype not in _INTEGERS:
            raise ArgumentError(
                f"get_seq_lens: {name} must have an integer dtype (best torch.int32), got {numbers.dtype}"
            )
    if kv_last_page_len.ndim != 1 or kv_indptr.shape != (kv_last_page_len.shape[0] + 1,):
        raise ArgumentError(
            "get_seq_lens: kv_indptr and kv_last_page_len must have shapes (batch_size + 1,) and (batch_size,), got "
            f"{tuple(kv_indptr.shape)} and {tuple(kv_last_page_len.shape)}"
        )
    if kv_indptr.device.type == "cpu" and not torch.compiler.is_compiling():
        falls = (kv_indptr[1:] < kv_indptr[:-1]).nonzero()
        if len(falls):
            at = int(falls[0])
            raise ArgumentError(
                f"get_seq_lens: kv_indptr must be non-decreasing, got kv_indptr[{at}] = {int(kv_indptr[at])} and "
                f"kv_indptr[{at + 1}] = {int(kv_indptr[at + 1])}"
            )
    full_pages = torch.clamp(kv_indptr[1:] - kv_indptr[:-1] - 1, min=0)
    return full_pages * page_size + kv_last_page_len
