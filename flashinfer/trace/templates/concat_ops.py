# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.concat_ops``."""

from __future__ import annotations

from typing import Any

import torch

from ..notation import template_of_text
from .shared import normal, seeded, to_fp8

__all__ = ["concat_mla_k_trace", "concat_mla_kv_quant_fp8_trace"]


def _concat_mla_k_reference(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, **_: Any) -> torch.Tensor:
    """Writes to k, as the API does."""
    # As bytes: not every torch can assign fp8.
    out, nope, rope = (x.view(torch.uint8) if x.stride(-1) == 1 else x for x in (k, k_nope, k_rope))
    out[..., : nope.shape[-1]] = nope
    out[..., nope.shape[-1] :] = rope
    return k


def _concat_mla_k_init(
    *,
    num_tokens: int,
    num_heads: int = 128,
    nope_dim: int = 128,
    rope_dim: int = 64,
    total_dim: int = 0,
    num_heads_broadcast: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "k": normal(g, num_tokens, num_heads, total_dim or nope_dim + rope_dim),
        "k_nope": normal(g, num_tokens, num_heads, nope_dim),
        "k_rope": normal(g, num_tokens, num_heads_broadcast, rope_dim),
    }


concat_mla_k_trace = template_of_text(
    "concat_mla_k_h{num_heads}_nope{nope_dim}_rope{rope_dim}_d{total_dim}",
    "mla_paged",
    var="num_tokens",
    hidden="num_heads_broadcast",
    inputs="k[num_tokens, num_heads, total_dim]; k_nope[num_tokens, num_heads, nope_dim];"
    "k_rope[num_tokens, num_heads_broadcast, rope_dim]",
    outputs="k[num_tokens, num_heads, total_dim]<-k",
    notes={"nope_dim": "elements without position", "rope_dim": "elements with position, one set for all heads"},
    reference=_concat_mla_k_reference,
    init=_concat_mla_k_init,
    description="Keys of multi-head latent attention: the part without position, then the one with it, for every head.",
)


def _concat_mla_kv_quant_fp8_reference(
    kv_nope: torch.Tensor, k_pe: torch.Tensor, nope_dim: int = 128, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rope = k_pe.reshape(k_pe.shape[0], 1, k_pe.shape[-1]).expand(-1, kv_nope.shape[1], -1)
    keys = torch.cat([kv_nope[..., :nope_dim], rope], dim=-1)
    return to_fp8(keys.float(), torch.float8_e4m3fn), to_fp8(kv_nope[..., nope_dim:].float(), torch.float8_e4m3fn)


def _concat_mla_kv_quant_fp8_init(
    *,
    num_tokens: int,
    num_heads: int = 128,
    nope_and_value_dim: int = 256,
    rope_dim: int = 64,
    key_dim: int = 0,
    value_dim: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    given = {"kv_nope": normal(g, num_tokens, num_heads, nope_and_value_dim), "k_pe": normal(g, num_tokens, rope_dim)}
    return {**given, "nope_dim": nope_and_value_dim - (value_dim or nope_and_value_dim // 2)}


concat_mla_kv_quant_fp8_trace = template_of_text(
    "concat_mla_kv_quant_fp8_h{num_heads}_d{nope_and_value_dim}_rope{rope_dim}",
    "mla_paged",
    var="num_tokens key_dim value_dim",
    inputs="kv_nope[num_tokens, num_heads, nope_and_value_dim]; k_pe[num_tokens, rope_dim];"
    "key[num_tokens, num_heads, key_dim]:float8_e4m3fn?; value[num_tokens, num_heads, value_dim]:float8_e4m3fn?;"
    "nope_dim:int32?",
    outputs="key_out[num_tokens, num_heads, key_dim]<-key:float8_e4m3fn;"
    "value_out[num_tokens, num_heads, value_dim]<-value:float8_e4m3fn",
    notes={"key": "written", "value": "written", "nope_dim": "columns of kv_nope that belong to the key"},
    reference=_concat_mla_kv_quant_fp8_reference,
    constraints=["key_dim + value_dim == nope_and_value_dim + rope_dim"],
    init=_concat_mla_kv_quant_fp8_init,
    description="Keys [k_nope | k_pe] and values of multi-head latent attention, rounded to e4m3.",
)
