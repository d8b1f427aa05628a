# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.rope``; formulas in include/flashinfer/rope.h.

Angles are fp64: what remains is the error of the kernel under test. The rotation is fp32 with one rounding at the end.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var, by_rank

__all__ = [
    "apply_llama31_rope_inplace_trace",
    "apply_llama31_rope_pos_ids_inplace_trace",
    "apply_llama31_rope_pos_ids_trace",
    "apply_llama31_rope_trace",
    "apply_rope_inplace_trace",
    "apply_rope_pos_ids_inplace_trace",
    "apply_rope_pos_ids_trace",
    "apply_rope_trace",
    "apply_rope_with_cos_sin_cache_inplace_trace",
    "apply_rope_with_cos_sin_cache_trace",
    "rotate",
]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Turn the pairs of the last dimension, fp32; cos and sin are (tokens, pairs), and the columns beyond are kept."""
    x, tail = x.float().split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    cos, sin = (t.float().view(t.shape[0], *(1,) * (x.ndim - 2), t.shape[1]) for t in (cos, sin))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleave else torch.cat(pair, dim=-1)
    return torch.cat([turned, tail], dim=-1)


def _frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> torch.Tensor:
    """What each pair turns per position, fp64."""
    return rope_theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim) / rope_scale


def _llama31_frequencies(
    rotary_dim: int, rope_scale: float, rope_theta: float, low: float, high: float, old_context_len: float
) -> torch.Tensor:
    """Frequencies with few turns over the old context are stretched, those with many are kept."""
    frequency = _frequencies(rotary_dim, 1.0, rope_theta)
    turns = old_context_len * frequency / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequency / rope_scale + smooth * frequency


def _ragged_positions(indptr: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Token indptr[b] + i has position offsets[b] + i. The tokens of the batch are those up to indptr[-1]."""
    starts, token = indptr.long(), torch.arange(int(indptr[-1]), device=indptr.device)
    request = torch.searchsorted(starts, token, right=True) - 1
    return offsets.long()[request] + token - starts[request]


