# SPDX-License-Identifier: Apache-2.0
"""Parameters in docstrings match the signatures."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

import flashinfer
from flashinfer.aot import FAMILIES

#: api_log_stats is private.
PLACES = [
    *(family for family in FAMILIES if family != "api_log_stats"),
    "attention",
    "cudnn",
    "jit",
    "logits_processor",
    "pod",
    "quantization",
    "sparse",
    "testing",
    "xqa",
]
SECTION = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", re.M | re.S)
HEAD = re.compile(r"^([*\w]+(?:, [*\w]+)*)(?: : .*)?$", re.M)
#: A docstring with this text refers to another docstring for the parameters that it does not name.
REFERS = re.compile(r"other arguments are|Everything else as in|parameters not named here|that end in")
OF_OLDER_RELEASES = {"deprecated_positional_args", "kwargs"}


def public_things() -> dict[str, Any]:
    modules = [flashinfer, *(importlib.import_module(f"flashinfer.{place}") for place in PLACES)]
    things: dict[str, Any] = {}
    for module in modules:
        for name in getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]:
            thing = getattr(module, name)
            if inspect.isfunction(thing) and thing.__module__.startswith("flashinfer"):
                things[name] = thing
            elif inspect.isclass(thing) and thing.__module__.startswith("flashinfer"):
                things[name] = thing
                things |= {f"{name}.{k}": v for k, v in vars(thing).items() if inspect.isfunction(v)}
    return things


DOCUMENTED = [
    pytest.param(thing, inspect.getdoc(thing), id=name)
    for name, thing in public_things().items()
    if SECTION.search(inspect.getdoc(thing) or "")
]


def test_there_are_many():
    assert len(DOCUMENTED) > 100


@pytest.mark.parametrize("thing, text", DOCUMENTED)
def test_parameters(thing, text):
    parameters = inspect.signature(thing).parameters
    described = {name.strip("*") for head in HEAD.findall(SECTION.search(text)[1]) for name in head.split(", ")}
    names = set(parameters) - {"self", "cls"}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names -= OF_OLDER_RELEASES
    else:
        assert described - set(parameters) == set(), "there is no such parameter"
    if not REFERS.search(text):
        assert {name for name in names if name not in text} == set(), "not described"
