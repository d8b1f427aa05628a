# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with an fp8 result."""

from __future__ import annotations

import warnings

import pytest
import torch

from flashinfer.norm import fused_add_rmsnorm_quant, rmsnorm_quant
from flashinfer.testing import assert_close
from flashinfer.trace.templates.norm import fused_add_rmsnorm_quant_trace, rmsnorm_quant_trace

from ..tensors import gaps_are_untouched, randn, view_of_wider
from .inputs import DTYPES, FP8, SHAPES

on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
to_any_fp8 = pytest.mark.parametrize("out_dtype", FP8, ids=str)


def scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


@to_any_fp8
@on_any_dtype
@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_rmsnorm_quant(device, rows, hidden, dtype, out_dtype):
    x, w = randn(rows, hidden, dtype=dtype, device=device), randn(hidden, dtype=dtype, device=device)
    out, scale = torch.empty(rows, hidden, dtype=out_dtype, device=device), scalar(0.3, device)
    assert rmsnorm_quant(out, x, w, scale) is None
    assert_close(out, rmsnorm_quant_trace.reference(x, w, scale, out_dtype=out_dtype))


@to_any_fp8
@on_any_dtype
@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_fused_add_rmsnorm_quant(device, rows, hidden, dtype, out_dtype):
    x, residual = (randn(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    w, scale = randn(hidden, dtype=dtype, device=device), scalar(2.0, device)
    out = torch.empty(rows, hidden, dtype=out_dtype, device=device)
    expected, total = fused_add_rmsnorm_quant_trace.reference(x, residual, w, scale, 1e-5, out_dtype=out_dtype)
    before = x.clone()
    assert fused_add_rmsnorm_quant(out, x, residual, w, scale, eps=1e-5) is None
    assert_close(out, expected)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)


@to_any_fp8
def test_few_values_differ_at_all(device, out_dtype):
    """Count values rounded to a neighbour of the nearest fp8 number: allowed only near a midpoint."""
    x, w = randn(99, 4096, dtype=torch.bfloat16, device=device), randn(4096, dtype=torch.bfloat16, device=device)
    out, scale = torch.empty(99, 4096, dtype=out_dtype, device=device), scalar(0.3, device)
    rmsnorm_quant(out, x, w, scale)
    expected = rmsnorm_quant_trace.reference(x, w, scale, out_dtype=out_dtype)
    assert (out.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 1e-4


@to_any_fp8
def test_saturates(device, out_dtype):
    x, w = torch.tensor([[1.0, -1.0, 1.0, -1.0]], device=device), torch.tensor([1e6, 1e6, 1.0, 0.0], device=device)
    out = torch.empty(1, 4, dtype=out_dtype, device=device)
    rmsnorm_quant(out, x, w, scalar(1.0, device))
    largest = torch.finfo(out_dtype).max
    assert out.float().tolist() == [[largest, -largest, 1.0, 0.0]]


@to_any_fp8
def test_nan_stays_nan_and_inf_saturates(device, out_dtype):
    x = torch.ones(3, 17, device=device)
    x[1, 4] = torch.nan
    w = torch.ones(17, device=device)
    w[2] = torch.inf
    out = torch.empty(3, 17, dtype=out_dtype, device=device)
    rmsnorm_quant(out, x, w, scalar(1.0, device))
    assert out.float().isnan().any(dim=-1).tolist() == [False, True, False]
    assert out.float()[0, 2] == torch.finfo(out_dtype).max


@to_any_fp8
@pytest.mark.parametrize("pad, offset", [(3, 1), (64, 0)])
def test_strided_rows(device, pad, offset, out_dtype):
    x, residual = (randn(7, 500, dtype=torch.float16, device=device) for _ in range(2))
    w, scale = randn(500, dtype=torch.float16, device=device), scalar(0.5, device)
    wide_x, wide_residual = view_of_wider(x, pad, offset), view_of_wider(residual, pad, offset)
    out = view_of_wider(torch.zeros(7, 500, device=device).to(out_dtype), pad, offset)
    rmsnorm_quant(out, wide_x, w, scale)
    assert_close(out, rmsnorm_quant_trace.reference(x, w, scale, out_dtype=out_dtype))
    fused_add_rmsnorm_quant(out, wide_x, wide_residual, w, scale)
    expected, total = fused_add_rmsnorm_quant_trace.reference(x, residual, w, scale, out_dtype=out_dtype)
    assert_close(out, expected)
    assert torch.equal(wide_residual, total)
    assert gaps_are_untouched(out) and gaps_are_untouched(wide_residual)


@pytest.mark.parametrize("make", [scalar, lambda v, d: scalar(v, d).reshape(1), lambda v, d: scalar(v, d).double()])
def test_scale_is_a_tensor_of_one_element(device, make):
    x, w = torch.randn(7, 128, device=device), torch.randn(128, device=device)
    expected, out = (torch.empty(7, 128, dtype=FP8[0], device=device) for _ in range(2))
    rmsnorm_quant(expected, x, w, scalar(0.25, device))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rmsnorm_quant(out, x, w, make(0.25, device))
    assert torch.equal(out.float(), expected.float())


def test_scale_as_a_number_warns(device):
    x, w = torch.randn(7, 128, device=device), torch.randn(128, device=device)
    expected, out = (torch.empty(7, 128, dtype=FP8[0], device=device) for _ in range(2))
    rmsnorm_quant(expected, x, w, scalar(0.25, device))
    with pytest.warns(FutureWarning, match="scale"):
        rmsnorm_quant(out, x, w, 0.25)
    assert torch.equal(out.float(), expected.float())


@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,), (7,)])
def test_scale_of_another_shape(device, shape):
    x, w = torch.randn(7, 128, device=device), torch.randn(128, device=device)
    out = torch.empty(7, 128, dtype=FP8[0], device=device)
    with pytest.raises(ValueError, match="scale must be a scalar tensor"):
        rmsnorm_quant(out, x, w, torch.ones(shape, device=device))
    with pytest.raises(ValueError, match="scale must be a scalar tensor"):
        fused_add_rmsnorm_quant(out, x, x.clone(), w, torch.ones(shape, device=device))