def _rotated_pair(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, frequency: torch.Tensor, interleave: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = positions.double()[:, None] * frequency.to(q.device)
    cos, sin = angle.cos(), angle.sin()
    return rotate(q, cos, sin, interleave).to(q.dtype), rotate(k, cos, sin, interleave).to(k.dtype)


def _apply_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = _frequencies(rotary_dim or q.shape[-1], rope_scale, rope_theta)
    return _rotated_pair(q, k, _ragged_positions(indptr, offsets), frequency, interleave)


def _apply_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = _frequencies(rotary_dim or q.shape[-1], rope_scale, rope_theta)
    return _rotated_pair(q, k, pos_ids, frequency, interleave)


def _apply_llama31_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = _llama31_frequencies(
        rotary_dim or q.shape[-1], rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len
    )
    return _rotated_pair(q, k, _ragged_positions(indptr, offsets), frequency, interleave)


def _apply_llama31_rope_pos_ids_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = _llama31_frequencies(
        rotary_dim or q.shape[-1], rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len
    )
    return _rotated_pair(q, k, pos_ids, frequency, interleave)


def _apply_rope_with_cos_sin_cache_reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin_cache[positions.long()].chunk(2, dim=-1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(positions.shape[0], x.numel() // max(1, positions.shape[0] * head_size), head_size)
        return rotate(heads, cos, sin, not is_neox).to(x.dtype).view(x.shape)

    return turned(query), turned(key)


_AXES: dict[str, Axis] = {
    "nnz": Var("tokens"),
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
    "head_dim": Const(abbrev="d"),
}
_HEADS = {"q": Tensor(("nnz", "num_qo_heads", "head_dim")), "k": Tensor(("nnz", "num_kv_heads", "head_dim"))}
_POS_IDS: dict[str, Value] = {"pos_ids": Tensor(("nnz",), description="position of each token")}
_RAGGED: dict[str, Value] = {
    "indptr": Tensor(("indptr_len",), description="where each request begins, then where the last one ends"),
    "offsets": Tensor(("batch_size",), description="position of the first token of each request"),
}
_STYLE: dict[str, Value] = {
    "rotary_dim": Scalar("int32", optional=True, description="leading columns that are rotated; none means all"),
    "interleave": Scalar("bool", description="pairs are neighbours, otherwise half the rotated columns apart"),
    "rope_scale": Scalar(description="positions are divided by it"),
    "rope_theta": Scalar(description="base of the frequencies"),
}
_LLAMA31: dict[str, Value] = {
    "low_freq_factor": Scalar(description="fewer turns over the old context: stretched"),
    "high_freq_factor": Scalar(description="more turns over the old context: kept"),
    "old_context_len": Scalar("int32"),
}


def _apply_template(name: str, reference: Callable[..., Any]) -> TraceTemplate:
    """Of one of the eight forms with frequencies; its name says which."""
    in_place, ragged, llama31 = name.endswith("_inplace"), "pos_ids" not in name, "llama31" in name
    axes: dict[str, Axis] = _AXES | ({"batch_size": Var(), "indptr_len": Var("batch_size + 1")} if ragged else {})
    return TraceTemplate(
        "rope",
        axes=axes,
        inputs={**_HEADS, **(_RAGGED if ragged else _POS_IDS), **_STYLE, **(_LLAMA31 if llama31 else {})},
        outputs={
            f"{x}_rope": Tensor(_HEADS[x].dim_names, param=x if in_place else None, dtype_from=x) for x in ("q", "k")
        },
        name_prefix=name,
        reference=reference,
        init=_init_ragged if ragged else None,
        constraints=["indptr_len == batch_size + 1"] if ragged else None,
        description=(
            f"Rotary embedding{' of Llama 3.1' if llama31 else ''}, "
            f"{'of a ragged batch' if ragged else 'by position'}{', in place' if in_place else ''}."
        ),
    )


def _init_ragged(
    nnz: int, batch_size: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, device: str = "cpu"
) -> dict[str, Any]:
    """Requests of about the same length: any random integers would not be offsets of tokens."""
    return {
        "q": torch.randn(nnz, num_qo_heads, head_dim, device=device).bfloat16(),
        "k": torch.randn(nnz, num_kv_heads, head_dim, device=device).bfloat16(),
        "indptr": torch.tensor(
            [nnz * b // batch_size for b in range(batch_size + 1)], dtype=torch.int32, device=device
        ),
        "offsets": torch.randint(0, 4096, (batch_size,), dtype=torch.int32, device=device),
    }


apply_rope_trace = _apply_template("apply_rope", _apply_rope_reference)
apply_rope_inplace_trace = _apply_template("apply_rope_inplace", _apply_rope_reference)
apply_rope_pos_ids_trace = _apply_template("apply_rope_pos_ids", _apply_rope_pos_ids_reference)
apply_rope_pos_ids_inplace_trace = _apply_template("apply_rope_pos_ids_inplace", _apply_rope_pos_ids_reference)
apply_llama31_rope_trace = _apply_template("apply_llama31_rope", _apply_llama31_rope_reference)
apply_llama31_rope_inplace_trace = _apply_template("apply_llama31_rope_inplace", _apply_llama31_rope_reference)
apply_llama31_rope_pos_ids_trace = _apply_template("apply_llama31_rope_pos_ids", _apply_llama31_rope_pos_ids_reference)
apply_llama31_rope_pos_ids_inplace_trace = _apply_template(
    "apply_llama31_rope_pos_ids_inplace", _apply_llama31_rope_pos_ids_reference
)


def _init_cache(
    nnz: int,
    head_size: int,
    rotary_dim: int,
    q_size: int = 0,
    k_size: int = 0,
    num_qo_heads: int = 0,
    num_kv_heads: int = 0,
    max_position: int = 4096,
    device: str = "cpu",
) -> dict[str, Any]:
    """Positions that the table has; queries and keys are rows of heads, or have a dimension for the heads."""
    angle = torch.arange(max_position)[:, None] * _frequencies(rotary_dim, 1.0, 1e4)
    query, key = (q_size,) if q_size else (num_qo_heads, head_size), (k_size,) if k_size else (num_kv_heads, head_size)
    return {
        "positions": torch.randint(0, max_position, (nnz,), dtype=torch.int32, device=device),
        "query": torch.randn(nnz, *query, device=device).bfloat16(),
        "key": torch.randn(nnz, *key, device=device).bfloat16(),
        "head_size": head_size,
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device),
    }


def _cache_template(name: str, rank: int) -> TraceTemplate:
    """Queries and keys are rows of heads, or have a dimension for the heads."""
    in_place, flat = name.endswith("_inplace"), rank == 2
    heads: dict[str, Axis] = (
        {
            "q_size": Const("num_qo_heads * head_size", abbrev="q"),
            "k_size": Const("num_kv_heads * head_size", abbrev="k"),
        }
        if flat
        else {"num_qo_heads": Const(abbrev="h"), "num_kv_heads": Const(abbrev="kv")}
    )
    query, key = (("nnz", axis) if flat else ("nnz", axis, "head_size") for axis in heads)
    return TraceTemplate(
        "rope",
        axes={
            "nnz": Var("tokens"),
            **heads,
            "head_size": Const(abbrev="d"),
            "rotary_dim": Const(abbrev="r"),
            "max_position": Var("rows of the table"),
        },
        inputs={
            "positions": Tensor(("nnz",)),
            "query": Tensor(query),
            "key": Tensor(key),
            "head_size": Scalar("int32"),
            "cos_sin_cache": Tensor(("max_position", "rotary_dim"), dtype="float32", description="cosines, then sines"),
            "is_neox": Scalar("bool", description="pairs are half the rotated columns apart, otherwise neighbours"),
        },
        outputs={
            "query_out": Tensor(query, param="query" if in_place else None, dtype_from="query"),
            "key_out": Tensor(key, param="key" if in_place else None, dtype_from="key"),
        },
        name_prefix=name if flat else f"{name}_heads",
        reference=_apply_rope_with_cos_sin_cache_reference,
        init=_init_cache,
        constraints=["rotary_dim <= head_size", *(f"{axis} % head_size == 0" for axis in heads if flat)],
        description=f"Rotary embedding by a table of cosines and sines{', in place' if in_place else ''}.",
    )


def _by_rank(name: str) -> TraceDispatch:
    return by_rank("query", {rank: _cache_template(name, rank) for rank in (2, 3)})


apply_rope_with_cos_sin_cache_trace = _by_rank("apply_rope_with_cos_sin_cache")
apply_rope_with_cos_sin_cache_inplace_trace = _by_rank("apply_rope_with_cos_sin_cache_inplace")
