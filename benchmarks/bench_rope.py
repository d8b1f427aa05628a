# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.rope``: all of it is bound by memory, so the figure to read is the fraction of peak.

python benchmarks/bench_rope.py [-k pos_ids] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Bench, bf16, case, grid, main, nbytes, rand
from rope_inputs import position_table, random_positions, rotated

import flashinfer.rope as rope
from flashinfer.trace.templates import rope as templates

# One token, a decode batch, a prompt; heads of Llama 3 8B.
CUDA = grid(nnz=[1, 64, 16384], num_qo_heads=[32], num_kv_heads=[8], head_dim=[128])
CPU = grid(nnz=[1, 64, 2048], num_qo_heads=[32], num_kv_heads=[8], head_dim=[128])


def _torch_rope(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.cat([t, t], dim=-1)[:, None].to(q.dtype) for t in (angle.cos(), angle.sin()))
    return rotated(q, cos, sin), rotated(k, cos, sin)


def _frequencies(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the frequency (angle per position) of each pair of a head, with the defaults of the function ``name``."""
    exponent = torch.arange(0, like.shape[-1], 2, device=like.device) / like.shape[-1]
    if "llama31" not in name:
        return 1e4**-exponent
    frequency = 5e5**-exponent
    smooth = (8192 * frequency / (2 * torch.pi) - 1).div(4 - 1).clamp(0, 1)
    return frequency * ((1 - smooth) / 8 + smooth)


def _overwritten(q: torch.Tensor, k: torch.Tensor, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    q.copy_(result[0])
    k.copy_(result[1])


def _heads(nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rand(nnz, num_qo_heads, head_dim, bf16), rand(nnz, num_kv_heads, head_dim, bf16)


def _by_position(name: str, interleave: bool, nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Bench:
    q, k = _heads(nnz, num_qo_heads, num_kv_heads, head_dim)
    positions = random_positions(nnz)
    op, in_place = getattr(rope, name), name.endswith("_inplace")

    def baseline(q: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
        result = _torch_rope(q, k, p[:, None] * _frequencies(name, q))
        return _overwritten(q, k, result) if in_place else result

    return Bench(
        run=lambda q, k, p: op(q, k, p, interleave=interleave),
        args=(q, k, positions),
        results=(0, 1) if in_place else (),
        baseline=None if interleave else baseline,
        reference=lambda q, k, p: getattr(templates, f"{name}_trace").reference(q, k, p, interleave=interleave),
        bytes=2 * nbytes(q, k) + nbytes(positions),
    )


@case("apply_rope_pos_ids", cpu=CPU, cuda=CUDA)
def apply_rope_pos_ids(**shape: int) -> Bench:
    return _by_position("apply_rope_pos_ids", False, **shape)


@case("apply_rope_pos_ids_inplace", cpu=CPU, cuda=CUDA)
def apply_rope_pos_ids_inplace(**shape: int) -> Bench:
    return _by_position("apply_rope_pos_ids_inplace", False, **shape)


@case("apply_rope_pos_ids_interleaved", cpu=CPU[-1:], cuda=CUDA[-1:])
def apply_rope_pos_ids_interleaved(**shape: int) -> Bench:
    return _by_position("apply_rope_pos_ids_inplace", True, **shape)


@case("apply_llama31_rope_pos_ids", cpu=CPU[-1:], cuda=CUDA)
def apply_llama31_rope_pos_ids(**shape: int) -> Bench:
    return _by_position("apply_llama31_rope_pos_ids", False, **shape)


@case("apply_llama31_rope_pos_ids_inplace", cpu=CPU[-1:], cuda=CUDA)
def apply_llama31_rope_pos_ids_inplace(**shape: int) -> Bench:
    return _by_position("apply_llama31_rope_pos_ids_inplace", False, **shape)


RAGGED_CPU = grid(requests=[8], **{name: [size] for name, size in CPU[-1].items()})
RAGGED_CUDA = grid(requests=[1, 256], **{name: [size] for name, size in CUDA[-1].items()})


def _ragged(name: str, requests: int, nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Bench:
    """A batch of requests of the same length."""
    q, k = _heads(nnz, num_qo_heads, num_kv_heads, head_dim)
    indptr = (torch.arange(requests + 1) * nnz // requests).int()
    offsets = random_positions(requests)
    in_place = name.endswith("_inplace")

    def baseline(q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor) -> Any:
        first = torch.repeat_interleave(offsets - indptr[:-1], indptr.diff(), output_size=nnz)
        positions = first + torch.arange(nnz, device=q.device)
        result = _torch_rope(q, k, positions[:, None] * _frequencies(name, q))
        return _overwritten(q, k, result) if in_place else result

    return Bench(
        run=getattr(rope, name),
        args=(q, k, indptr, offsets),
        results=(0, 1) if in_place else (),
        baseline=baseline,
        reference=getattr(templates, f"{name}_trace").reference,
        bytes=2 * nbytes(q, k) + nbytes(indptr, offsets),
    )


@case("apply_rope", cpu=RAGGED_CPU, cuda=RAGGED_CUDA)
def apply_rope(**shape: int) -> Bench:
    return _ragged("apply_rope", **shape)


@case("apply_rope_inplace", cpu=RAGGED_CPU, cuda=RAGGED_CUDA)
def apply_rope_inplace(**shape: int) -> Bench:
    return _ragged("apply_rope_inplace", **shape)


@case("apply_llama31_rope", cpu=RAGGED_CPU, cuda=RAGGED_CUDA)
def apply_llama31_rope(**shape: int) -> Bench:
    return _ragged("apply_llama31_rope", **shape)


@case("apply_llama31_rope_inplace", cpu=RAGGED_CPU, cuda=RAGGED_CUDA)
def apply_llama31_rope_inplace(**shape: int) -> Bench:
    return _ragged("apply_llama31_rope_inplace", **shape)


def _by_table(name: str, nnz: int, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Bench:
    q, k = rand(nnz, num_qo_heads * head_dim, bf16), rand(nnz, num_kv_heads * head_dim, bf16)
    positions, table = random_positions(nnz), position_table(head_dim)
    in_place = name.endswith("_inplace")

    def baseline(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor, head_size: int, table: torch.Tensor) -> Any:
        cos, sin = (torch.cat([t, t], dim=-1)[:, None].to(q.dtype) for t in table[p].chunk(2, dim=-1))
        heads = q.unflatten(-1, (-1, head_size)), k.unflatten(-1, (-1, head_size))
        q_turned, k_turned = (rotated(x, cos, sin).flatten(-2) for x in heads)
        return _overwritten(q, k, (q_turned, k_turned)) if in_place else (q_turned, k_turned)

    return Bench(
        run=getattr(rope, name),
        args=(positions, q, k, head_dim, table),
        results=(1, 2) if in_place else (),
        baseline=baseline,
        reference=getattr(templates, f"{name}_trace").reference,
        bytes=2 * nbytes(q, k) + nbytes(positions) + nnz * head_dim * 4,  # one row of the table per token
    )


@case("apply_rope_with_cos_sin_cache", cpu=CPU, cuda=CUDA)
def apply_rope_with_cos_sin_cache(**shape: int) -> Bench:
    return _by_table("apply_rope_with_cos_sin_cache", **shape)


@case("apply_rope_with_cos_sin_cache_inplace", cpu=CPU, cuda=CUDA)
def apply_rope_with_cos_sin_cache_inplace(**shape: int) -> Bench:
    return _by_table("apply_rope_with_cos_sin_cache_inplace", **shape)


if __name__ == "__main__":
    main()
