# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over indices: values against float64, caches, lists, sinks, layouts, edges, refused arguments."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.mla import sparse_mla

from ..bad_arguments import check_refused
from ..graphs import capture
from .sparse_calls import BF16, F16, F32, FP8, U8, check, make

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "kind, dim, dtype",
    [(BF16, 576, BF16), (BF16, 512, BF16), (F16, 576, F16), (FP8, 576, BF16), (FP8, 512, BF16), (U8, 576, BF16)],
)
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_caches(device, kind, dim, dtype, heads):
    made = make(device, 3, heads, 300, kind, dim, pages=9, page_size=64, dtype=dtype)
    check(made, *sparse_mla(**made, return_lse=True))


@pytest.mark.parametrize("dim", [576, 512])
def test_float32(dim):
    """On the CPU, where reference models run in it."""
    made = make("cpu", 3, 8, 40, F32, dim, dtype=F32)
    check(made, *sparse_mla(**made, return_lse=True))


@pytest.mark.parametrize("tokens, top_k", [(1, 2048), (40, 33), (300, 64)])
def test_decode_and_prefill(device, tokens, top_k):
    """One token, whose list is split over blocks on a GPU; more tokens than fill it."""
    made = make(device, tokens, 16, top_k, pages=40, page_size=64, with_lengths=True, with_sinks=True)
    check(made, *sparse_mla(**made, return_lse=True))


def test_lists(device):
    """Lists that are empty, all -1, of one row repeated, and whose rest behind the length is -1 or out of range."""
    made = make(device, 5, 16, 40)
    made["indices"][0] = -1
    made["indices"][1] = 7
    made["indices"][3, 10:] = -1
    made["indices"][4, 25:] = 1 << 30
    made["lengths"] = torch.tensor([40, 40, 0, 40, 25], dtype=torch.int32, device=device)
    out, lse = sparse_mla(**made, return_lse=True)
    check({**made, "indices": made["indices"].masked_fill(made["indices"] > 79, -1)}, out, lse)
    assert not bool(out[0].any() or out[2].any()) and bool((lse[[0, 2]] == -math.inf).all())
    row = made["kv_cache"].view(-1, 576)[7, :512].float()
    torch.testing.assert_close(out[1].float(), row.expand(16, -1), rtol=2**-7, atol=1e-6)


def test_sinks(device):
    """A sink alone leaves zeros and is the LSE; one of -inf changes nothing."""
    made = make(device, 2, 16, 30, with_sinks=True)
    made["indices"][1] = -1
    out, lse = sparse_mla(**made, return_lse=True, return_lse_base_on_e=True)
    assert not bool(out[1].any())
    torch.testing.assert_close(lse[1], made["sinks"], rtol=1e-6, atol=1e-6)
    check(made, *sparse_mla(**made, return_lse=True))
    none = {**made, "sinks": torch.full_like(made["sinks"], -math.inf)}
    plain = {**made, "sinks": None}
    for one, other in zip(sparse_mla(**none, return_lse=True), sparse_mla(**plain, return_lse=True), strict=True):
        torch.testing.assert_close(one, other)


def test_layouts(device):
    """Heads of a wider tensor, pages and slots apart, lists of a wider table, given results."""
    made = make(device, 3, 16, 40, U8)
    expected = sparse_mla(**made)
    wide = torch.zeros(3, 24, 580, dtype=BF16, device=device)[:, 4:20, 3:579]
    wide.copy_(made["q"])
    cache = torch.full((5, 20, 2, 688), 255, dtype=U8, device=device)[:, 2:18, 1, 16:672]
    cache.copy_(made["kv_cache"])
    table = torch.full((3, 90), 1 << 30, dtype=torch.int32, device=device)[:, 7:47]
    table.copy_(made["indices"])
    out, lse = torch.empty(3, 16, 512, dtype=BF16, device=device), torch.empty(3, 16, device=device)
    changed = {**made, "q": wide, "kv_cache": cache, "indices": table, "out": out, "lse": lse}
    result = sparse_mla(**changed)
    assert result.data_ptr() == out.data_ptr() and torch.equal(result, expected)
    check(made, out, lse)


@pytest.mark.parametrize("tokens, heads, top_k, pages", [(0, 16, 40, 5), (2, 16, 0, 5), (2, 0, 4, 5), (2, 16, 4, 0)])
def test_empty(device, tokens, heads, top_k, pages):
    made = make(device, tokens, heads, top_k)
    made["kv_cache"] = made["kv_cache"][:pages]
    if pages == 0:
        made["indices"].fill_(-1)
    out, lse = sparse_mla(**made, return_lse=True)
    assert out.shape == (tokens, heads, 512) and lse.shape == (tokens, heads)
    assert bool((out == 0).all()) or (top_k > 0 and pages > 0)


def test_nan_stays_in_its_tokens(device):
    """NaN of a selected row is in the result; that of a row that no list names is nowhere."""
    made = make(device, 3, 16, 40)
    made["indices"][made["indices"] == 3] = -1
    made["indices"][1, 5] = 3
    made["kv_cache"].view(-1, 576)[3] = torch.nan
    out = sparse_mla(**made)
    assert bool(out[1].isnan().all()) and not bool(out[[0, 2]].isnan().any())


