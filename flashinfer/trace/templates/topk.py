# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.topk`` and ``flashinfer.topk_varlen``.

A reference lists what it selects by ascending index, or by descending value where that is asked for. The kernels do so
with ``deterministic=True``, which the arguments of ``init`` have; otherwise any order is right.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..check import default_check
from ..notation import template_of_text
from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .shared import normal, randint, seeded

__all__ = [
    "top_k_page_table_transform_trace",
    "top_k_ragged_transform_trace",
    "top_k_trace",
    "top_k_varlen_dispatch",
    "top_k_varlen_trace",
]


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
    dsa_graph_safe: bool = False,
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
    dsa_graph_safe: bool = False,
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
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: Optional[torch.Tensor] = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    **_: Any,
) -> torch.Tensor:
    row = torch.arange(logits.shape[0], device=logits.device)
    lengths = (seq_lens[row // next_n] - next_n + row % next_n + 1) // compress_ratio
    return _select_windows(logits, lengths.clamp(0, logits.shape[1]), top_k, 0, None)


def _top_k_init(
    *, batch_size: int = 2, vocab_size: int = 128, k: int = 8, device: Any = "cpu", seed: int = 0
) -> dict[str, Any]:
    logits = normal(seeded(seed, device), batch_size, vocab_size, dtype=torch.float32)
    return {"input": logits, "k": k, "sorted": True, "deterministic": True}


def _top_k_ragged_transform_init(
    *, num_rows: int, max_len: int = 64, k: int = 8, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, num_rows, max_len, dtype=torch.float32),
        "offsets": torch.arange(num_rows, dtype=torch.int32, device=device) * max_len,
        "lengths": randint(g, max_len + 1, num_rows),
        "k": k,
    }


def _top_k_page_table_transform_init(
    *,
    num_rows: int,
    max_len: int = 64,
    batch_size: int = 4,
    max_pages_per_seq: int = 64,
    k: int = 8,
    page_size: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """A table that has a row for each row of scores, and an entry for each column."""
    g = seeded(seed, device)
    table = (max(batch_size, num_rows), max(max_pages_per_seq, -(-max_len // page_size)))
    return {
        "input": normal(g, num_rows, max_len, dtype=torch.float32),
        "src_page_table": randint(g, 10000, *table),
        "lengths": randint(g, max_len + 1, num_rows),
        "k": k,
        "page_size": page_size,
    }


def _top_k_varlen_init(
    *, batch_size: int, max_seq_len: int = 8192, top_k: int = 1024, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "logits": normal(g, batch_size, max_seq_len),
        "seq_lens": randint(g, max_seq_len + 1, batch_size, low=1),
        "top_k": top_k,
        "backend": "radix_cutlass",
    }


def _sorted_rows(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: _sorted_rows(value) for name, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_sorted_rows(value) for value in outputs)
    return outputs.sort(dim=-1).values


def _top_k_transform_check(reference_outputs: Any, actual_outputs: Any, **tolerances: Any) -> bool:
    """A row may be listed in any order."""
    return default_check(_sorted_rows(reference_outputs), _sorted_rows(actual_outputs), **tolerances)


def _first_tensor(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return next(iter(outputs.values()))
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def _top_k_varlen_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    logits: Optional[torch.Tensor] = None,
    seq_lens: Optional[torch.Tensor] = None,
    top_k: Optional[int] = None,
    **tolerances: Any,
) -> bool:
    """With the logits, any choice among ties is right: the values that are selected are compared."""
    if logits is None:
        return default_check(_sorted_rows(reference_outputs), _sorted_rows(actual_outputs), **tolerances)
    expected, actual = _first_tensor(reference_outputs), _first_tensor(actual_outputs)
    if expected.shape != actual.shape or not torch.equal((expected < 0).sum(dim=-1), (actual < 0).sum(dim=-1)):
        return False
    listed = [row[row >= 0] for row in actual]
    if any(len(row.unique()) != len(row) or bool((row >= logits.shape[1]).any()) for row in listed):
        return False
    if seq_lens is not None and any(
        bool((row >= length).any()) for row, length in zip(listed, seq_lens.tolist(), strict=True)
    ):
        return False
    values = [
        logits.float().gather(1, chosen.long().clamp(min=0)).masked_fill(chosen < 0, -torch.inf).sort(dim=-1).values
        for chosen in (expected, actual)
    ]
    return torch.equal(*values)


_K = Const("elements taken of each row", abbrev="k")
_TIE_BREAK = Scalar("int32", optional=True, description="1 prefers small indices among equals, 2 large ones")
_DETERMINISTIC = Scalar("bool", optional=True, description="list by ascending index instead of in any order")
top_k_trace = TraceTemplate(
    "topk",
    axes={"batch_size": Var(), "vocab_size": Const(abbrev="v"), "k": _K},
    inputs={
        "input": Tensor(("batch_size", "vocab_size")),
        "k": Scalar("int32", description="elements taken of each row"),
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

_NOTES = {
    "k": "elements taken of each row",
    "top_k": "elements taken of each row",
    "lengths": "columns of each window",
    "row_starts": "first column of each window",
    "page_table_row_starts": "first page",
    "row_to_batch": "row of the page table",
    "offsets": "added to the indices of a row",
    "deterministic": "list by ascending index instead of in any order",
    "tie_break": "1 prefers small indices among equals, 2 large ones",
}

top_k_page_table_transform_trace = template_of_text(
    "top_k_page_table_transform_k{k}_ps{page_size}",
    "sampling",
    var="num_rows max_len batch_size max_pages_per_seq",
    inputs="input[num_rows, max_len]; src_page_table[batch_size, max_pages_per_seq]; lengths[num_rows]; k:int32;"
    "row_to_batch[num_rows]:int32?; row_starts[num_rows]:int32?; page_table_row_starts[num_rows]:int32?;"
    "page_size:int32",
    outputs="indices[num_rows, k]:int32",
    notes=_NOTES,
    reference=_top_k_page_table_transform_reference,
    check=_top_k_transform_check,
    init=_top_k_page_table_transform_init,
    description="Where in a paged cache the k largest scores of each row are; -1 where there are fewer.",
)

top_k_ragged_transform_trace = template_of_text(
    "top_k_ragged_transform_k{k}",
    "sampling",
    var="num_rows max_len",
    inputs="input[num_rows, max_len]; offsets[num_rows]; lengths[num_rows]; k:int32; deterministic:int32?;"
    "tie_break:int32?; dsa_graph_safe:int32?",
    outputs="indices[num_rows, k]:int32",
    notes=_NOTES,
    reference=_top_k_ragged_transform_reference,
    check=_top_k_transform_check,
    init=_top_k_ragged_transform_init,
    description="Where in a ragged batch the k largest scores of each row are; -1 where there are fewer.",
)

top_k_varlen_trace = template_of_text(
    "top_k_varlen_n{max_seq_len}_k{top_k}",
    "topk",
    var="batch_size",
    inputs="logits[batch_size, max_seq_len]; seq_lens[batch_size]; top_k:int32; pre_idx[batch_size, top_k]:int32?",
    outputs="indices[batch_size, top_k]<-out_indices:int32",
    notes=_NOTES,
    reference=_top_k_varlen_reference,
    check=_top_k_varlen_check,
    init=_top_k_varlen_init,
    description="Columns of the k largest logits of rows of various lengths; -1 where there are fewer.",
)
_drafted = template_of_text(
    "top_k_varlen_next_n{max_seq_len}_k{top_k}",
    "topk",
    var="batch_size num_requests",
    inputs="logits[batch_size, max_seq_len]; seq_lens[num_requests]; top_k:int32; compress_ratio:int32?; next_n:int32?",
    outputs="indices[batch_size, top_k]<-out_indices:int32",
    notes={
        **_NOTES,
        "compress_ratio": "a row has a column for so many tokens",
        "next_n": "rows of a request",
    },
    reference=_top_k_varlen_reference,
    check=_top_k_varlen_check,
    description="The same for several rows of a request, or columns that stand for several tokens.",
)


def _choose_varlen(**arguments: Any) -> TraceTemplate:
    """The published definition has one row for each request, and one column for each token."""
    plain = arguments.get("next_n", 1) == 1 and arguments.get("compress_ratio", 1) == 1
    return top_k_varlen_trace if plain else _drafted


top_k_varlen_dispatch = TraceDispatch(_choose_varlen, (top_k_varlen_trace, _drafted))
