# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.rope``; formulas in include/flashinfer/rope.h.

Angles are fp64: what remains is the error of the kernel under test. The rotation is fp32 with one rounding at the end.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch

from ..notation import template_of_text
from ..template import TraceDispatch, TraceTemplate, by_rank
from .rope_quantize import (
    mla_rope_quantize_fp8_trace,
    rope_quantize_fp8_append_paged_kv_cache_trace,
    rope_quantize_fp8_trace,
)
from .rope_shared import cos_sin_table, frequencies, rotate
from .shared import even_indptr, normal, randint, seeded

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
    "mla_rope_quantize_fp8_trace",
    "rope_quantize_fp8_append_paged_kv_cache_trace",
    "rope_quantize_fp8_trace",
]


def _llama31_frequencies(
    rotary_dim: int, rope_scale: float, rope_theta: float, low: float, high: float, old_context_len: float
) -> torch.Tensor:
    """Frequencies with few turns over the old context are stretched, those with many are kept."""
    frequency = frequencies(rotary_dim, 1.0, rope_theta)
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
    frequency = frequencies(rotary_dim or q.shape[-1], rope_scale, rope_theta)
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
    frequency = frequencies(rotary_dim or q.shape[-1], rope_scale, rope_theta)
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


def _apply_rope_init(
    *,
    nnz: int,
    batch_size: int = 4,
    batch_size_plus_1: int = 0,
    num_q_heads: int = 32,
    num_k_heads: int = 8,
    head_dim: int = 128,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Requests of about the same length: any random integers would not be offsets of tokens."""
    g = seeded(seed, device)
    batch_size = batch_size_plus_1 - 1 if batch_size_plus_1 else batch_size
    return {
        "q": normal(g, nnz, num_q_heads, head_dim),
        "k": normal(g, nnz, num_k_heads, head_dim),
        "indptr": even_indptr(nnz, batch_size, device),
        "offsets": randint(g, 4096, batch_size),
    }


def _apply_rope_pos_ids_init(
    *,
    nnz: int,
    num_q_heads: int = 32,
    num_k_heads: int = 8,
    head_dim: int = 128,
    max_seq_len: int = 8192,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "q": normal(g, nnz, num_q_heads, head_dim),
        "k": normal(g, nnz, num_k_heads, head_dim),
        "pos_ids": randint(g, max_seq_len, nnz),
    }


def _apply_rope_with_cos_sin_cache_init(
    *,
    nnz: int,
    num_q_heads_x_head_size: int = 4096,
    num_k_heads_x_head_size: int = 1024,
    head_size: int = 128,
    max_seq_len: int = 8192,
    rotary_dim: int = 128,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Positions that the table has."""
    g = seeded(seed, device)
    return {
        "positions": randint(g, max_seq_len, nnz),
        "query": normal(g, nnz, num_q_heads_x_head_size),
        "key": normal(g, nnz, num_k_heads_x_head_size),
        "head_size": head_size,
        "cos_sin_cache": cos_sin_table(max_seq_len, rotary_dim, device),
    }


_NOTES = {
    "nnz": "tokens",
    "indptr": "where each request begins, then where the last one ends",
    "offsets": "position of the first token of each request",
    "pos_ids": "position of each token",
    "rotary_dim": "leading columns that are rotated; none means all",
    "interleave": "pairs are neighbours, otherwise half the rotated columns apart",
    "rope_scale": "positions are divided by it",
    "rope_theta": "base of the frequencies",
    "low_freq_factor": "fewer turns over the old context: stretched",
    "high_freq_factor": "more turns over the old context: kept",
}
_HEADS = "q[nnz, num_q_heads, head_dim]; k[nnz, num_k_heads, head_dim]"
_STYLE = "rotary_dim:int32?; interleave:int32?; rope_scale:float32?; rope_theta:float32?"
_LLAMA31 = "low_freq_factor:float32?; high_freq_factor:float32?; old_context_len:int32?"


def _apply_template(stem: str, reference: Callable[..., Any]) -> TraceTemplate:
    """Return the template of one of the eight forms with frequencies, which its name tells apart."""
    in_place, ragged, llama31 = stem.endswith("_inplace"), "pos_ids" not in stem, "llama31" in stem
    places = "indptr[batch_size_plus_1]; offsets[batch_size]" if ragged else "pos_ids[nnz]"
    rotated = "q_rope[nnz, num_q_heads, head_dim]=q; k_rope[nnz, num_k_heads, head_dim]=k"
    return template_of_text(
        stem.removeprefix("apply_") + "_h{num_q_heads}_kv{num_k_heads}_d{head_dim}",
        "rope",
        var="nnz batch_size batch_size_plus_1" if ragged else "nnz",
        inputs="; ".join([_HEADS, places, _STYLE, *([_LLAMA31] if llama31 else [])]),
        outputs="q[nnz, num_q_heads, head_dim]<-q; k[nnz, num_k_heads, head_dim]<-k" if in_place else rotated,
        notes=_NOTES,
        reference=reference,
        init=_apply_rope_init if ragged else _apply_rope_pos_ids_init,
        constraints=["batch_size_plus_1 == batch_size + 1"] if ragged else None,
        stem=stem,
        description=(
            f"Rotary embedding{' of Llama 3.1' if llama31 else ''}, "
            f"{'of a ragged batch' if ragged else 'by position'}{', in place' if in_place else ''}."
        ),
    )


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

_TABLE_TEXT = "head_size:int32; cos_sin_cache[max_seq_len, rotary_dim]; is_neox:int32?"
_TABLE = {"max_seq_len": "rows of the table", "cos_sin_cache": "cosines, then sines"}
_TABLE |= {"is_neox": "pairs are half the rotated columns apart, otherwise neighbours"}


def _cache_template(stem: str, in_place: bool) -> TraceTemplate:
    """Queries and keys are rows of heads."""
    query, key = "query[nnz, num_q_heads_x_head_size]", "key[nnz, num_k_heads_x_head_size]"
    made = f"{query.replace('[', '_out[')}=query; {key.replace('[', '_out[')}=key"
    return template_of_text(
        f"{stem.removeprefix('apply_').replace('_with', '')}_d{{head_size}}",
        "rope",
        var="nnz max_seq_len",
        hidden="num_q_heads_x_head_size num_k_heads_x_head_size rotary_dim",
        inputs=f"positions[nnz]; {query}; {key}; {_TABLE_TEXT}",
        outputs=f"{query}<-query; {key}<-key" if in_place else made,
        notes=_TABLE,
        reference=_apply_rope_with_cos_sin_cache_reference,
        init=_apply_rope_with_cos_sin_cache_init,
        stem=stem,
        description=f"Rotary embedding by a table of cosines and sines{', in place' if in_place else ''}.",
    )


def _heads_template(stem: str, in_place: bool) -> TraceTemplate:
    """Queries and keys have a dimension for the heads: a form that the published set does not have."""
    query, key = "query[nnz, num_q_heads, head_size]", "key[nnz, num_k_heads, head_size]"
    made = f"{query.replace('[', '_out[')}=query; {key.replace('[', '_out[')}=key"
    return template_of_text(
        f"{stem.removeprefix('apply_').replace('_with', '')}_heads_h{{num_q_heads}}_kv{{num_k_heads}}_d{{head_size}}",
        "rope",
        var="nnz max_seq_len",
        hidden="rotary_dim",
        inputs=f"positions[nnz]; {query}; {key}; {_TABLE_TEXT}",
        outputs=f"{query}<-query; {key}<-key" if in_place else made,
        notes=_TABLE,
        reference=_apply_rope_with_cos_sin_cache_reference,
        description=f"Rotary embedding by a table of cosines and sines{', in place' if in_place else ''}.",
    )


def _by_rank(stem: str) -> TraceDispatch:
    in_place = stem.endswith("_inplace")
    return by_rank("query", {2: _cache_template(stem, in_place), 3: _heads_template(stem, in_place)})


apply_rope_with_cos_sin_cache_trace = _by_rank("apply_rope_with_cos_sin_cache")
apply_rope_with_cos_sin_cache_inplace_trace = _by_rank("apply_rope_with_cos_sin_cache_inplace")
