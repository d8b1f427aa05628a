# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of sparse MLA on the CPU (tests/emulation): kinds of caches, tiles of heads, splits, orders."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .sparse_calls import BF16, F32, FP8, SCALE, U8, check, make

TENSORS = ("q", "kv_cache", "indices", "lengths", "sinks", "out", "lse", "partials")
SIZES = ("tokens", "heads", "dim", "top_k", "pages", "page_size", "page_stride", "slot_stride", "splits", "kind")
KINDS = {BF16: 0, FP8: 1, U8: 2}


class Call(ctypes.Structure):
    """Struct of emulated_sparse_mla.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_double) for name in ("scale", "kv_scale")),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_sparse_mla.cpp", tmp_path_factory)


def run(library: Library, made: dict, splits: int = 1) -> None:
    tokens, heads, dim = made["q"].shape
    cache = made["kv_cache"]
    out, lse = torch.full((tokens, heads, 512), torch.nan, dtype=BF16), torch.full((tokens, heads), torch.nan)
    partials = torch.full((splits * tokens * heads * 513,), torch.nan)
    results = {"out": out, "lse": lse, "partials": partials}
    tensors = [{**made, **results}[name] for name in TENSORS]
    strides = [stride * cache.itemsize for stride in cache.stride()[:2]]
    top_k = made["indices"].shape[1]
    sizes = (tokens, heads, dim, top_k, *cache.shape[:2], *strides, splits, KINDS[cache.dtype])
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    call = Call(*pointers, *sizes, SCALE, made["kv_scale"] or 1.0)
    assert library.call("sparse_mla_run", ctypes.byref(call)) == 0
    check(made, out, lse)


@pytest.mark.parametrize(
    "kind, dim, heads", [(BF16, 576, 16), (BF16, 512, 20), (FP8, 576, 5), (FP8, 512, 24), (U8, 576, 16), (U8, 576, 72)]
)
def test_caches(library, kind, dim, heads):
    """One tile of 16 heads, one of 64, two of these; lists with lengths in the middle of a step; sinks."""
    run(library, make("cpu", 2, heads, 45, kind, dim, with_lengths=True, with_sinks=heads > 16))


@pytest.mark.parametrize("splits", [2, 5])
def test_splits(library, splits):
    """Parts of several steps, of a part of one, and of none; one list is empty."""
    made = make("cpu", 3, 7, 130, pages=9, with_sinks=splits == 5)
    made["lengths"] = torch.tensor([130, 0, 33], dtype=torch.int32)
    run(library, made, splits)


def test_what_lies_outside(library):
    """Indices out of range name no row, lengths are cut; no memory beside the cache is read (the emulator checks)."""
    made = make("cpu", 2, 16, 40)
    outside = made["indices"].clone()
    outside[0, :5] = torch.tensor([-2, 80, 1 << 30, -(1 << 31), (1 << 31) - 1])
    made["indices"][0, :5] = -1
    tokens, heads, dim = made["q"].shape
    results = []
    for indices, lengths in ((made["indices"], None), (outside, torch.tensor([1 << 20, 40], dtype=torch.int32))):
        out, lse, partials = torch.zeros(tokens, heads, 512, dtype=BF16), torch.zeros(tokens, heads), torch.zeros(1)
        pointers = [x.data_ptr() if x is not None else None for x in
                    (made["q"], made["kv_cache"], indices, lengths, None, out, lse, partials)]  # fmt: skip
        call = Call(*pointers, tokens, heads, dim, 40, 5, 16, 16 * 1152, 1152, 1, 0, SCALE, 1.0)
        assert library.call("sparse_mla_run", ctypes.byref(call)) == 0
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].dtype is F32


def test_orders(library):
    """The result depends on no order of threads and copies."""
    made = make("cpu", 1, 16, 100, with_sinks=True)
    for seed in range(3):
        library.seed(seed)
        run(library, made, 1 + seed % 2)
