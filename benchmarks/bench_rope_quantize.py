# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the rotary embedding with fp8 outputs, alone and with the append to a paged cache.

python benchmarks/bench_rope_quantize.py [-k append] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from harness import Bench, bf16, case, e4m3, main, nbytes, rand
from rope_inputs import position_table, random_positions, rotated

import flashinfer.rope as rope
from flashinfer.trace.templates import rope_quantize as templates

# DeepSeek's MLA (no key heads: all queries share one), and Llama's heads with half of each rotated.
QUANT_CPU = [{"nnz": 64, "num_qo_heads": 128, "num_kv_heads": 0, "rope_dim": 64, "nope_dim": 512}]
QUANT_CPU += [{"nnz": 1024, "num_qo_heads": 32, "num_kv_heads": 8, "rope_dim": 64, "nope_dim": 64}]
QUANT_CUDA = [{**QUANT_CPU[0], "nnz": nnz} for nnz in (1, 64, 2048)] + [
    {**QUANT_CPU[1], "nnz": nnz} for nnz in (64, 16384)
]


def _parts(nnz: int, num_qo_heads: int, num_kv_heads: int, rope_dim: int, nope_dim: int) -> dict[str, torch.Tensor]:
    k = (nnz, num_kv_heads) if num_kv_heads else (nnz,)
    return {
        "q_rope": rand(nnz, num_qo_heads, rope_dim, bf16),
        "k_rope": rand(*k, rope_dim, bf16),
        "q_nope": rand(nnz, num_qo_heads, nope_dim, bf16),
        "k_nope": rand(*k, nope_dim, bf16),
        "cos_sin_cache": position_table(rope_dim),
        "pos_ids": random_positions(nnz),
    }


def _quantize_bytes(parts: dict[str, torch.Tensor], *more: torch.Tensor) -> int:
    """Return the bytes moved: inputs of two bytes, outputs of one byte, and one row of the table per token."""
    values = nbytes([parts[name] for name in ("q_rope", "k_rope", "q_nope", "k_nope")], *more)
    return values * 3 // 2 + parts["pos_ids"].shape[0] * (4 + parts["cos_sin_cache"].shape[1] * 4)


def _torch_quantize(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    table: torch.Tensor,
    p: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    cos, sin = (torch.cat([t, t], dim=-1).to(q_rope.dtype) for t in table[p].chunk(2, dim=-1))
    k_turned = rotated(k_rope, cos, sin) if k_rope.ndim == 2 else rotated(k_rope, cos[:, None], sin[:, None])
    parts = rotated(q_rope, cos[:, None], sin[:, None]), k_turned, q_nope, k_nope
    return tuple(x.clamp(-448, 448).to(e4m3) for x in parts)


def _quantize(name: str, enable_pdl: Optional[bool], **shape: int) -> Bench:
    parts = _parts(**shape)
    return Bench(
        run=lambda *inputs: getattr(rope, name)(*inputs, enable_pdl=bool(enable_pdl)),
        args=tuple(parts.values()),
        baseline=_torch_quantize,
        reference=getattr(templates, f"{name}_trace").reference,
        bytes=_quantize_bytes(parts),
    )


@case("rope_quantize_fp8", cpu=QUANT_CPU, cuda=QUANT_CUDA)
def rope_quantize_fp8(enable_pdl: Optional[bool] = None, **shape: int) -> Bench:
    return _quantize("rope_quantize_fp8", enable_pdl, **shape)


@case("mla_rope_quantize_fp8", cpu=QUANT_CPU[:1], cuda=QUANT_CUDA[:3])
def mla_rope_quantize_fp8(enable_pdl: Optional[bool] = None, **shape: int) -> Bench:
    return _quantize("mla_rope_quantize_fp8", enable_pdl, **shape)


@case("rope_quantize_fp8_append_paged_kv_cache", cpu=QUANT_CPU, cuda=QUANT_CUDA)
def rope_quantize_fp8_append_paged_kv_cache(**shape: int) -> Bench:
    """Every token is the first of its own request, in a page of 16."""
    parts, page_size = _parts(**shape), 16
    reference = templates.rope_quantize_append_reference
    nnz, heads = shape["nnz"], shape["num_kv_heads"]
    head_dim = shape["rope_dim"] + shape["nope_dim"]
    v = rand(nnz, heads, head_dim, bf16) if heads else None
    widths = (head_dim, head_dim) if heads else (shape["nope_dim"], shape["rope_dim"])
    slots = (page_size, heads) if heads else (page_size,)
    caches = tuple(torch.zeros(nnz, *slots, width).to(e4m3) for width in widths)
    token, first = torch.arange(nnz, dtype=torch.int32), torch.zeros(nnz, dtype=torch.int32)
    kv_indptr = torch.arange(nnz + 1, dtype=torch.int32)
    values = tuple(parts.values())

    def baseline(first_cache: torch.Tensor, second_cache: torch.Tensor, *inputs: torch.Tensor) -> Any:
        q_rope, k_rope, q_nope, k_nope = _torch_quantize(*inputs[:6])
        pages, keys = inputs[6].long(), (torch.cat([k_rope, k_nope], dim=-1) if heads else k_nope)
        values = v.clamp(-448, 448).to(e4m3) if v is not None else k_rope
        for cache, rows in ((first_cache, keys), (second_cache, values)):
            cache.view(torch.uint8)[pages, 0] = rows.view(torch.uint8)  # torch cannot index fp8
        return q_rope, q_nope

    return Bench(
        run=lambda first_cache, second_cache, *inputs: rope.rope_quantize_fp8_append_paged_kv_cache(
            *inputs[:4], v, *inputs[4:6], (first_cache, second_cache), *inputs[6:]
        ),
        args=(*caches, *values, token.flip(0).contiguous(), kv_indptr, token, first),
        results=(0, 1),
        baseline=baseline,
        reference=lambda first_cache, second_cache, *inputs: reference(
            *inputs[:4], v, *inputs[4:6], first_cache, second_cache, *inputs[6:]
        )[2:],
        bytes=_quantize_bytes(parts, *(() if v is None else (v,))),
    )


if __name__ == "__main__":
    main()
