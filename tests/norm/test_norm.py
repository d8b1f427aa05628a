# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and its fused, in-place forms: values, layouts, edges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, qk_rmsnorm_cute, rmsnorm
from flashinfer.testing import assert_close
from flashinfer.trace.templates.norm import (
    fused_add_rmsnorm_trace,
    gemma_fused_add_rmsnorm_trace,
    gemma_rmsnorm_trace,
    rmsnorm_trace,
)

from ..tensors import gaps_are_untouched, randn, view_of_wider
from .inputs import DTYPES, SHAPES

NORMS = [
    pytest.param(rmsnorm, rmsnorm_trace.reference, id="rmsnorm"),
    pytest.param(gemma_rmsnorm, gemma_rmsnorm_trace.reference, id="gemma_rmsnorm"),
]
FUSED = [
    pytest.param(fused_add_rmsnorm, fused_add_rmsnorm_trace.reference, id="fused_add_rmsnorm"),
    pytest.param(gemma_fused_add_rmsnorm, gemma_fused_add_rmsnorm_trace.reference, id="gemma_fused_add_rmsnorm"),
]
on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_reference_is_torchs(device):
    x, w = randn(7, 500, dtype=torch.float32, device=device), torch.randn(500, device=device)
    expected = torch.nn.functional.rms_norm(x, (500,), w, 1e-5)
    assert_close(rmsnorm_trace.reference(x, w, 1e-5), expected)


@on_any_dtype
@pytest.mark.parametrize("rows, hidden", SHAPES)
@pytest.mark.parametrize("norm, reference", NORMS)
def test_rmsnorm(device, norm, reference, rows, hidden, dtype):
    x, w = randn(rows, hidden, dtype=dtype, device=device), randn(hidden, dtype=dtype, device=device)
    before = x.clone()
    assert_close(norm(x, w), reference(x, w))
    assert torch.equal(x, before)


@on_any_dtype
@pytest.mark.parametrize("rows, hidden", SHAPES)
@pytest.mark.parametrize("norm, reference", FUSED)
def test_fused_add_rmsnorm(device, norm, reference, rows, hidden, dtype):
    x, residual = (randn(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    w = randn(hidden, dtype=dtype, device=device)
    expected, total = reference(x, residual, w, 1e-5)
    assert norm(x, residual, w, eps=1e-5) is None
    assert_close(x, expected)
    assert torch.equal(residual, total)  # a single addition with a single rounding: equality is required


@pytest.mark.parametrize("norm, weight", [(fused_add_rmsnorm, 1.0), (gemma_fused_add_rmsnorm, 0.0)])
def test_fused_add_normalises_the_unrounded_sum(device, norm, weight):
    # 257 is no bfloat16 and rounds to 256. From the rounded sums, which are equal, the whole row would be 1.
    x = torch.full((1, 8), 256.0, device=device, dtype=torch.bfloat16)
    residual = torch.tensor([[0.0] + 7 * [1.0]], device=device, dtype=torch.bfloat16)
    norm(x, residual, torch.full((8,), weight, device=device, dtype=torch.bfloat16))
    assert x.tolist() == [[1 - 2**-8] + 7 * [1.0]]
    assert residual.tolist() == [8 * [256.0]]


@on_any_dtype
@pytest.mark.parametrize("batch, heads, head_dim", [(0, 4, 128), (7, 0, 128), (1, 1, 64), (7, 5, 111), (99, 32, 128)])
@pytest.mark.parametrize("norm, reference", NORMS)
def test_heads(device, norm, reference, batch, heads, head_dim, dtype):
    x, w = randn(batch, heads, head_dim, dtype=dtype, device=device), randn(head_dim, dtype=dtype, device=device)
    assert_close(norm(x, w), reference(x, w))


@on_any_dtype
def test_heads_of_a_larger_buffer(device, dtype):
    """Check q inside a packed (batch, q + k + v heads, head_dim) projection, read and written in place."""
    qkv, w = randn(7, 12, 128, dtype=dtype, device=device), randn(128, dtype=dtype, device=device)
    expected = qkv.clone()
    expected[:, 2:6] = rmsnorm_trace.reference(qkv[:, 2:6], w)
    q = qkv[:, 2:6]
    assert rmsnorm(q, w, out=q) is q
    assert_close(qkv[:, 2:6], expected[:, 2:6])
    assert torch.equal(qkv[:, :2], expected[:, :2]) and torch.equal(qkv[:, 6:], expected[:, 6:])


@on_any_dtype
def test_heads_before_batch(device, dtype):
    x, w = randn(5, 7, 128, dtype=dtype, device=device).transpose(0, 1), randn(128, dtype=dtype, device=device)
    out = rmsnorm(x, w)
    assert out.stride() == torch.empty_like(x).stride()
    assert_close(out, rmsnorm_trace.reference(x, w))


@on_any_dtype
@pytest.mark.parametrize("pad, offset", [(3, 1), (64, 0), (64, 8)])
@pytest.mark.parametrize("hidden", [111, 500, 4096])
def test_strided_rows(device, hidden, pad, offset, dtype):
    x, residual = (randn(7, hidden, dtype=dtype, device=device) for _ in range(2))
    w = randn(hidden, dtype=dtype, device=device)
    wide_x, wide_residual, out = (view_of_wider(t, pad, offset) for t in (x, residual, x))
    assert rmsnorm(wide_x, w, out=out) is out
    assert_close(out, rmsnorm_trace.reference(x, w))
    expected, total = fused_add_rmsnorm_trace.reference(x, residual, w)
    fused_add_rmsnorm(wide_x, wide_residual, w)
    assert_close(wide_x, expected)
    assert torch.equal(wide_residual, total)
    assert all(gaps_are_untouched(view) for view in (out, wide_x, wide_residual))


def test_one_row_many_times(device):
    x, w = torch.randn(1, 500, device=device).expand(7, 500), torch.randn(500, device=device)
    out = rmsnorm(x, w, out=torch.empty(7, 500, device=device))
    assert_close(out, rmsnorm_trace.reference(x, w))


@on_any_dtype
@pytest.mark.parametrize("norm, reference", NORMS)
def test_out_may_be_the_input(device, norm, reference, dtype):
    x, w = randn(99, 4096, dtype=dtype, device=device), randn(4096, dtype=dtype, device=device)
    expected = reference(x, w, 0.1)
    assert norm(x, w, 0.1, out=x) is x
    assert_close(x, expected)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-3, 1.0])
