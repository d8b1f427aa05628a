# SPDX-License-Identifier: Apache-2.0
"""The tolerance table and assert_close."""

import pytest
import torch

from flashinfer.testing import assert_close, tolerances

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [1.0, 1.75, 3.0])
def test_neighbouring_values_pass(dtype, value):
    """Check that one rounding step, the allowed difference of two correct kernels, passes."""
    x = torch.tensor([value]).to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert_close((x.view(bits) + 1).view(dtype), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_large_difference_fails(dtype):
    x = torch.ones(8).to(dtype)
    y = x.clone().float()
    y[3] = 2.0
    with pytest.raises(AssertionError, match=r"(?s)result .*Mismatched elements: 1 / 8") as raised:
        assert_close(y.to(dtype), x)
    assert "index (3,)" in str(raised.value)


def test_integers_must_be_equal():
    assert tolerances(torch.int32) == (0, 0)
    assert_close(torch.arange(3), torch.arange(3))
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1000001]), torch.tensor([1000000]))


def test_shape_and_dtype_are_compared():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2), torch.ones(3))
    with pytest.raises(AssertionError, match=r"dtype must be torch\.float32, got torch\.float16"):
        assert_close(torch.ones(2).half(), torch.ones(2))
    assert_close(torch.ones(2).half(), torch.ones(2) * 1.0005, check_dtype=False)


def test_structures_name_the_part_that_differs():
    good = {"out": torch.ones(2), "pair": (1, torch.zeros(1))}
    assert_close(good, {"out": torch.ones(2), "pair": [1, torch.zeros(1)]})
    with pytest.raises(AssertionError, match=r"result\['pair'\]\[1\]"):
        assert_close(good, {"out": torch.ones(2), "pair": (1, torch.ones(1))})
    with pytest.raises(AssertionError, match="keys must be"):
        assert_close(good, {"out": torch.ones(2)})
    with pytest.raises(AssertionError, match="values must be 1, got 2"):
        assert_close((1, 2), (1,))


def test_nan_is_a_difference_unless_asked():
    nan = torch.tensor([float("nan")])
    with pytest.raises(AssertionError):
        assert_close(nan, nan)
    assert_close(nan, nan, equal_nan=True)


def test_explicit_tolerance_wins():
    assert_close(torch.tensor([1.05]), torch.tensor([1.0]), rtol=0.1, atol=0)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0005]).half(), torch.tensor([1.0]).half() * 1.002, rtol=0, atol=0)
