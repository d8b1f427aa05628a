# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.cascade``: fp32 arithmetic, the result rounded once."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Axis, Const, Tensor, TraceTemplate, Var
from .shared import normal, seeded

__all__ = [
    "merge_state_in_place_trace",
    "merge_state_trace",
    "merge_states_trace",
    "variable_length_merge_states_trace",
]


def _merge_states_reference(v: torch.Tensor, s: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if s.shape[1] == 0:  # no maximum to take
        return v.new_zeros(v.shape[0], *v.shape[2:]), s.new_full((s.shape[0], s.shape[2]), -torch.inf).float()
    s = s.float()
    largest = s.amax(dim=1, keepdim=True)
    weights = torch.exp2(s - largest.masked_fill(largest == -torch.inf, 0))
    total = weights.sum(dim=1)
    values = v.float().masked_fill((weights == 0).unsqueeze(-1), 0)  # a state without weight may hold NaN
    merged = (values * weights.unsqueeze(-1)).sum(dim=1) / total.masked_fill(total == 0, 1).unsqueeze(-1)
    return merged.to(v.dtype), largest.squeeze(1) + torch.log2(total)


def _merge_state_reference(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _merge_states_reference(torch.stack([v_a, v_b], dim=1), torch.stack([s_a, s_b], dim=1))


def _merge_state_in_place_reference(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    merged, score = _merge_state_reference(v, s, v_other, s_other)
    score = score.to(s.dtype)
    if mask is None:
        return merged, score
    keep = mask == 0
    return torch.where(keep.view(-1, 1, 1), v, merged), torch.where(keep.view(-1, 1), s, score)


def _variable_length_merge_states_reference(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = indptr.shape[0] - 1
    merged = v.new_zeros(rows, *v.shape[1:])
    scores = s.new_full((rows, s.shape[1]), -torch.inf).float()
    for row, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        if end > begin:
            v_row, s_row = _merge_states_reference(v[begin:end].unsqueeze(0), s[begin:end].unsqueeze(0))
            merged[row], scores[row] = v_row[0], s_row[0]
    return merged, scores


def _merge_state_init(
    *, seq_len: int, num_heads: int = 32, head_dim: int = 128, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g, v, s = seeded(seed, device), (seq_len, num_heads, head_dim), (seq_len, num_heads)
    return {
        "v_a": normal(g, *v),
        "s_a": normal(g, *s, dtype=torch.float32),
        "v_b": normal(g, *v),
        "s_b": normal(g, *s, dtype=torch.float32),
    }


def _merge_state_in_place_init(
    *, seq_len: int, num_heads: int = 32, head_dim: int = 128, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g, v, s = seeded(seed, device), (seq_len, num_heads, head_dim), (seq_len, num_heads)
    return {
        "v": normal(g, *v),
        "s": normal(g, *s, dtype=torch.float32),
        "v_other": normal(g, *v),
        "s_other": normal(g, *s, dtype=torch.float32),
    }


def _merge_states_init(
    *, seq_len: int, num_states: int, num_heads: int = 32, head_dim: int = 128, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "v": normal(g, seq_len, num_states, num_heads, head_dim),
        "s": normal(g, seq_len, num_states, num_heads, dtype=torch.float32),
    }


def _variable_length_merge_states_init(
    *, seq_len: int, num_heads: int, head_dim: int, nnz: int = 0, len_indptr: int = 0, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Row i has i % 4 states."""
    lengths = torch.arange(seq_len) % 4
    nnz = int(lengths.sum())
    return {
        "v": torch.randn(nnz, num_heads, head_dim, device=device).bfloat16(),
        "s": torch.randn(nnz, num_heads, device=device),
        "indptr": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(device),
    }


_AXES: dict[str, Axis] = {"seq_len": Var(), "num_heads": Const(abbrev="h"), "head_dim": Const(abbrev="d")}
_V, _S = ("seq_len", "num_heads", "head_dim"), ("seq_len", "num_heads")
_SCORE = "log2 of the sum of exp(logit) over the keys"

merge_state_trace = TraceTemplate(
    "cascade_merge",
    axes=_AXES,
    inputs={
        "v_a": Tensor(_V),
        "s_a": Tensor(_S, dtype="float32", description=_SCORE),
        "v_b": Tensor(_V),
        "s_b": Tensor(_S, dtype="float32", description=_SCORE),
    },
    outputs={"v_merged": Tensor(_V, dtype_from="v_a"), "s_merged": Tensor(_S, dtype="float32")},
    name_prefix="merge_state",
    reference=_merge_state_reference,
    init=_merge_state_init,
    description="Attention over two sets of keys from attention over each of them.",
)

merge_state_in_place_trace = TraceTemplate(
    "cascade_merge",
    axes=_AXES,
    inputs={
        "v": Tensor(_V),
        "s": Tensor(_S, dtype="float32", description=_SCORE),
        "v_other": Tensor(_V),
        "s_other": Tensor(_S, dtype="float32", description=_SCORE),
        "mask": Tensor(("seq_len",), dtype="bool", optional=True, description="rows with 0 are left as they are"),
    },
    outputs={
        "v": Tensor(_V, param="v", dtype_from="v"),
        "s": Tensor(_S, param="s", dtype_from="s", dtype="float32"),
    },
    name_prefix="merge_state_in_place",
    reference=_merge_state_in_place_reference,
    init=_merge_state_in_place_init,
    description="Attention over two sets of keys from attention over each of them, written over the first.",
)

merge_states_trace = TraceTemplate(
    "cascade_merge",
    axes={**_AXES, "num_states": Var("sets of keys")},
    inputs={
        "v": Tensor(("seq_len", "num_states", "num_heads", "head_dim")),
        "s": Tensor(("seq_len", "num_states", "num_heads"), dtype="float32", description=_SCORE),
    },
    outputs={"v_merged": Tensor(_V, dtype_from="v"), "s_merged": Tensor(_S, dtype="float32")},
    name_prefix="merge_states",
    reference=_merge_states_reference,
    init=_merge_states_init,
    description="Attention over many sets of keys from attention over each of them.",
)

variable_length_merge_states_trace = TraceTemplate(
    "cascade_merge",
    axes={**_AXES, "nnz": Var("states of all rows"), "len_indptr": Var("seq_len + 1")},
    inputs={
        "v": Tensor(("nnz", "num_heads", "head_dim")),
        "s": Tensor(("nnz", "num_heads"), dtype="float32", description=_SCORE),
        "indptr": Tensor(("len_indptr",), dtype="int32", description="where the states of each row begin"),
    },
    outputs={"v_merged": Tensor(_V, dtype_from="v"), "s_merged": Tensor(_S, dtype="float32")},
    name_prefix="variable_length_merge_states",
    reference=_variable_length_merge_states_reference,
    init=_variable_length_merge_states_init,
    constraints=["len_indptr == seq_len + 1"],
    description="Attention over many sets of keys from attention over each of them, a number of sets for every row.",
)