def test_eps(device, eps):
    x, w = randn(7, 128, dtype=torch.bfloat16, device=device) * 1e-2, randn(128, dtype=torch.bfloat16, device=device)
    assert_close(rmsnorm(x, w, eps=eps), rmsnorm_trace.reference(x, w, eps))


@pytest.mark.parametrize("enable_pdl", [None, False, True])
def test_enable_pdl_changes_nothing(device, enable_pdl):
    x, w = randn(99, 500, dtype=torch.float16, device=device), randn(500, dtype=torch.float16, device=device)
    assert torch.equal(rmsnorm(x, w, enable_pdl=enable_pdl), rmsnorm(x, w))


@on_any_dtype
def test_rows_of_zeros(device, dtype):
    x, w = torch.zeros(7, 500, dtype=dtype, device=device), randn(500, dtype=dtype, device=device)
    assert torch.equal(rmsnorm(x, w), x)


@on_any_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 17, 110])
def test_nan_and_inf_stay_in_their_row(device, dtype, bad, column):
    x, w = randn(7, 111, dtype=dtype, device=device), randn(111, dtype=dtype, device=device)
    x[3, column] = bad
    out = rmsnorm(x, w)
    assert_close(out, rmsnorm_trace.reference(x, w), equal_nan=True)
    assert out.isnan().any(dim=-1).tolist() == [row == 3 for row in range(7)]


@on_any_dtype
@pytest.mark.parametrize("magnitude", ["max", "tiny", "smallest_subnormal"])
def test_ends_of_the_range(device, dtype, magnitude):
    # max: squares of fp16 fit a float, those of bf16 and fp32 overflow to infinity and the row becomes 0.
    info = torch.finfo(dtype)
    value = info.tiny * info.eps if magnitude == "smallest_subnormal" else getattr(info, magnitude)
    x, w = torch.full((3, 128), value, dtype=dtype, device=device), randn(128, dtype=dtype, device=device)
    assert_close(rmsnorm(x, w), rmsnorm_trace.reference(x, w))


def test_results_do_not_depend_on_the_batch(device):
    x, w = randn(99, 4096, dtype=torch.bfloat16, device=device), randn(4096, dtype=torch.bfloat16, device=device)
    together = rmsnorm(x, w)
    for row in (0, 50, 98):
        assert torch.equal(rmsnorm(x[row : row + 1], w), together[row : row + 1])


def test_calls_from_several_threads(device):
    inputs = [randn(64, 1000 + i, dtype=torch.float16, device=device) for i in range(8)]
    weights = [randn(1000 + i, dtype=torch.float16, device=device) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rmsnorm, inputs, weights))
    for x, w, out in zip(inputs, weights, results, strict=True):
        assert_close(out, rmsnorm_trace.reference(x, w))


@settings(max_examples=40)
@given(data=st.data())
def test_any_layout(device, data):
    """Check that shape, padding, offset, order of dimensions, dtype and in-place writes do not change the values."""
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    hidden = data.draw(st.integers(1, 300), label="hidden")
    leading = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=2), label="leading")
    pad = data.draw(st.integers(0, 20), label="pad")
    offset = data.draw(st.integers(0, pad), label="offset")
    norm, reference = data.draw(st.sampled_from([p.values for p in NORMS]), label="norm")
    x, w = randn(*leading, hidden, dtype=dtype, device=device), randn(hidden, dtype=dtype, device=device)
    if len(leading) == 2 and data.draw(st.booleans(), label="transposed"):
        x = x.transpose(0, 1)
    expected = reference(x, w)
    view = view_of_wider(x, pad, offset)
    out = view if data.draw(st.booleans(), label="in place") else view_of_wider(torch.zeros_like(x), offset, offset)
    assert norm(view, w, out=out) is out
    assert_close(out, expected)
    assert gaps_are_untouched(out)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_the_name_that_engines_call_for_heads(device, bias):
    x, weight = torch.randn(3, 4, 64, device=device).half(), torch.randn(64, device=device).half()
    out = torch.empty_like(x)
    qk_rmsnorm_cute(x, weight, out, 1e-5, weight_bias=bias)
    same = gemma_rmsnorm if bias else rmsnorm
    assert torch.equal(out, same(x, weight, 1e-5))


def test_a_weight_bias_without_a_kernel():
    x = torch.randn(1, 2, 64)
    with pytest.raises(ValueError, match=r"weight_bias must be 0 or 1, got 0\.5"):
        qk_rmsnorm_cute(x, torch.ones(64), x, weight_bias=0.5)
