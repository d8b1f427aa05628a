# SPDX-License-Identifier: Apache-2.0
"""``default_check``: which outputs pass as correct."""

from __future__ import annotations

import pytest
import torch

from flashinfer.trace import default_check, default_tolerances


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-7),
        (torch.float32, 1e-5),
        (torch.float16, 1e-3),
        (torch.bfloat16, 1e-2),
        (torch.float8_e4m3fn, 1e-1),
        (torch.float8_e5m2, 1e-1),
        (torch.float4_e2m1fn_x2, 1.0),
        (torch.int32, 0.0),
    ],
)
def test_tolerances_of_a_dtype(dtype, tolerance):
    assert default_tolerances(dtype) == (tolerance, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_error_is_measured_against_the_dtype(dtype):
    reference = torch.ones(100, dtype=dtype)
    tolerance, _ = default_tolerances(dtype)
    assert default_check(reference, reference * (1 + tolerance))
    assert not default_check(reference, reference * (1 + 4 * tolerance))


def test_looser_dtype_decides():
    reference = torch.full((10,), 1.001, dtype=torch.float32)
    assert default_check(reference, torch.ones(10, dtype=torch.bfloat16))


def test_fp8_neighbours_are_close():
    reference = torch.tensor([1.0, 2.0, 448.0]).to(torch.float8_e4m3fn)
    actual = torch.tensor([1.125, 2.25, 416.0]).to(torch.float8_e4m3fn)
    assert default_check(reference, actual)
    assert not default_check(reference, actual, rtol=0.0, atol=0.0)


def test_fp4_is_unpacked():
    reference = torch.tensor([0x12, 0xF7], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # 1 0.5, 6 -6
    assert default_check(reference, reference)
    flipped = torch.tensor([0x12, 0x77], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert not default_check(reference, flipped)


def test_some_elements_may_mismatch():
    reference = torch.ones(200)
    actual = reference.clone()
    actual[:2] = 1.1
    assert not default_check(reference, actual)
    assert default_check(reference, actual, max_mismatch_pct=1.0)
    assert not default_check(reference, actual, max_mismatch_pct=0.9)


def test_cosine_catches_what_a_percentage_hides():
    reference = torch.ones(200)
    actual = reference.clone()
    actual[0] = -1000.0
    assert not default_check(reference, actual, max_mismatch_pct=1.0)
    assert default_check(reference, actual, max_mismatch_pct=1.0, min_cos_sim=None)


def test_non_finite_values_must_be_in_the_same_places():
    reference = torch.tensor([1.0, float("inf"), float("-inf"), float("nan")])
    assert default_check(reference, reference.clone())
    assert not default_check(reference, torch.tensor([1.0, float("-inf"), float("-inf"), float("nan")]))
    assert not default_check(torch.ones(2), torch.tensor([1.0, float("nan")]))


def test_zeros_have_no_direction():
    assert default_check(torch.zeros(4), torch.full((4,), 1e-9))


def test_integers_are_exact():
    reference = torch.arange(100)
    actual = reference.clone()
    actual[3] += 1
    assert default_check(reference, reference.clone())
    assert not default_check(reference, actual)
    assert default_check(reference, actual, max_mismatch_pct=1.0)
    assert default_check(torch.tensor([True]), torch.tensor([True]))


@pytest.mark.parametrize(
    "reference, actual, expected",
    [
        ([torch.ones(2), 3], (torch.ones(2), 3), True),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)], False),
        ([torch.ones(2)], torch.ones(2), False),
        (torch.ones(2), [torch.ones(2)], False),
        (torch.ones(2), {"a": torch.ones(2)}, False),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, False),
        ({"a": torch.ones(2)}, torch.ones(2), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.ones(0, 3), torch.ones(0, 3), True),
        (None, None, True),
        (torch.ones(1), None, False),
        (0.5, 0.5, True),
        (0.5, 0.6, False),
    ],
)
def test_containers(reference, actual, expected):
    assert default_check(reference, actual) is expected
