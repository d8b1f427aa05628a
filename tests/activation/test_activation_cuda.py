# SPDX-License-Identifier: Apache-2.0
"""CUDA-only behaviour of the activations: graphs, streams, large grids."""

from __future__ import annotations

import pytest
import torch

from flashinfer.activation import gelu_and_mul, silu_and_mul, swiglu
from flashinfer.jit import gen_jit_spec, get_act_and_mul_cu_str
from flashinfer.testing import assert_close
from flashinfer.trace.templates.activation import gelu_and_mul_trace, silu_and_mul_trace, swiglu_trace

from ..graphs import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("enable_pdl", [False, None])
def test_graph_capture(enable_pdl):
    x, gate, out = randn(99, 2 * 4096), randn(99, 2048), torch.empty(99, 4096, device="cuda", dtype=torch.bfloat16)
    second = torch.empty_like(gate)

    def step():
        silu_and_mul(x, out=out, enable_pdl=enable_pdl)
        gelu_and_mul(out, out=second, enable_pdl=enable_pdl)
        swiglu(second, gate, out=second)

    graph, _ = capture(step)
    x.normal_()
    graph.replay()
    first = silu_and_mul_trace.reference(x)
    assert_close(out, first)
    assert_close(second, swiglu_trace.reference(gelu_and_mul_trace.reference(first), gate), rtol=2e-2, atol=2e-2)


def test_runs_on_the_current_stream():
    x = randn(99, 2 * 4096)
    silu_and_mul(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # an activation on any other stream would run before the fill
        x.fill_(1.0)
        out = silu_and_mul(x)
    stream.synchronize()
    assert_close(out, silu_and_mul_trace.reference(torch.ones_like(x)))


@pytest.mark.parametrize("half", [2056, 8], ids=["chunks", "shared blocks"])
def test_more_rows_than_one_grid_axis(half):
    """Check more than 65535 row groups: the grid then has a third axis, and padding if the axis does not divide."""
    rows = 70001 if half > 1024 else 65535 * 128 + 7
    x = randn(rows, 2 * half)
    guard = torch.full((rows + 2, half), 7.0, dtype=torch.bfloat16, device="cuda")
    silu_and_mul(x, out=guard[1:-1])
    assert (guard[0] == 7).all() and (guard[-1] == 7).all()
    assert_close(guard[1:41], silu_and_mul_trace.reference(x[:40]))
    assert_close(guard[-41:-1], silu_and_mul_trace.reference(x[-40:]))


def test_more_than_2_31_elements():
    x = torch.empty(90_000, 2 * 12288, device="cuda", dtype=torch.float16)
    x[:4], x[-4:] = randn(4, 2 * 12288, dtype=torch.float16), randn(4, 2 * 12288, dtype=torch.float16)
    out = silu_and_mul(x)
    for rows in (slice(0, 4), slice(-4, None)):
        assert_close(out[rows], silu_and_mul_trace.reference(x[rows]))


def test_swiglu_of_more_than_2_31_elements():
    x = torch.ones(2**31 + 11, device="cuda", dtype=torch.float16)
    x[-20:] = randn(20, dtype=torch.float16)
    assert_close(swiglu(x, x)[-20:], swiglu_trace.reference(x[-20:], x[-20:]))


def test_an_activation_of_the_user(tmp_path):
    """Check the module of a source of get_act_and_mul_cu_str; the name of its function is one of ours."""
    definition = "__device__ __forceinline__ float silu(const float& x) { return x > 0.f ? x * x : 0.f; }"
    (tmp_path / "own.cu").write_text(get_act_and_mul_cu_str("silu", definition))
    module = gen_jit_spec("own_activation", [tmp_path / "own.cu"]).build_and_load()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = randn(33, 2 * 200, dtype=dtype)
        out = torch.empty(33, 200, device="cuda", dtype=dtype)
        module.silu_and_mul(out, x, False)
        gate, up = x.double().chunk(2, dim=-1)
        assert_close(out, (gate.relu() ** 2 * up).to(dtype))
