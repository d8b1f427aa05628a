# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.rope``: all of it is bound by memory, so the figure to read is the fraction of peak.

python benchmarks/bench_rope.py [-k pos_ids] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from harness import Bench, bf16, case, e4m3, grid, main, nbytes, rand

import flashinfer.rope as rope
from flashinfer.trace.templates import rope as templates
from flashinfer.trace.templates import rope_quantize as quantize_templates

# One token, a decode batch, a prompt; heads of Llama 3 8B.
CUDA = grid(nnz=[1, 64, 16384], num_qo_heads=[32], num_kv_heads=[8], head_dim=[128])
CPU = grid(nnz=[1, 64, 2048], num_qo_heads=[32], num_kv_heads=[8], head_dim=[128])
MAX_POSITION = 32768


def _table(rotary_dim: int) -> torch.Tensor:
    angle = torch.arange(MAX_POSITION)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _positions(nnz: int) -> torch.Tensor:
    return torch.randint(0, MAX_POSITION, (nnz,), dtype=torch.int32)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As models write it in torch: in the dtype of x, cosines and sines repeated for both halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _torch_rope(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.cat([t, t], dim=-1)[:, None].to(q.dtype) for t in (angle.cos(), angle.sin()))
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _by_position(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 1e4 ** (-torch.arange(0, q.shape[-1], 2, device=q.device) / q.shape[-1])
    return _torch_rope(q, k, positions[:, None] * frequency)


def _overwritten(q: torch.Tensor, k: torch.Tensor, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    q.copy_(result[0])
    k.copy_(result[1])


def _heads(nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rand(nnz, num_qo_heads, head_dim, bf16), rand(nnz, num_kv_heads, head_dim, bf16)


def _pos_ids(name: str, interleave: bool, nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Bench:
    q, k = _heads(nnz, num_qo_heads, num_kv_heads, head_dim)
    positions = _positions(nnz)
    op, in_place = getattr(rope, name), name.endswith("_inplace")
    baseline = None if interleave or "llama31" in name else _by_position  # torch's would be the same sequence
    return Bench(
        run=lambda q, k, p: op(q, k, p, interleave=interleave),
        args=(q, k, positions),
        results=(0, 1) if in_place else (),
        baseline=(lambda q, k, p: _overwritten(q, k, _by_position(q, k, p))) if baseline and in_place else baseline,
        reference=lambda q, k, p: getattr(templates, f"{name}_trace").reference(q, k, p, interleave=interleave),
        bytes=2 * nbytes(q, k) + nbytes(positions),
    )


@case("apply_rope_pos_ids", cpu=CPU, cuda=CUDA)
def apply_rope_pos_ids(**shape: int) -> Bench:
    return _pos_ids("apply_rope_pos_ids", False, **shape)


@case("apply_rope_pos_ids_inplace", cpu=CPU, cuda=CUDA)
def apply_rope_pos_ids_inplace(**shape: int) -> Bench:
    return _pos_ids("apply_rope_pos_ids_inplace", False, **shape)


@case("apply_rope_pos_ids_interleaved", cpu=CPU[-1:], cuda=CUDA[-1:])
def apply_rope_pos_ids_interleaved(**shape: int) -> Bench:
    return _pos_ids("apply_rope_pos_ids_inplace", True, **shape)


@case("apply_llama31_rope_pos_ids_inplace", cpu=CPU[-1:], cuda=CUDA)
def apply_llama31_rope_pos_ids_inplace(**shape: int) -> Bench:
    return _pos_ids("apply_llama31_rope_pos_ids_inplace", False, **shape)


@case("apply_rope_inplace", cpu=grid(requests=[8], **{k: [v] for k, v in CPU[-1].items()}),
      cuda=grid(requests=[1, 256], **{k: [v] for k, v in CUDA[-1].items()}))  # fmt: skip
def apply_rope_inplace(requests: int, nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Bench:
    """A ragged batch of requests of the same length."""
    q, k = _heads(nnz, num_qo_heads, num_kv_heads, head_dim)
    indptr = (torch.arange(requests + 1) * nnz // requests).int()
    offsets = _positions(requests)
    return Bench(
        run=rope.apply_rope_inplace,
        args=(q, k, indptr, offsets),
        results=(0, 1),
        reference=templates.apply_rope_inplace_trace.reference,
        bytes=2 * nbytes(q, k) + nbytes(indptr, offsets),
    )


def _by_table(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor, head_size: int, table: torch.Tensor) -> Any:
    cos, sin = table[p].chunk(2, dim=-1)
    cos, sin = (torch.cat([t, t], dim=-1)[:, None].to(q.dtype) for t in (cos, sin))
    heads = q.unflatten(-1, (-1, head_size)), k.unflatten(-1, (-1, head_size))
    return tuple(_rotated(x, cos, sin).flatten(-2) for x in heads)


@case("apply_rope_with_cos_sin_cache_inplace", cpu=CPU, cuda=CUDA)
def apply_rope_with_cos_sin_cache_inplace(nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Bench:
    q, k = rand(nnz, num_qo_heads * head_dim, bf16), rand(nnz, num_kv_heads * head_dim, bf16)
    positions, table = _positions(nnz), _table(head_dim)
    return Bench(
        run=rope.apply_rope_with_cos_sin_cache_inplace,
        args=(positions, q, k, head_dim, table),
        results=(1, 2),
        baseline=lambda p, q, k, d, table: _overwritten(q, k, _by_table(p, q, k, d, table)),
        reference=templates.apply_rope_with_cos_sin_cache_inplace_trace.reference,
        bytes=2 * nbytes(q, k) + nbytes(positions) + nnz * head_dim * 4,  # one row of the table per token
    )


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
        "cos_sin_cache": _table(rope_dim),
        "pos_ids": _positions(nnz),
    }


def _quantize_bytes(parts: dict[str, torch.Tensor], *more: torch.Tensor) -> int:
    """Inputs of two bytes each, outputs of one; one row of the table per token."""
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
    k_turned = _rotated(k_rope, cos, sin) if k_rope.ndim == 2 else _rotated(k_rope, cos[:, None], sin[:, None])
    parts = _rotated(q_rope, cos[:, None], sin[:, None]), k_turned, q_nope, k_nope
    return tuple(x.clamp(-448, 448).to(e4m3) for x in parts)


@case("rope_quantize_fp8", cpu=QUANT_CPU, cuda=QUANT_CUDA)
def rope_quantize_fp8(enable_pdl: Optional[bool] = None, **shape: int) -> Bench:
    parts = _parts(**shape)
    return Bench(
        run=lambda *inputs: rope.rope_quantize_fp8(*inputs, enable_pdl=bool(enable_pdl)),
        args=tuple(parts.values()),
        baseline=_torch_quantize,
        reference=quantize_templates.rope_quantize_fp8_trace.reference,
        bytes=_quantize_bytes(parts),
    )


@case("rope_quantize_fp8_append_paged_kv_cache", cpu=QUANT_CPU, cuda=QUANT_CUDA)
def rope_quantize_fp8_append_paged_kv_cache(**shape: int) -> Bench:
    """Every token is the first of its own request, in a page of 16."""
    parts, page_size = _parts(**shape), 16
    reference = quantize_templates.rope_quantize_fp8_append_paged_kv_cache_trace.reference
    assert reference is not None
    nnz, heads = shape["nnz"], shape["num_kv_heads"]
    head_dim = shape["rope_dim"] + shape["nope_dim"]
    v = rand(nnz, heads, head_dim, bf16) if heads else None
    widths = (head_dim, head_dim) if heads else (shape["nope_dim"], shape["rope_dim"])
    slots = (page_size, heads) if heads else (page_size,)
    caches = tuple(torch.zeros(nnz, *slots, width).to(e4m3) for width in widths)
    token, first = torch.arange(nnz, dtype=torch.int32), torch.zeros(nnz, dtype=torch.int32)
    kv_indptr = torch.arange(nnz + 1, dtype=torch.int32)
    values = tuple(parts.values())
    return Bench(
        run=lambda first_cache, second_cache, *inputs: rope.rope_quantize_fp8_append_paged_kv_cache(
            *inputs[:4], v, *inputs[4:6], (first_cache, second_cache), *inputs[6:]
        ),
        args=(*caches, *values, token.flip(0).contiguous(), kv_indptr, token, first),
        results=(0, 1),
        reference=lambda first_cache, second_cache, *inputs: reference(
            *inputs[:4], v, *inputs[4:6], first_cache, second_cache, *inputs[6:]
        )[2:],
        bytes=_quantize_bytes(parts, *(() if v is None else (v,))),
    )


if __name__ == "__main__":
    main()
