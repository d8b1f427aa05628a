# SPDX-License-Identifier: Apache-2.0
"""Comparison of the result of a replayed call with the recorded one."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from .._runtime.describe import describe_tensor

__all__ = ["Unrecorded", "compare"]

_TOLERANCE = 1e-3  # relative and absolute


class Unrecorded:
    """Placeholder of an object that a dump cannot hold, such as a communicator."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


def compare(expected: Any, actual: Any, path: str) -> list[str]:
    """Return one line per difference; objects that a dump cannot hold are skipped."""
    if isinstance(expected, Unrecorded):
        return []
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _compare_tensors(expected, actual.detach().cpu(), path)
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        return [line for key in expected for line in compare(expected[key], actual[key], f"{path}[{key!r}]")]
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for i, (left, right) in pairs for line in compare(left, right, f"{path}[{i}]")]
    same = type(expected) is type(actual) and (expected == actual or (expected != expected and actual != actual))
    with contextlib.suppress(TypeError):
        same = same or math.isclose(expected, actual, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return [] if same else [f"{path} is {_show(actual)}, recorded {_show(expected)}"]


def _show(value: Any) -> str:
    return describe_tensor(value) if isinstance(value, torch.Tensor) else repr(value)


def _compare_tensors(expected: torch.Tensor, actual: torch.Tensor, path: str) -> list[str]:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        ours, theirs = ((tuple(t.shape), t.dtype) for t in (actual, expected))
        return [f"{path} is {ours}, recorded {theirs}"]
    if not expected.is_floating_point() or (expected.element_size() == 1 and "float8" not in str(expected.dtype)):
        # Integers and packed formats (two fp4 in a byte) must agree exactly.
        left, right = (t.contiguous().view(torch.uint8) if t.is_floating_point() else t for t in (expected, actual))
        wrong = (left != right).sum().item()
        return [f"{path} differs in {wrong} of {expected.numel()} elements"] if wrong else []
    left, right = expected.double(), actual.double()
    close = torch.isclose(right, left, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    if close.all():
        return []
    worst = (left - right)[~close].abs().max().item()
    wrong = close.numel() - int(close.sum())
    return [f"{path} differs in {wrong} of {close.numel()} elements, largest difference {worst:.4g}"]
