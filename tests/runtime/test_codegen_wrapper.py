# SPDX-License-Identifier: Apache-2.0
"""Wrappers that are generated from a signature."""

from __future__ import annotations

import dis
import functools

import pytest
import torch

from flashinfer._runtime.codegen_wrapper import _flags, wrap_with


def by_position(func):
    return wrap_with(func, "return _func_by_position({values})", {})


def with_everything(first, /, second, *args, third, fourth=4, **kwargs):
    return first, second, args, third, fourth, kwargs


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {"third": 3}),
        ((1,), {"second": 2, "third": 3, "fourth": 5}),
        ((1, 2, 7, 8), {"third": 3, "sixth": 6}),
    ],
)
def test_a_call_by_position_binds_what_the_function_would(args, kwargs):
    assert by_position(with_everything)(*args, **kwargs) == with_everything(*args, **kwargs)


def test_a_call_by_position_keeps_closures():
    base = 10

    def plus(x, *, factor=2):
        return base + factor * x

    assert by_position(plus)(1) == 12


def test_a_function_that_hides_its_parameters_is_called_as_it_is():
    @functools.wraps(with_everything)
    def logged(*args, **kwargs):
        return "logged", with_everything(*args, **kwargs)

    assert by_position(logged)(1, 2, third=3) == ("logged", (1, 2, (), 3, 4, {}))
    assert by_position(abs)(-3) == 3


def test_a_call_by_position_builds_no_dict():
    """Check the byte code: to pass twelve keywords and ``*args`` on takes 1.5 us, where this call takes 0.1."""
    operations = {line.opname for line in dis.get_instructions(by_position(with_everything))}
    assert not {x for x in operations if "EX" in x.split("_") or x.startswith(("BUILD", "KW", "DICT"))}


def test_a_torch_without_the_flag_is_asked_by_its_public_function(monkeypatch):
    assert _flags() is torch.compiler
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    for answer in (True, False):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda a=answer: a)
        assert _flags()._is_compiling_flag is answer
