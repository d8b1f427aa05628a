# SPDX-License-Identifier: Apache-2.0
"""MLA decode for SM90 on the CPU (tests/emulation): pages, masks, splits and several requests per block."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .latent import BF16, F16, FP8, SCALE, Latent, close


class Batch(ctypes.Structure):
    """Struct of emulated_mla.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_lens", "kv_indices")),
        *((name, ctypes.c_int64) for name in ("requests", "heads", "page_size", "pages", "causal", "blocks")),
        ("valid", ctypes.c_void_p),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_mla.cpp", tmp_path_factory)


def pack(latent: Latent, causal: bool, blocks: int) -> Batch:
    qo_indptr, indptr, indices, lens = latent.tables
    pointers = (x.data_ptr() for x in (qo_indptr, indptr, lens, indices))
    return Batch(*pointers, len(lens), latent.heads, latent.page_size, len(latent.caches[0]), causal, blocks)


def check(
    library: Library,
    latent: Latent,
    causal: bool = False,
    blocks: int = 2,
    valid: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    ckv_scale: float = 1.0,
) -> None:
    """Compare with the reference; ``valid``: lengths that an engine writes into the plan, ``scales``: those of keys."""
    batch = pack(latent, causal, blocks)
    batch.valid = None if valid is None else valid.data_ptr()
    out = torch.full_like(latent.q_nope, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan)
    tensors = (x.data_ptr() for x in (*latent.arguments, out, lse))
    if latent.kv_dtype == FP8:
        array = None if scales is None else latent.pages.scatter(scales.unsqueeze(1), "NHD").squeeze(2)
        name = "mla_fp8" if latent.kpe_dim else "mla_fp8_nope"
        at = ctypes.c_void_p(None if array is None else array.data_ptr())
        more = (at, ctypes.c_double(ckv_scale))
        ckv = latent.ckv.float() * ckv_scale
        if scales is not None:
            ckv *= scales.repeat_interleave(128, -1).unsqueeze(1)
        expected = latent.expected(causal, ckv=ckv, kpe=latent.kpe.float() * ckv_scale)
    else:
        name = "mla_nope" if latent.kpe_dim == 0 else "mla_bf16" if latent.dtype == BF16 else "mla_f16"
        more, expected = (), latent.expected(causal)
    assert library.call(name, ctypes.byref(batch), *tensors, ctypes.c_double(SCALE * ckv_scale), *more) == 0
    close((out, lse), expected, {F16: 2e-3, BF16: 1e-2}[latent.dtype] if latent.kv_dtype != FP8 else 2e-2)


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


@pytest.mark.parametrize("kpe", [64, 0])
@pytest.mark.parametrize("page_size", [1, 48])
def test_fp8_cache(library, page_size, kpe):
    """Keys that the producer converts: one scale, and scales of keys; memory behind the keys is NaN."""
    latent = Latent("cpu", page_size, [1, 2], [201, 70], kpe, dtype=BF16, kv_dtype=FP8)
    check(library, latent, True, ckv_scale=0.5)
    check(library, latent, scales=0.25 + torch.rand(271, 4), blocks=3)


def test_without_rotary_columns(library):
    check(library, Latent("cpu", 64, [1, 2, 1], [201, 70, 3], 0, dtype=BF16), causal=True, blocks=3)
    check(library, Latent("cpu", 1, [1, 2], [130, 64], 0, dtype=BF16))


@pytest.mark.parametrize("page_size", [1, 64])
def test_rewritten_ends(library, page_size):
    """Lengths that an engine makes smaller after the plan: some works become empty, and one request."""
    planned, lengths = [700, 333, 200, 70], [301, 333, 0, 5]
    latent = Latent("cpu", page_size, [1] * 4, planned, dtype=BF16)
    short = Latent("cpu", page_size, [1] * 4, lengths, dtype=BF16)
    latent.q_nope, latent.q_pe = short.q_nope, short.q_pe
    starts = [sum(planned[:i]) for i in range(4)]
    short.ckv, short.kpe = (
        torch.cat([x[a : a + n] for a, n in zip(starts, lengths, strict=True)]) for x in (latent.ckv, latent.kpe)
    )
    latent.expected = short.expected
    check(library, latent, blocks=4, valid=torch.tensor(lengths, dtype=torch.int32))


def test_orders(library):
    """The result depends on no order of threads and copies."""
    latent = Latent("cpu", 16, [4, 1], [321, 130], dtype=BF16)
    for seed in range(4):
        library.seed(seed)
        check(library, latent, causal=True, blocks=2)
