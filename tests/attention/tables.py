# SPDX-License-Identifier: Apache-2.0
"""Block tables and sequence lengths, as the functions of TensorRT-LLM's and XQA's names take them."""

from __future__ import annotations

import torch

import flashinfer

from .inputs import Batch

KV_LENS = [1, 54, 0, 130]
PAGE = 16
SCALE = 64**-0.5


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(32 << 20, dtype=torch.uint8, device=device)


def close(out: torch.Tensor, expected, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(out.float().reshape(expected[0].shape), expected[0], rtol=tolerance, atol=tolerance)


class Tables:
    """A batch, its cache, and a page table for each request."""

    def __init__(self, device: str, layout: str = "NHD", q_len: int = 1, kv_lens=KV_LENS, **options) -> None:
        self.batch = Batch([q_len] * len(kv_lens), kv_lens, device=device, **options)
        self.pages = self.batch.pages(PAGE)
        self.cache = self.batch.cache(self.pages, layout, "combined")
        self.tables = self.pages.block_tables()
        self.workspace = workspace(device)

    @property
    def decode(self) -> tuple:
        """Return the arguments of the batch calls up to max_seq_len."""
        lens = self.pages.lens
        return self.batch.q, self.cache, self.workspace, self.tables, lens, max(self.batch.kv_lens)

    def xqa(self, output: torch.Tensor, layout: str = "NHD", q=None, **options) -> None:
        lens = self.pages.lens.unsqueeze(1)
        q = self.batch.q.unsqueeze(1) if q is None else q
        semaphores = torch.zeros(1024, dtype=torch.int32, device=output.device)
        k, v = self.cache.unbind(1)
        heads = self.batch.num_kv_heads
        arguments = (q, k, v, self.tables, lens.view(torch.uint32), output, self.workspace, semaphores, heads, PAGE)
        flashinfer.xqa(*arguments, kv_layout=layout, **options)
        assert not semaphores.any()
