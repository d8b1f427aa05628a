# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.topk`` and ``flashinfer.topk_varlen``.

A reference lists what it selects by ascending index, or by descending value where that is asked for. The kernels do so
with ``deterministic=True``, which the arguments of ``init`` have; otherwise any order is right.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var

__all__ = ["top_k_page_table_transform_trace", "top_k_ragged_transform_trace", "top_k_trace", "top_k_varlen_trace"]


def _select(scores: torch.Tensor, k: int, tie_break: int) -> torch.Tensor:
    """Indices of the k largest numbers of a row, ascending; NaN counts as the largest. ``tie_break`` 2 prefers large
    indices among equals, anything else small ones."""
    if tie_break == 2:
        return len(scores) - 1 - _select(scores.flip(0), k, 1).flip(0)
    # A NaN of either sign is the largest; torch.sort on CUDA places them by their bits.
    scores = torch.where(scores.isnan(), torch.nan, scores.float())
    return torch.sort(scores, descending=True, stable=True).indices[:k].sort().values


def _top_k_reference(
    input: torch.Tensor, k: int, sorted: bool = False, deterministic: bool = False, tie_break: int = 0, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    k = min(k, input.shape[1])
    indices = torch.zeros(input.shape[0], k, dtype=torch.int64, device=input.device)
    for row in range(input.shape[0]):
        indices[row] = _select(input[row], k, tie_break)
    values = input.gather(1, indices)
    if sorted:
        numbers = torch.where(values.isnan(), torch.nan, values.float())
        order = torch.sort(numbers, dim=1, descending=True, stable=True).indices
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def _select_windows(
    input: torch.Tensor, lengths: torch.Tensor, k: int, tie_break: int, row_starts: Optional[torch.Tensor]
) -> torch.Tensor:
    """Indices relative to the window of each row, ascending, then -1."""
    indices = torch.full((input.shape[0], k), -1, dtype=torch.int32, device=input.device)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[row])
        chosen = _select(input[row, start : start + max(length, 0)], k, tie_break)
        indices[row, : len(chosen)] = chosen.int()
    return indices


def _top_k_ragged_transform_reference(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    row_starts: Optional[torch.Tensor] = None,
    **_: Any,
) -> torch.Tensor:
    indices = _select_windows(input, lengths, k, tie_break, row_starts)
    return torch.where(indices >= 0, indices + offsets.unsqueeze(1), indices)


def _top_k_page_table_transform_reference(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: Optional[torch.Tensor] = None,
    deterministic: bool = False,
    tie_break: int = 0,
    row_starts: Optional[torch.Tensor] = None,
    page_table_row_starts: Optional[torch.Tensor] = None,
    page_size: int = 1,
    **_: Any,
) -> torch.Tensor:
    indices = _select_windows(input, lengths, k, tie_break, row_starts)
    out = indices.clone()
    first = row_starts if page_table_row_starts is None else page_table_row_starts
    for row in range(input.shape[0]):
        chosen = indices[row][indices[row] >= 0]
        pages = src_page_table[row if row_to_batch is None else int(row_to_batch[row])]
        entries = chosen // page_size + (0 if first is None else int(first[row]))
        out[row, : len(chosen)] = pages[entries] * page_size + chosen % page_size
    return out


