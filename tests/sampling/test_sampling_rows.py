# SPDX-License-Identifier: Apache-2.0
"""Softmax, renormalisation and masks against sorted references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing import assert_close
from flashinfer.trace.templates import sampling as templates

from .inputs import INF, probs

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0, 100), (1, 1), (7, 5), (33, 111), (9, 4096), (3, 20011)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@shapes
@pytest.mark.parametrize("temperature", [None, 0.3, 1.0, 5.0, 0.0])
def test_softmax(device, shape, temperature):
    x = 5 * torch.randn(shape, device=device)
    x[torch.rand(shape, device=device) < 0.1] = -INF
    y = flashinfer.softmax(x, temperature)
    assert y.dtype == torch.float32 and y.shape == shape
    assert_close(y, templates.softmax_trace.reference(x, temperature), rtol=1e-5, atol=1e-7)
    assert (y[x == -INF] == 0).all()


@pytest.mark.parametrize("vocab", [128256, 151937, 262144, 300001])
def test_softmax_large(device, vocab):
    x = 3 * torch.randn(3, vocab, device=device)
    assert_close(flashinfer.softmax(x), torch.softmax(x.double(), dim=-1).float(), rtol=1e-5, atol=1e-9)


def test_softmax_temperatures_by_row(device):
    x = torch.randn(5, 300, device=device)
    temperatures = torch.tensor([0.1, 1.0, 2.0, 0.0, 1e3], device=device, dtype=torch.float64)
    assert_close(flashinfer.softmax(x, temperatures), templates.softmax_trace.reference(x, temperatures))
    assert_close(flashinfer.softmax(x, 0.0), torch.full_like(x, 1 / 300))
    assert_close(flashinfer.softmax(x.bfloat16()), torch.softmax(x.bfloat16().float(), dim=-1))


def test_softmax_of_extremes(device):
    x = torch.zeros(6, 40, device=device)
    x[0], x[1, 1:], x[2, 3], x[3] = -INF, -INF, torch.nan, 3e38
    x[4], x[4, 7] = -3e38, 3e38
    x[5, :] = torch.linspace(-200, 0, 40, device=device)
    y = flashinfer.softmax(x)
    assert (y[0] == 0).all() and y[1].tolist() == [1.0] + [0.0] * 39
    assert y[2].isnan().nonzero().tolist() == [[3]]
    assert_close(y[3], torch.full_like(y[3], 1 / 40))
    assert y[4, 7] == 1 and y[4].sum() == 1
    assert_close(y[5], torch.softmax(x[5], dim=-1), atol=1e-7)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-8, 1e-12, 1e-30])
@pytest.mark.parametrize("vocab", [40, 9000, 450000])
def test_softmax_of_low_temperatures(device, temperature, vocab):
    """Check low temperatures, where nearly all weight is on the maximum and scaled logits are far from 0."""
    x = 8 * torch.randn(3, vocab, device=device)
    x[1] -= 100
    x[2, : vocab // 2] = -INF
    y = flashinfer.softmax(x, temperature)
    assert torch.equal(y, flashinfer.softmax(x, torch.full((3,), temperature, device=device)))
    assert_close(y, templates.softmax_trace.reference(x, temperature), atol=1e-5, rtol=1e-5)
    assert torch.equal(y.argmax(dim=-1), x.argmax(dim=-1)) and (y.amax(dim=-1) > 0.5).all()


def test_softmax_of_infinity(device):
    x = torch.randn(2, 3000, device=device)
    x[0, [5, 2500]], x[1, 7], x[1, 8] = INF, INF, 3e38
    y = flashinfer.softmax(x)
    assert y[0, [5, 2500]].tolist() == [0.5, 0.5] and y[1, 7] == 1 and y.sum() == 2


def test_softmax_orders_as_logits_do(device):
    """Check that softmax keeps the order at any column: equal logits are equally likely, larger ones not less."""
    x = 4 * torch.randn(3, 9000, device=device)
    x[0, 1::4001] = x[0, 0]
    x[1, 5000:] += 60
    x[2, 3000:4000] = -INF
    y = flashinfer.softmax(x)
    order = x.argsort(dim=-1)
    assert (y.gather(1, order).diff(dim=-1) >= 0).all()
    assert y[0, [0, 1, 4002, 8003]].unique().numel() == 1
    certain = torch.full((1, 9000), -1e4, device=device)
    for column, logit in ((0, 0.3), (5000, 77.7), (8999, -3.3)):
        row = certain.clone()
        row[0, column] = logit
        y = flashinfer.softmax(row)
        assert y[0, column] == 1 and y.sum() == 1


def equal_but_for_rounding(renormed, p, expected, top_p=None):
    """Compare results: kept columns may differ at the threshold; values kept by both must be close."""
    if top_p is None:
        assert_close(renormed, expected)
    else:
        differ = (renormed > 0) != (expected > 0)
        assert p.double()[differ].sum() < 1e-4 * max(1, p.shape[0])
        assert_close(torch.where(differ, 0, renormed), torch.where(differ, 0, expected), rtol=1e-3, atol=1e-6)


@shapes
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_top_p_renorm(device, shape, top_p, spread):
    p = probs(*shape, device, spread) if shape[0] else torch.empty(shape, device=device)
    renormed = flashinfer.top_p_renorm_probs(p, top_p)
    equal_but_for_rounding(renormed, p, templates.top_p_renorm_probs_trace.reference(p, top_p), top_p)
    assert_close(renormed.sum(dim=-1), torch.ones(shape[0], device=device))
    limits = torch.full((shape[0],), top_p, device=device)
    assert torch.equal(flashinfer.top_p_renorm_probs(p, limits, is_deterministic=True), renormed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@shapes
@pytest.mark.parametrize("top_k", [1, 3, 100, 3000, 10**6])
def test_top_k_renorm(device, shape, top_k, dtype):
    p = probs(*shape, device).to(dtype) if shape[0] else torch.empty(shape, device=device, dtype=dtype)
    renormed = flashinfer.top_k_renorm_probs(p, top_k)
    assert renormed.dtype == dtype
    assert_close(renormed, templates.top_k_renorm_probs_trace.reference(p, top_k))
    expected = templates.keep_top_k(p, top_k) > 0
    assert torch.equal((renormed > 0) | (p < 1e-6), expected | (p < 1e-6))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@shapes
@pytest.mark.parametrize("top_k", [1, 3, 100, 3000, 10**6])
def test_top_k_mask(device, shape, top_k, dtype):
    x = torch.randn(shape, device=device).to(dtype)
    x[torch.rand(shape, device=device) < 0.3] = -INF
    masked = flashinfer.top_k_mask_logits(x, top_k)
    assert masked.dtype == dtype and torch.equal(masked, templates.top_k_mask_logits_trace.reference(x, top_k))


def test_top_k_by_row(device):
    x, limits = torch.randn(6, 500, device=device), torch.tensor([1, 10**6, 500, 2, 0, 499], device=device)
    masked = flashinfer.top_k_mask_logits(x, limits)
    assert torch.equal(masked, templates.top_k_mask_logits_trace.reference(x, limits))
    assert (masked > -INF).sum(dim=-1).tolist() == [1, 500, 500, 2, 1, 499]
    p = torch.softmax(x, dim=-1)
    renormed = flashinfer.top_k_renorm_probs(p, limits.int())
    assert (renormed > 0).sum(dim=-1).tolist() == [1, 500, 500, 2, 1, 499]


def test_rows_without_mass(device):
    p = torch.zeros(3, 50, device=device)
    p[1] = torch.nan
    assert not flashinfer.top_p_renorm_probs(p, 0.5).any()
    assert not flashinfer.top_k_renorm_probs(p, 5).any()
    x = torch.full((2, 50), -INF, device=device)
    assert torch.equal(flashinfer.top_k_mask_logits(x, 5), x)
    x[0, 7] = torch.nan
    assert flashinfer.top_k_mask_logits(x, 1)[0].isnan().sum() == 1


@pytest.mark.parametrize("pad, offset", [(0, 0), (4, 0), (3, 1), (8, 5)])
def test_strided(device, pad, offset):
    p = probs(9, 1001, device)
    wide = torch.full((9, 1001 + pad), 7.0, device=device)
    view = wide[:, offset : offset + 1001] if pad else wide
    view.copy_(p)
    assert torch.equal(flashinfer.top_p_renorm_probs(view, 0.8), flashinfer.top_p_renorm_probs(p, 0.8))
    assert torch.equal(flashinfer.top_k_renorm_probs(view, 9), flashinfer.top_k_renorm_probs(p, 9))
    assert torch.equal(flashinfer.top_k_mask_logits(view, 9), flashinfer.top_k_mask_logits(p, 9))
    assert torch.equal(flashinfer.softmax(view, 0.5), flashinfer.softmax(p, 0.5))


@settings(max_examples=40)
@given(data=st.data())
def test_any_mask(device, data):
    """Check many equal values, infinities, both signs."""
    vocab = data.draw(st.one_of(st.integers(1, 200), st.sampled_from([2047, 5000])), label="vocab")
    values = st.one_of(st.floats(-10, 10, width=16), st.sampled_from([0.0, -0.0, INF, -INF]))
    palette = torch.tensor(data.draw(st.lists(values, min_size=1, max_size=5), label="values"))
    dtype = data.draw(st.sampled_from(FLOATS), label="dtype")
    x = palette[torch.randint(0, len(palette), (3, vocab))].to(device=device, dtype=dtype)
    x = x + 0.0  # turns -0 into 0 for the reference
    top_k = data.draw(st.integers(1, vocab + 3), label="top_k")
    masked = flashinfer.top_k_mask_logits(x, top_k)
    assert torch.equal(masked, templates.top_k_mask_logits_trace.reference(x, top_k))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two devices")
@pytest.mark.parametrize("vocab", [5, 777, 4096, 30011, 128256])
def test_devices_agree(vocab):
    x = 3 * torch.randn(16, vocab)
    p = torch.softmax(x, dim=-1)
    for function, argument, parameter in (
        (flashinfer.softmax, x, 0.7),
        (flashinfer.top_p_renorm_probs, p, 0.8),
        (flashinfer.top_k_renorm_probs, p, 20),
        (flashinfer.top_k_mask_logits, x, 20),
    ):
        assert torch.equal(function(argument, parameter), function(argument.cuda(), parameter).cpu()), function.__name__


def unusual(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """Return rows that violate the assumptions of samples, candidate lists and histogram bins."""
    p, columns = probs(rows, vocab, "cpu"), torch.arange(vocab, dtype=torch.float32).expand(rows, vocab)
    if kind == "flat":
        p = probs(rows, vocab, "cpu", 1.0)
    elif kind == "equal":
        p = torch.full_like(p, 1 / vocab)
    elif kind == "ascending":
        p = torch.nn.functional.normalize(columns, p=1, dim=-1)
    elif kind == "descending":
        p = p.sort(dim=-1, descending=True).values
    elif kind == "one":
        p = (columns == vocab // 3).float()
    elif kind == "ties":
        p = torch.softmax(2 * torch.randn(rows, vocab).round(), dim=-1)
    elif kind == "nothing":
        p = torch.zeros_like(p)
    elif kind == "few":
        p = torch.where(torch.rand_like(p) < 1e-3, p, 0.0)
    elif kind == "nan":
        p = torch.where(columns % 1000 == 5, torch.nan, p)
    elif kind == "tiny":
        p = p * 1e-38
    elif kind == "heavy":
        p = p * 1e4
    elif kind in ("seen", "unseen"):  # all mass lies in sampled columns, or none
        pieces = torch.arange(256) * (vocab // 16) // 256
        is_seen = torch.isin(torch.arange(vocab) // 16, pieces)
        p = torch.nn.functional.normalize(torch.where(is_seen == (kind == "seen"), p, 1e-9), p=1, dim=-1)
    return p


NORMALISED = ["soft", "flat", "equal", "ascending", "descending", "one", "ties", "seen", "unseen"]
UNUSUAL = [*NORMALISED, "nothing", "few", "nan", "tiny", "heavy"]


@pytest.mark.parametrize("kind", NORMALISED)
@pytest.mark.parametrize("vocab", [300, 20_000, 128_256])
def test_top_p_of_unusual_rows(device, kind, vocab):
    p = unusual(kind, 3, vocab).to(device)
    for top_p in (0.3, 0.9, 0.999):
        expected = templates.top_p_renorm_probs_trace.reference(p, top_p)
        renormed = flashinfer.top_p_renorm_probs(p, top_p)
        if kind != "equal":  # with equal columns, any one of them may be the last kept, or all are kept
            equal_but_for_rounding(renormed, p, expected, top_p)
        assert_close(renormed.sum(dim=-1), torch.ones(3, device=device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two devices")
@pytest.mark.parametrize(
    "rows, vocab", [(1, 128256), (70, 128256), (300, 40001), (9, 8193), (5, 300), (600, 2048), (7, 513), (100, 262144)]
)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_rows_on_both_devices(kind, rows, vocab):
    """Check bitwise equality, whether kept columns were listed, searched in the row, or all columns."""
    p = unusual(kind, 5, vocab)
    logits = p.log().nan_to_num(nan=torch.nan, neginf=-INF) + 9
    ks = torch.tensor([1, 50, 2000, vocab // 2, vocab], dtype=torch.int32)
    for function, x, parameters in (
        (flashinfer.top_p_renorm_probs, p, [0.9, torch.tensor([0.2, 0.999, 1.0, 0.0, 0.9])]),
        (flashinfer.top_k_renorm_probs, p, [50, ks]),
        (flashinfer.top_k_renorm_probs, p.bfloat16(), [50]),
        (flashinfer.top_k_mask_logits, logits, [50, ks]),
        (flashinfer.top_k_mask_logits, logits.half(), [50]),
    ):
        repeated = x.cuda()[torch.arange(rows, device="cuda") % 5]
        for parameter in parameters:
            expected = function(x, parameter)[torch.arange(rows) % 5]
            if torch.is_tensor(parameter):
                parameter = parameter.cuda()[torch.arange(rows, device="cuda") % 5]
            assert_equal(function(repeated, parameter).cpu(), expected)


def assert_equal(one, other):
    """Check equal bits; any NaN equals any NaN."""
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(
        one.nan_to_num(nan=0.0, neginf=-INF, posinf=INF), other.nan_to_num(nan=0.0, neginf=-INF, posinf=INF)
    )
