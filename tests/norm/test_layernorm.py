# SPDX-License-Identifier: Apache-2.0
"""LayerNorm of bfloat16 rows with float parameters, and its fp8 form."""

from __future__ import annotations

import pytest
import torch

from flashinfer.norm import layernorm, layernorm_quant
from flashinfer.testing import assert_close
from flashinfer.trace import default_check
from flashinfer.trace.templates.norm import layernorm_quant_trace, layernorm_trace

from ..tensors import gaps_are_untouched, randn, view_of_wider
from .inputs import FP8, SHAPES

to_any_fp8 = pytest.mark.parametrize("out_dtype", FP8, ids=str)


def arguments(rows, hidden, device, mean=0.0):
    x = randn(rows, hidden, dtype=torch.float32, device=device) + mean
    return x.bfloat16(), torch.randn(hidden, device=device), torch.randn(hidden, device=device)


def test_reference_is_torchs(device):
    x, gamma, beta = arguments(7, 500, device)
    expected = torch.nn.functional.layer_norm(x.float(), (500,), gamma, beta, 1e-6).bfloat16()
    assert_close(layernorm_trace.reference(x, gamma, beta), expected)


@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_layernorm(device, rows, hidden):
    x, gamma, beta = arguments(rows, hidden, device)
    out = layernorm(x, gamma, beta)
    assert (out.dtype == torch.bfloat16 and out.data_ptr() != x.data_ptr()) or rows == 0
    assert_close(out, layernorm_trace.reference(x, gamma, beta))


@pytest.mark.parametrize("hidden", [4096, 111])
def test_large_mean(device, hidden):
    """Check a large mean: E[x^2] - E[x]^2 would lose all digits here; two passes do not.

    111 columns do not fill the last vector register: its other lanes must not count as deviations from the mean.
    """
    x, gamma, beta = arguments(7, hidden, device, mean=100.0)
    assert_close(layernorm(x, gamma, beta, eps=1e-5), layernorm_trace.reference(x, gamma, beta, 1e-5))


def test_rows_of_one_value(device):
    x, gamma, beta = torch.full((3, 500), 2.5, dtype=torch.bfloat16, device=device), *arguments(1, 500, device)[1:]
    assert_close(layernorm(x, gamma, beta), beta.bfloat16().expand(3, 500))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_stay_in_their_row(device, bad):
    x, gamma, beta = arguments(7, 111, device)
    x[3, 17] = bad
    out = layernorm(x, gamma, beta)
    assert out.isnan().all(dim=-1).tolist() == [row == 3 for row in range(7)]
    assert_close(out, layernorm_trace.reference(x, gamma, beta), equal_nan=True)


@to_any_fp8
@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_layernorm_quant(device, rows, hidden, out_dtype):
    x, gamma, beta = arguments(rows, hidden, device)
    scale = torch.tensor([0.3], device=device)
    out = torch.empty(rows, hidden, dtype=out_dtype, device=device)
    assert layernorm_quant(out, x, gamma, beta, scale) is None
    expected = layernorm_quant_trace.reference(x, gamma, beta, scale, out_dtype=out_dtype)
    assert default_check(expected, out, max_mismatch_pct=1.0, min_cos_sim=None)


@to_any_fp8
def test_quantises_the_rounded_result(device, out_dtype):
    x, gamma, beta = arguments(99, 4096, device)
    scale = torch.tensor(0.1, device=device)
    out = torch.empty(99, 4096, dtype=out_dtype, device=device)
    layernorm_quant(out, x, gamma, beta, scale)
    limit = torch.finfo(out_dtype).max
    expected = (layernorm(x, gamma, beta).float() * (1 / scale)).clamp(-limit, limit).to(out_dtype)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_quant_into_strided_rows(device):
    x, gamma, beta = arguments(7, 500, device)
    scale = torch.tensor(0.5, device=device)
    out = view_of_wider(torch.zeros(7, 500, device=device).to(FP8[0]))
    layernorm_quant(out, x, gamma, beta, scale)
    expected = layernorm_quant_trace.reference(x, gamma, beta, scale)
    assert default_check(expected, out, max_mismatch_pct=1.0, min_cos_sim=None)
    assert gaps_are_untouched(out)


def test_scale_rules(device):
    x, gamma, beta = arguments(7, 128, device)
    out, expected = (torch.empty(7, 128, dtype=FP8[0], device=device) for _ in range(2))
    layernorm_quant(expected, x, gamma, beta, torch.tensor(0.25, device=device))
    with pytest.warns(FutureWarning, match="scale"):
        layernorm_quant(out, x, gamma, beta, 0.25)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match="scale must be a scalar tensor"):
        layernorm_quant(out, x, gamma, beta, torch.ones(2, device=device))
