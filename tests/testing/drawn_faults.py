# SPDX-License-Identifier: Apache-2.0
"""Calls with faults for the tests of ``tests/guard_pages.py``; each dictionary is as a family's ``CALLS``."""

from __future__ import annotations

import ctypes
import os

import torch

from flashinfer._runtime.errors import ArgumentError

from ..guard_pages import Call


def add_one(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 0:
        raise ArgumentError("add_one: x must have rows, got 0")
    return x + 1


def read_behind(x: torch.Tensor) -> int:
    return ctypes.string_at(x.data_ptr() + x.numel() * x.element_size(), 1)[0]


def write_before(x: torch.Tensor) -> None:
    ctypes.memset(x.data_ptr() - 1, 0, 1)


def use_table(x: torch.Tensor) -> None:
    [][int(x.shape[0])]


def refuse(x: torch.Tensor) -> None:
    raise ArgumentError("refuse: x must be something else, got x")


def _draw(function, check=None):
    return lambda draw: Call(function, draw.guard(torch.ones(3, 5), front=False), check=check)


def _is_zero(result: torch.Tensor) -> None:
    assert not result.any(), "the result must be zero"


KINDS = {
    "good": {"add_one": lambda draw: Call(add_one, draw.tensor((draw.size(0, 1, 3), 5)))},
    "reads behind": {"add_one": _draw(add_one), "read_behind": _draw(read_behind)},
    "writes before": {"write_before": _draw(write_before)},
    "other error": {"use_table": _draw(use_table)},
    "wrong result": {"add_one": _draw(add_one, _is_zero)},
    "refused": {"refuse": _draw(refuse)},
}
CALLS = KINDS[os.environ.get("DRAWN_FAULTS", "good")]
