# SPDX-License-Identifier: Apache-2.0
"""CUDA-only behaviour of the norms: SiLU after the norm, graphs, streams."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer._runtime.knobs import knobs
from flashinfer.norm import fused_add_rmsnorm, fused_rmsnorm_silu, layernorm, rmsnorm, rmsnorm_quant
from flashinfer.testing import assert_close
from flashinfer.trace.templates.norm import fused_add_rmsnorm_trace, fused_rmsnorm_silu_trace, rmsnorm_trace

from ..bad_arguments import pattern
from ..graphs import capture
from ..tensors import gaps_are_untouched, randn, view_of_wider
from .inputs import SHAPES

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def arguments(rows=7, hidden=500, device="cuda", dtype=BF16):
    return randn(rows, hidden, dtype=dtype, device=device), randn(hidden, dtype=dtype, device=device)


# fused_rmsnorm_silu ---------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("out_dtype", [None, BF16, FP8], ids=str)
@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_silu(rows, hidden, out_dtype):
    x, w = arguments(rows, hidden)
    if out_dtype == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 output needs SM89")
    out = None if out_dtype is None else torch.empty(rows, hidden, dtype=out_dtype, device="cuda")
    actual = fused_rmsnorm_silu(x, w, 1e-5, out=out)
    assert out is None or actual is out
    assert_close(actual, fused_rmsnorm_silu_trace.reference(x, w, 1e-5, out_dtype=out_dtype or BF16))


@needs_cuda
def test_silu_of_strided_rows():
    x, w = arguments()
    assert_close(fused_rmsnorm_silu(view_of_wider(x), w), fused_rmsnorm_silu_trace.reference(x, w))


def test_silu_of_a_cpu_tensor():
    with pytest.raises(ValueError, match="fused_rmsnorm_silu: input must be on a CUDA device, got cpu"):
        fused_rmsnorm_silu(*arguments(device="cpu"))


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="cuda")


BAD_SILU = {
    "rank": (lambda: (empty(2, 7, 500), empty(500)), ValueError, "input must be 2-D"),
    "dtype": (lambda: (empty(7, 500, dtype=torch.float16), empty(500)), ValueError, "input must be 2-D torch.bfloat16"),
    "weight": (lambda: (empty(7, 500), empty(499)), ValueError, "weight must have shape (500,)"),
    "out shape": (
        lambda: (empty(7, 500), empty(500), 1e-6, empty(7, 400)),
        ValueError,
        "out must have shape (7, 500), got (7, 400)",
    ),
    "out dtype": (
        lambda: (empty(7, 500), empty(500), 1e-6, empty(7, 500, dtype=torch.float16)),
        ValueError,
        "out must have dtype torch.bfloat16 or torch.float8_e4m3fn, got torch.float16",
    ),
    "out of SM89": (
        lambda: (empty(7, 500), empty(500), 1e-6, empty(7, 500, dtype=FP8)),
        RuntimeError,
        "float8_e4m3fn output needs SM89, this is SM80",
    ),
}


@pytest.mark.parametrize("case", BAD_SILU)
def test_bad_silu_arguments(case, monkeypatch):
    """Check argument errors with fake tensors of an SM80 GPU: validation precedes any access."""
    monkeypatch.setattr(flashinfer.utils, "get_compute_capability", lambda device: (8, 0))
    make, kind, text = BAD_SILU[case]
    with FakeTensorMode(), pytest.raises(kind, match=pattern(text)):
        fused_rmsnorm_silu(*make())


# graphs and streams ---------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("enable_pdl", [False, True])
def test_graph_capture(enable_pdl):
    x, w = arguments(99, 4096)
    residual, out = torch.randn_like(x), torch.empty_like(x)
    quantised, scale = torch.empty_like(x, dtype=FP8), torch.tensor(0.5, device="cuda")

    def step():
        rmsnorm(x, w, out=out, enable_pdl=enable_pdl)
        fused_add_rmsnorm(out, residual, w, enable_pdl=enable_pdl)
        rmsnorm_quant(quantised, out, w, scale, enable_pdl=enable_pdl)

    graph, _ = capture(step)
    x.normal_()
    residual.normal_()
    expected, total = fused_add_rmsnorm_trace.reference(rmsnorm_trace.reference(x, w), residual, w)
    graph.replay()
    assert_close(out, expected)
    assert_close(residual, total)


@needs_cuda
def test_runs_on_the_current_stream():
    x, w = arguments(99, 4096)
    expected = rmsnorm_trace.reference(torch.ones_like(x), w)
    rmsnorm(x, w)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a norm on any other stream would run before the fill
        x.fill_(1.0)
        out = rmsnorm(x, w)
    stream.synchronize()
    assert_close(out, expected)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_tensors_device():
    x, w = arguments(device="cuda:1")
    with torch.cuda.device(0):
        assert_close(rmsnorm(x, w), rmsnorm_trace.reference(x, w))


# settings and recipes -------------------------------------------------------------------------------------------------


@needs_cuda
def test_use_cuda_norm_changes_nothing():
    x, w = arguments(99, 4096)
    gamma, beta = (torch.randn(4096, device="cuda") for _ in range(2))
    expected = rmsnorm(x, w), layernorm(x, gamma, beta)
    with knobs.override(use_cuda_norm="1"):
        actual = rmsnorm(x, w), layernorm(x, gamma, beta)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@needs_cuda
@pytest.mark.parametrize("hidden", [2056, 64], ids=["block", "lanes"])
def test_more_rows_than_one_grid_axis(hidden):
    """Check more than 65535 blocks: the grid of short rows then has a third axis, and padding if it does not divide."""
    rows = 70001 if hidden > 1024 else 65535 * 32 + 7
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(hidden, dtype=torch.bfloat16, device="cuda")
    guard = torch.full((rows + 2, hidden), 7.0, dtype=torch.bfloat16, device="cuda")
    rmsnorm(x, w, out=guard[1:-1])
    assert (guard[0] == 7).all() and (guard[-1] == 7).all()
    assert_close(guard[1:-1][-40:], rmsnorm_trace.reference(x[-40:], w))
    assert_close(guard[1:41], rmsnorm_trace.reference(x[:40], w))


@needs_cuda
@pytest.mark.parametrize("hidden", [128, 2056, 16384], ids=["lanes", "two vectors", "four vectors"])
def test_heads_that_do_not_fold(hidden):
    """Check heads of a packed qkv buffer: neither rows nor heads of the view are contiguous."""
    qkv = torch.randn(33, 12, hidden, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(hidden, dtype=torch.bfloat16, device="cuda")
    q = qkv[:, 2:9]
    expected = rmsnorm_trace.reference(q, w)
    rest = qkv.clone()
    rmsnorm(q, w, out=q)
    assert_close(q, expected)
    assert torch.equal(qkv[:, :2], rest[:, :2]) and torch.equal(qkv[:, 9:], rest[:, 9:])


@needs_cuda
@pytest.mark.parametrize("hidden", [2056, 64], ids=["block", "lanes"])
def test_more_heads_than_one_grid_axis(hidden):
    wide = torch.randn(2, 70001, hidden, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(hidden, dtype=torch.bfloat16, device="cuda")
    x, untouched = wide[:, 1:], wide[:, 0].clone()
    parts = [(b, slice(h, h + 20)) for b in range(2) for h in (0, 65520, 70000 - 20)]
    expected = [rmsnorm_trace.reference(x[part], w) for part in parts]
    rmsnorm(x, w, out=x)
    for part, e in zip(parts, expected, strict=True):
        assert_close(x[part], e)
    assert torch.equal(wide[:, 0], untouched)


def check_residual_rows_apart(rows, hidden):
    """Check rows with gaps; the gaps are not written."""
    x, residual = (view_of_wider(randn(rows, hidden, dtype=BF16, device="cuda"), 16, 8) for _ in range(2))
    w = randn(hidden, dtype=BF16, device="cuda")
    expected, total = fused_add_rmsnorm_trace.reference(x, residual, w)
    fused_add_rmsnorm(x, residual, w)
    assert_close(x, expected)
    assert torch.equal(residual, total)
    assert gaps_are_untouched(x) and gaps_are_untouched(residual)


@needs_cuda
@pytest.mark.parametrize("hidden", [520, 1024, 1032, 2048, 2056, 4096, 4104, 8192])
def test_residual_of_a_small_batch(hidden):
    """Check rows that just fill a block of each size, and rows one vector longer."""
    check_residual_rows_apart(5, hidden)


@needs_cuda
@pytest.mark.parametrize("hidden", [64, 4096, 16384], ids=["lanes", "two vectors", "four vectors"])
def test_residual_of_a_batch_that_is_prefetched(hidden):
    """Check batches of 4 MB and more, which are prefetched."""
    check_residual_rows_apart(3001 if hidden > 1024 else 70001, hidden)


@needs_cuda
def test_rows_farther_apart_than_32_bits_count():
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("takes 9 GB")
    far, hidden = 2**32 + 8, 4096
    x = torch.empty(far + hidden, dtype=BF16, device="cuda").as_strided((2, hidden), (far, 1))
    x.copy_(randn(2, hidden, dtype=BF16, device="cuda"))
    w = randn(hidden, dtype=BF16, device="cuda")
    assert_close(rmsnorm(x, w, out=torch.empty(2, hidden, dtype=BF16, device="cuda")), rmsnorm_trace.reference(x, w))
