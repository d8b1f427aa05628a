# SPDX-License-Identifier: Apache-2.0
"""MLA decode for SM90 on the CPU (tests/emulation): pages, masks, splits and several requests per block."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .latent import BF16, F16, SCALE, Latent, close


class Batch(ctypes.Structure):
    """Struct of emulated_mla.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_lens", "kv_indices")),
        *((name, ctypes.c_int64) for name in ("requests", "heads", "page_size", "pages", "causal", "blocks")),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_mla.cpp", tmp_path_factory)


def pack(latent: Latent, causal: bool, blocks: int) -> Batch:
    qo_indptr, indptr, indices, lens = latent.tables
    pointers = (x.data_ptr() for x in (qo_indptr, indptr, lens, indices))
    return Batch(*pointers, len(lens), latent.heads, latent.page_size, len(latent.caches[0]), causal, blocks)


def check(library: Library, latent: Latent, causal: bool = False, blocks: int = 2) -> None:
    batch = pack(latent, causal, blocks)
    out = torch.full_like(latent.q_nope, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan)
    tensors = (x.data_ptr() for x in (*latent.arguments, out, lse))
    name = "mla_bf16" if latent.dtype == BF16 else "mla_f16"
    assert library.call(name, ctypes.byref(batch), *tensors, SCALE) == 0
    close((out, lse), latent.expected(causal), 2e-3 if latent.dtype == F16 else 1e-2)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 128])
def test_pages(library, page_size):
    """One and several blocks of keys, a last block without a partner, keys that are no multiple of anything."""
    check(library, Latent("cpu", page_size, [1, 1, 1], [201, 64, 3]))


def test_requests_of_a_block(library):
    """Requests without rows or keys, and with more rows than keys, one after another in the same block."""
    check(library, Latent("cpu", 16, dtype=BF16), causal=True, blocks=1)


def test_split(library):
    """Parts of a tile on several blocks, which the merge adds; a block continues with the next request."""
    latent = Latent("cpu", 16, [1, 1, 1, 1], [700, 333, 200, 70])
    items, merges = divmod(library.call("mla_counts", ctypes.byref(pack(latent, False, 4))), 1000)
    assert items > 4 and merges > 1
    check(library, latent, blocks=4)


@pytest.mark.parametrize("requests, parts", [(1, 9), (3, 3)])
def test_merge(library, requests, parts):
    """Few tiles of many parts, whose rows several groups of warps merge, and more tiles of few parts."""
    latent = Latent("cpu", 64, [1] * requests, [640] * requests, heads=128, dtype=BF16)
    blocks = 2 * requests * parts
    items, merges = divmod(library.call("mla_counts", ctypes.byref(pack(latent, False, blocks))), 1000)
    assert merges == 2 * requests and items > 4 * requests
    check(library, latent, blocks=blocks)


@pytest.mark.parametrize("qo_len", [1, 2])
def test_heads(library, qo_len):
    """128 heads are two tiles per token; the mask differs between tokens."""
    check(library, Latent("cpu", 64, [qo_len], [130], heads=128, dtype=BF16), causal=True, blocks=3)


def test_orders(library):
    """The result depends on no order of threads and copies."""
    latent = Latent("cpu", 16, [4, 1], [321, 130], dtype=BF16)
    for seed in range(4):
        library.seed(seed)
        check(library, latent, causal=True, blocks=2)
