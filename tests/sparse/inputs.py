# SPDX-License-Identifier: Apache-2.0
"""Block patterns and tensors of the sparse wrappers."""

from __future__ import annotations

import torch

from ..attention.inputs import offsets
from ..tensors import randn

HEADS, KV_HEADS, DIM = 4, 2, 64


def pattern_of(M: int, N: int, R: int, C: int, density: float):
    """Return a random pattern: offsets and columns of its blocks, and the equivalent mask."""
    blocks = torch.rand(-(-M // R), N // C) < density
    blocks[0] = False  # a row without blocks
    indptr = torch.tensor(offsets(blocks.sum(1).tolist()), dtype=torch.int32)
    indices = blocks.nonzero()[:, 1].int()
    dense = blocks.repeat_interleave(R, 0)[:M].repeat_interleave(C, 1)
    return indptr, indices, dense


def tensors(M: int, N: int, device: str):
    q = randn(M, HEADS, DIM, dtype=torch.float16, device=device)
    return q, *(randn(N, KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))


def cut(total: int, parts: int) -> list[int]:
    """Return sizes that sum to ``total``, some of them 0."""
    at = sorted(torch.randint(0, total + 1, (parts - 1,)).tolist())
    return [b - a for a, b in zip([0, *at], [*at, total], strict=True)]