def _top_k_varlen_reference(
    logits: torch.Tensor, seq_lens: torch.Tensor, top_k: int, compress_ratio: int = 1, next_n: int = 1, **_: Any
) -> torch.Tensor:
    row = torch.arange(logits.shape[0], device=logits.device)
    lengths = (seq_lens[row // next_n] - next_n + row % next_n + 1) // compress_ratio
    return _select_windows(logits, lengths.clamp(0, logits.shape[1]), top_k, 0, None)


def _top_k_init(batch_size: int = 2, vocab_size: int = 128, device: str = "cpu") -> dict[str, Any]:
    logits = torch.randn(batch_size, vocab_size, device=device)
    return {"input": logits, "sorted": True, "deterministic": True}


def _windows_init(batch_size: int = 2, max_len: int = 4096, device: str = "cpu") -> dict[str, Any]:
    return {
        "input": torch.randn(batch_size, max_len, device=device),
        "offsets": torch.arange(batch_size, dtype=torch.int32, device=device) * max_len,
        "lengths": torch.randint(0, max_len + 1, (batch_size,), dtype=torch.int32, device=device),
        "src_page_table": torch.randint(0, 10000, (batch_size, max_len), dtype=torch.int32, device=device),
        "deterministic": True,
        "row_to_batch": None,
        "row_starts": None,
        "page_table_row_starts": None,
    }


def _varlen_init(batch_size: int = 2, max_len: int = 4096, device: str = "cpu") -> dict[str, Any]:
    lengths = torch.randint(0, max_len + 1, (batch_size,), dtype=torch.int32, device=device)
    return {"logits": torch.randn(batch_size, max_len, device=device), "seq_lens": lengths}


_K = Const("elements taken of each row", abbrev="k")
_TIE_BREAK = Scalar("int32", optional=True, description="1 prefers small indices among equals, 2 large ones")
_DETERMINISTIC = Scalar("bool", optional=True, description="list by ascending index instead of in any order")
_ROWS: dict[str, Axis] = {"batch_size": Var("rows"), "max_len": Const("columns of the scores", abbrev="n"), "k": _K}
_SCORES = Tensor(("batch_size", "max_len"), description="the window of a row is what counts")
_LENGTHS = Tensor(("batch_size",), dtype="int32", description="columns of each window")
_STARTS = Tensor(("batch_size",), dtype="int32", optional=True, description="first column of each window")

top_k_trace = TraceTemplate(
    "topk",
    axes={"batch_size": Var(), "vocab_size": Const(abbrev="v"), "k": _K},
    inputs={
        "input": Tensor(("batch_size", "vocab_size")),
        "sorted": Scalar("bool", optional=True, description="list by descending value"),
        "deterministic": _DETERMINISTIC,
        "tie_break": _TIE_BREAK,
    },
    outputs={
        "values": Tensor(("batch_size", "k"), dtype_from="input"),
        "indices": Tensor(("batch_size", "k"), dtype="int64"),
    },
    name_prefix="top_k",
    reference=_top_k_reference,
    init=_top_k_init,
    description="The k largest elements of each row.",
)

top_k_page_table_transform_trace = TraceTemplate(
    "topk",
    axes={**_ROWS, "num_requests": Var(), "max_pages": Var("entries of a row of the page table")},
    inputs={
        "input": _SCORES,
        "src_page_table": Tensor(("num_requests", "max_pages"), dtype="int32"),
        "lengths": _LENGTHS,
        "row_to_batch": Tensor(("batch_size",), dtype="int32", optional=True, description="row of the page table"),
        "deterministic": _DETERMINISTIC,
        "tie_break": _TIE_BREAK,
        "row_starts": _STARTS,
        "page_table_row_starts": Tensor(("batch_size",), dtype="int32", optional=True, description="first page"),
        "page_size": Scalar("int32", optional=True),
    },
    outputs={"slots": Tensor(("batch_size", "k"), dtype="int32", param="out")},
    name_prefix="top_k_page_table_transform",
    reference=_top_k_page_table_transform_reference,
    init=_windows_init,
    description="Where in a paged cache the k largest scores of each row are; -1 where there are fewer.",
)

top_k_ragged_transform_trace = TraceTemplate(
    "topk",
    axes=_ROWS,
    inputs={
        "input": _SCORES,
        "offsets": Tensor(("batch_size",), dtype="int32", description="added to the indices of a row"),
        "lengths": _LENGTHS,
        "deterministic": _DETERMINISTIC,
        "tie_break": _TIE_BREAK,
        "row_starts": _STARTS,
    },
    outputs={"indices": Tensor(("batch_size", "k"), dtype="int32")},
    name_prefix="top_k_ragged_transform",
    reference=_top_k_ragged_transform_reference,
    init=_windows_init,
    description="Where in a ragged batch the k largest scores of each row are; -1 where there are fewer.",
)

top_k_varlen_trace = TraceTemplate(
    "topk",
    axes={"batch_size": Var("rows"), "num_requests": Var(), "max_len": _ROWS["max_len"], "top_k": _K},
    inputs={
        "logits": _SCORES,
        "seq_lens": Tensor(("num_requests",), dtype="int32", description="of each request"),
        "compress_ratio": Scalar("int32", optional=True, description="a row has a column for so many tokens"),
        "next_n": Scalar("int32", optional=True, description="rows of a request"),
    },
    outputs={"indices": Tensor(("batch_size", "top_k"), dtype="int32", param="out_indices")},
    name_prefix="top_k_varlen",
    reference=_top_k_varlen_reference,
    init=_varlen_init,
    description="Columns of the k largest logits of rows of various lengths; -1 where there are fewer.",
)
