# SPDX-License-Identifier: Apache-2.0
"""Tolerances for comparing two results: one table by dtype, used by every op test and by ``--refcheck``."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

__all__ = ["Tolerance", "assert_close", "tolerances"]


class Tolerance(NamedTuple):
    """``|actual - expected| <= atol + rtol * |expected|``."""

    rtol: float
    atol: float


# Kernels and references both compute in fp32 and round once, so they may land on neighbouring values of the output
# dtype: rtol is one unit in the last place (2^-10 fp16, 2^-7 bf16, 2^-3 e4m3, 2^-2 e5m2), rounded up. atol covers
# values near zero; for fp8 it is the step between the smallest numbers (2^-9 e4m3, 2^-16 e5m2).
_TABLE = {
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
    torch.float8_e4m3fn: Tolerance(0.125, 2e-3),
    torch.float8_e5m2: Tolerance(0.25, 2e-5),
}
_EXACT = Tolerance(0.0, 0.0)


def tolerances(dtype: torch.dtype) -> Tolerance:
    """``(rtol, atol)`` for results stored as ``dtype``; integers and booleans must be equal.

    Examples
    --------
    >>> flashinfer.testing.tolerances(torch.int32)
    Tolerance(rtol=0.0, atol=0.0)
    """
    return _TABLE.get(dtype, _EXACT)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert fp8 and the 16-bit types to fp32, which holds each of their values exactly."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def assert_close(
    actual: Any,
    expected: Any,
    rtol: Optional[float] = None,
    atol: Optional[float] = None,
    *,
    check_dtype: bool = True,
    equal_nan: bool = False,
    name: str = "result",
) -> None:
    """Raise ``AssertionError`` unless ``actual`` and ``expected`` agree within the tolerance of their dtype.

    Parameters
    ----------
    actual, expected : torch.Tensor, number, or nested list, tuple or dict of them
        Same structure, shapes and (with ``check_dtype``) dtypes.
    rtol, atol : float, optional
        Replace the value of :func:`tolerances` for ``actual.dtype``; say why where you pass one.
    check_dtype : bool
        False compares values only, with the looser of the two dtypes' tolerances.
    equal_nan : bool
        True: NaN equals NaN.
    name : str
        How the message calls the value.

    Examples
    --------
    >>> flashinfer.testing.assert_close(torch.ones(3) + 1e-7, torch.ones(3))
    """
    same: Any = {"rtol": rtol, "atol": atol, "check_dtype": check_dtype, "equal_nan": equal_nan}
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), (
            f"{name}: keys must be {sorted(expected)}, got {sorted(actual)}"
        )
        for key in expected:
            assert_close(actual[key], expected[key], **same, name=f"{name}[{key!r}]")
        return
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple)) and len(actual) == len(expected), (
            f"{name}: values must be {len(expected)}, got {len(actual)}"
        )
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, **same, name=f"{name}[{i}]")
        return
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert not check_dtype or actual.dtype == expected.dtype, (
        f"{name}: dtype must be {expected.dtype}, got {actual.dtype}"
    )
    loose = max(tolerances(actual.dtype), tolerances(expected.dtype))
    torch.testing.assert_close(
        _comparable(actual),
        _comparable(expected),
        rtol=loose.rtol if rtol is None else rtol,
        atol=loose.atol if atol is None else atol,
        check_dtype=False,
        equal_nan=equal_nan,
        msg=lambda text: f"{name} ({actual.dtype}): {text}",
    )
