# SPDX-License-Identifier: Apache-2.0
"""The Hopper prefill kernel for e4m3 queries, keys and values on the CPU, against a reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

from .emulated_cases import CAP, CAUSAL, CUSTOM, LENGTHS, Case, compiled

E4M3 = torch.float8_e4m3fn
#: Weights have three fraction bits, so each is off by at most 2^-4 of itself, and those below 2^-14 of the largest by
#: 2^-18 of that one. An output is off by at most this part of the sum of |weight * value|.
WEIGHT_ERROR, SMALL_ERROR = 2**-4, 2**-18
#: Rounding of the result to bfloat16, and sums in float.
RESULT_ERROR = 2**-8


@pytest.fixture(scope="module")
def d128(tmp_path_factory):
    return compiled(tmp_path_factory, (128, 128), "rows", "pages", "scales", dtypes=(E4M3, E4M3))


@pytest.fixture(scope="module")
def d64(tmp_path_factory):
    """Three consumer warpgroups, and rows of keys that fill half of a slab."""
    options = {"dtypes": (E4M3, E4M3), "dtype_o": torch.float16}
    return compiled(tmp_path_factory, (64, 64), "rows", "cap", "scales", **options)


@pytest.fixture(scope="module")
def d256(tmp_path_factory):
    """Steps of 64 keys, whose columns two warps share."""
    return compiled(tmp_path_factory, (256, 256), "pages", "masks", dtypes=(E4M3, E4M3))


class Fp8Case(Case):
    """A batch of 8-bit queries, keys and values, with scales of each head if the kernel has them."""

    def with_scales(self) -> Fp8Case:
        heads = (self.qo_heads, self.kv_heads, self.kv_heads)
        self.scales = [torch.rand(n) * 2 + 0.25 for n in heads]
        return self

    def check(self, soft_cap: float = 0.0, has_hooks: bool = False, seed: int = 1) -> None:
        o, lse = self.run(seed)
        want_o, want_lse = self.expected(soft_cap, has_hooks)
        values, self.values = self.values, self.values.float().abs().to(E4M3)
        absolute, _ = self.expected(soft_cap, has_hooks)
        self.values = values
        error = (o.double() - want_o).abs()
        largest = 448 * max((float(x.max()) for x in self.scales[2:]), default=1.0)
        bound = absolute * (WEIGHT_ERROR + RESULT_ERROR) + SMALL_ERROR * sum(self.kv_lens) * largest / 2**7 + 1e-6
        assert not o.isnan().any()
        assert (error <= bound).all(), (error / bound).max()
        assert error.norm() <= 2**-5 * want_o.norm() + 1e-6  # errors of the weights are independent
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mask_mode", [0, CAUSAL])
def test_ragged(d128, mask_mode):
    case = Fp8Case(d128, *LENGTHS, (4, 2), mask_mode=mask_mode)
    case.check()
    assert case.items > 2 * case.blocks  # blocks run several items


@pytest.mark.parametrize("seed", [2, 3])
def test_scales(d128, seed):
    """Each head has scales; a group of three does not divide a tile, so consumers copy the queries."""
    Fp8Case(d128, [61, 50, 7], [70, 140, 333], (6, 2), mask_mode=CAUSAL).with_scales().check(seed=seed)


@pytest.mark.parametrize("page_size, layout", [(1, "NHD"), (16, "HND"), (64, "NHD")])
def test_pages(d128, page_size, layout):
    """Rows of pages that were never written are NaN."""
    case = Fp8Case(d128, [300, 2, 0, 129], [301, 5, 0, 270], (2, 1), page_size=page_size, layout=layout)
    case.with_scales().check(seed=page_size)


def test_pages_with_gaps(d128):
    Fp8Case(d128, [20], [77], (2, 2), page_size=8, gap=3).check()


@pytest.mark.parametrize("window", [0, 100])
def test_window(d128, window):
    Fp8Case(d128, [150, 30], [400, 30], (1, 1), mask_mode=CAUSAL, window=window).check()


def test_split_keys(d128):
    """Items write partial states, with the scales of values, and the last merge."""
    case = Fp8Case(d128, [40, 20], [700, 90], (2, 1), mask_mode=CAUSAL, split=192).with_scales()
    case.check()
    assert case.items == 4 + 1


def test_one_key(d128):
    """The weight of the only visible key is exact, so the output is its value but for the rounding of the result."""
    case = Fp8Case(d128, [33], [40], (2, 1), mask_mode=CAUSAL, window=0)
    o, lse = case.run()
    want_o, want_lse = case.expected()
    torch.testing.assert_close(o.double(), want_o, rtol=RESULT_ERROR, atol=0)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_soft_cap(d64):
    """Scales multiply the logits before the cap."""
    Fp8Case(d64, *LENGTHS, (6, 2), mask_mode=CAUSAL).with_scales().check(soft_cap=CAP)


@pytest.mark.parametrize("page_size", [1, 16])
def test_custom_mask(d256, page_size):
    Fp8Case(d256, [50, 20], [190, 131], (2, 1), mask_mode=CUSTOM, page_size=page_size).check()


def test_dominant_key(d128):
    """Weights that differ by many powers of two: the largest is exact, and m follows it."""
    case = Fp8Case(d128, [40], [500], (1, 1))
    case.sm_scale = 4 / math.sqrt(128)
    case.check()


@pytest.mark.parametrize("first, last", [(-4.0, -14.0), (-14.0, -4.0), (3.0, -14.0)])
def test_negative_scores(d128, first, last):
    """Scores are compared as integers, which is right for positive ones only: these rows compare them as floats."""
    case = Fp8Case(d128, [70], [900], (2, 1))
    case.q[..., 0] = 16.0
    case.keys[..., 0] = torch.linspace(first, last, 900)[:, None].to(E4M3)
    case.check()


def test_pages_by_rows(d128):
    """Pages of 4 rows are too small for boxes of TMA, so that cp.async copies keys and values."""
    Fp8Case(d128, [130, 9], [301, 270], (2, 1), mask_mode=CAUSAL, page_size=4).with_scales().check()


@pytest.mark.parametrize("kv_len", [2048, 2100, 5000])
def test_two_levels(d128, kv_len):
    """Sums of 2048 keys are added in shared memory; exponents grow between them, as keys are taken last to first."""
    case = Fp8Case(d128, [23, 9], [kv_len, 2176], (3, 1), mask_mode=CAUSAL)
    growth = torch.linspace(2.0, 0.25, sum(case.kv_lens))[:, None, None]
    case.keys = (case.keys.float() * growth).to(E4M3)
    case.check(seed=kv_len)
