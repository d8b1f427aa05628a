# SPDX-License-Identifier: Apache-2.0
"""Batches of latent attention, and the comparison of their results."""

from __future__ import annotations

import math

import torch

from flashinfer import BatchMLAPagedAttentionWrapper

from ..attention.inputs import Pages, int32, offsets
from ..attention.reference import Attention, split
from ..tensors import randn

F16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
CKV, KPE, HEADS = 512, 64, 16
SCALE = 1 / math.sqrt(128 + 64)
# One token, several, none, more rows than keys, no keys, keys over more than one tile.
QO_LENS, KV_LENS = [1, 5, 0, 17, 2, 1], [33, 97, 4, 12, 0, 300]


def workspace(device: str) -> torch.Tensor:
    return torch.empty((32 if device == "cpu" else 128) << 20, dtype=torch.int8, device=device)  # a graph needs 42 MiB


class Latent:
    """Queries and a paged cache whose unused entries are NaN."""

    def __init__(
        self, device, page_size=16, qo_lens=QO_LENS, kv_lens=KV_LENS, kpe=KPE, dtype=F16, kv_dtype=None, heads=HEADS
    ):
        self.device, self.dtype, self.kv_dtype, self.heads = device, dtype, kv_dtype or dtype, heads
        self.page_size, self.qo_lens, self.kv_lens, self.kpe_dim = page_size, qo_lens, kv_lens, kpe
        self.q_nope = randn(sum(qo_lens), heads, CKV, dtype=dtype, device=device)
        self.q_pe = randn(sum(qo_lens), heads, kpe, dtype=dtype, device=device)
        self.ckv = randn(sum(kv_lens), 1, CKV, dtype=self.kv_dtype, device=device)
        self.kpe = randn(sum(kv_lens), 1, kpe, dtype=self.kv_dtype, device=device)
        self.pages = Pages(kv_lens, page_size, device)
        self.caches = tuple(self.pages.scatter(x, "NHD").squeeze(2) for x in (self.ckv, self.kpe))
        self.qo_indptr = int32(offsets(qo_lens), device)

    @property
    def tables(self):
        return self.qo_indptr, self.pages.indptr, self.pages.indices, self.pages.lens

    def plan(self, wrapper, causal=False, **options):
        sizes = (self.heads, CKV, self.kpe_dim, self.page_size)
        wrapper.plan(*self.tables, *sizes, causal, SCALE, self.dtype, self.kv_dtype, **options)
        return wrapper

    def wrapper(self, causal=False, **options):
        return self.plan(BatchMLAPagedAttentionWrapper(workspace(self.device)), causal, **options)

    @property
    def arguments(self):
        return self.q_nope, self.q_pe, *self.caches

    def expected(self, causal=False, ckv=None, kpe=None):
        ckv, kpe = (self.ckv if ckv is None else ckv).float(), (self.kpe if kpe is None else kpe).float()
        q, k = torch.cat([self.q_nope, self.q_pe], -1), torch.cat([ckv, kpe], -1)
        what, rows, keys = Attention(causal=causal, sm_scale=SCALE), offsets(self.qo_lens), offsets(self.kv_lens)
        parts = zip(split(q, rows), split(k, keys), split(ckv, keys), strict=True)
        results = [what(*part) for part in parts if len(part[0])]
        return tuple(torch.cat(x) for x in zip(*results, strict=True))


def close(result, expected, tolerance=2e-3):
    torch.testing.assert_close(result[0].float(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result[1], expected[1], rtol=tolerance, atol=tolerance)