def test_compiled(device):
    made = make(device, 2, 16, 30)
    run = torch.compile(lambda **x: sparse_mla(**x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(run(**made), sparse_mla(**made) * 2)


@needs_cuda
def test_graph():
    """A replay follows indices and lengths."""
    made = make("cuda", 4, 16, 600, pages=40, page_size=64, with_lengths=True)
    graph, out = capture(lambda: sparse_mla(**made))
    other = make("cuda", 4, 16, 600, pages=40, page_size=64, with_lengths=True, seed=1)
    for name in ("indices", "lengths"):
        made[name].copy_(other[name])
    graph.replay()
    check(made, out)


def test_names():
    assert flashinfer.sparse_mla is sparse_mla
    answers = sparse_mla.is_compute_capability_supported
    assert answers(90) and answers(80) and not answers(75)


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x), -1)[..., 0]


BAD = [
    ("q", lambda x: x[0], "q must have 3 dimensions"),
    ("q", lambda x: x.double(), "q must be bfloat16 or float16 (on the CPU also float32), got torch.float64"),
    ("q", lambda x: x.half(), "kv_cache must be torch.float16 (as q), float8_e4m3fn or uint8"),
    ("q", lambda x: x[..., :500], "q.shape[2] must be 512 or 576 (512 + 64 rotary columns), got 500"),
    ("q", lambda x: x[..., :512], "kv_cache.shape[2] must be 512 (q.shape[2]), got 576"),
    ("q", wide, "q.stride(-1) must be 1"),
    ("kv_cache", lambda x: x.float(), "kv_cache must be torch.bfloat16 (as q), float8_e4m3fn or uint8"),
    ("kv_cache", lambda x: x.to(FP8), "kv_scale must be a number (the cache is float8_e4m3fn), got None"),
    ("kv_cache", lambda x: x.to(U8), "kv_cache.shape[2] must be 656"),
    ("kv_cache", lambda x: x[0], "kv_cache must have 3 dimensions, got 2"),
    ("kv_cache", wide, "kv_cache.stride(-1) must be 1"),
    ("kv_cache", lambda x: torch.zeros(5, 16, 580).bfloat16()[..., 1:577], "rows at multiples of 16 bytes"),
    ("indices", lambda x: x.long(), "indices must be int32, got int64"),
    ("indices", lambda x: x[0], "indices must have 2 dimensions"),
    ("indices", lambda x: x[1:], "indices.shape[0] must be 3 (q.shape[0]), got 2"),
    ("indices", wide, "indices.stride(-1) must be 1"),
    ("indices", lambda x: x.fill_(80), "indices[0, 0] must be -1 (none) to 79 (rows of kv_cache), got 80"),
    ("indices", lambda x: x.fill_(-2), "indices[0, 0] must be -1 (none) to 79 (rows of kv_cache), got -2"),
    ("lengths", lambda x: torch.tensor([4, 71, 0]).int(), "lengths[1] must be 0 to 70 (indices.shape[1]), got 71"),
    ("lengths", lambda x: torch.tensor([-1, 7, 0]).int(), "lengths[0] must be 0 to 70"),
    ("lengths", lambda x: torch.zeros(2).int(), "lengths.shape[0] must be 3"),
    ("lengths", lambda x: torch.zeros(3), "lengths must be int32, got float32"),
    ("sinks", lambda x: torch.zeros(15), "sinks.shape[0] must be 16 (q.shape[1]), got 15"),
    ("sinks", lambda x: torch.zeros(16).half(), "sinks must be float32, got float16"),
    ("sm_scale", math.nan, "sm_scale must be a finite number, got nan"),
    ("kv_scale", 1.0, "kv_scale must be None (the cache has no such scale), got 1.0"),
    ("out", lambda x: torch.zeros(3, 16, 576).bfloat16(), "out.shape[2] must be 512"),
    ("out", lambda x: torch.zeros(3, 16, 512), "out must be bfloat16 (the dtype of q), got float32"),
    ("out", lambda x: torch.zeros(3, 16, 1024).bfloat16()[..., :512], "out must be contiguous"),
    ("lse", lambda x: torch.zeros(3, 15), "lse.shape[1] must be 16"),
]


@pytest.mark.parametrize("name, bad, text", BAD, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BAD)])
def test_refused(name, bad, text):
    made = make("cpu")
    check_refused(sparse_mla, text, **{**made, name: bad(made.get(name)) if callable(bad) else bad})


def test_refused_with_8_bits():
    made = make("cpu", kind=FP8)
    check_refused(sparse_mla, "kv_scale must be a finite number above 0, got 0.0", **{**made, "kv_scale": 0.0})
    check_refused(
        sparse_mla, "q must be bfloat16 (the cache is torch.float8_e4m3fn)", **{**made, "q": made["q"].half()}
    )
    made = make("cpu", kind=U8)
    check_refused(sparse_mla, "q.shape[2] must be 576 (rows of 656 bytes", **{**made, "q": made["q"][..., :512]})


def test_no_memory_is_shared():
    made = make("cpu")
    check_refused(
        sparse_mla, "out must not share memory with q", **made, out=made["q"].view(-1)[: 3 * 16 * 512].view(3, 16, 512)
    )
