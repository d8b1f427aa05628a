# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests share prefixes."""

from __future__ import annotations

import torch

from ..attention.inputs import Pages, int32, offsets
from ..attention.reference import Attention
from ..tensors import randn

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
SHARED = 40  # keys of the shared prefix


class Tree:
    """Requests, the keys that they share at each level, and a cache with all keys."""

    def __init__(self, device: str, layout: str, levels: list[list[int]], rows: list[list[int]]) -> None:
        flat = [n for level in levels for n in level]
        self.pages = Pages(flat, PAGE, device)
        self.k, self.v = (randn(sum(flat), KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))
        self.cache = torch.stack([self.pages.scatter(x, layout) for x in (self.k, self.v)], dim=1)
        self.at, self.first, self.levels = offsets(flat), offsets([len(level) for level in levels]), levels
        self.qo_indptr = [int32(offsets(lens), device) for lens in rows]
        self.rows = rows
        self.q = randn(sum(rows[-1]), HEADS, DIM, dtype=torch.float16, device=device)

    def tables(self) -> list[list[torch.Tensor]]:
        """Return one list per argument of plan, with one tensor per level."""
        tables = []
        for begin, end in zip(self.first[:-1], self.first[1:], strict=True):
            indptr = self.pages.indptr[begin : end + 1]
            tables.append((indptr - indptr[0], self.pages.indices[indptr[0] :], self.pages.last_page_len[begin:end]))
        return [list(x) for x in zip(*tables, strict=True)]

    def entry(self, level: int, row: int) -> int:
        """Return the index of the entry of a level that contains this row of q."""
        return next(i for i, end in enumerate(offsets(self.rows[level])[1:]) if row < end)

    def expected(self, causal: bool) -> torch.Tensor:
        out, row = [], 0
        for request, length in enumerate(self.rows[-1]):
            if length == 0:
                continue
            parts = [self.first[level] + self.entry(level, row) for level in range(len(self.levels) - 1)]
            parts.append(self.first[-2] + request)
            k, v = (torch.cat([x[self.at[i] : self.at[i + 1]] for i in parts]) for x in (self.k, self.v))
            out.append(Attention(causal=causal)(self.q[row : row + length], k, v)[0])
            row += length
        return torch.cat(out)
