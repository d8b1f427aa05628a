# SPDX-License-Identifier: Apache-2.0
"""Calls of this package by vLLM 0.33.0 and SGLang 0.5.23, which require 0.7.2, and other published names.

Calls of the releases before them (vLLM 0.29.0, SGLang 0.5.19) are there too.

``engine_calls.json`` holds facts of their published wheels: module, name, number of positional arguments, keywords,
those that are passed in some cases ("optional"), and attributes of our objects that they read.
``published_names.json`` holds the names that programs import, by module ("" is the module). ``absent_names.json`` holds
names that wait, with the reason: one that appears must be moved to the others.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def load(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def resolve(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(f"{found.__name__}.{part}")
    return found


@functools.cache
def assigned(module: str) -> frozenset[str]:
    """Return the attributes of ``self`` that the methods in a module assign."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self")


def has_member(cls: type, name: str) -> bool:
    ours = [base for base in cls.__mro__ if base.__module__.startswith("flashinfer")]
    return hasattr(cls, name) or any(
        name in getattr(base, "__annotations__", {}) or name in assigned(base.__module__) for base in ours
    )


def check_binds(function: Any, args: int, keywords: list[str], optional: list[str], is_partial: bool) -> None:
    """Check that the call binds. ``is_partial``: the engine passes more arguments, which its source does not name.

    ``optional``: keywords of a dictionary that the engine fills by the case, so that each is bound on its own.
    """
    signature = inspect.signature(function)
    bind = signature.bind_partial if is_partial or optional else signature.bind
    for more in [[name] for name in optional] or [[]]:
        bind(*range(args), **dict.fromkeys([*keywords, *more]))


CALLS = load("engine_calls.json")


@pytest.mark.parametrize("module", sorted({call["module"] for call in CALLS}))
def test_calls_of_engines(module):
    wrong = []
    for call in (call for call in CALLS if call["module"] == module):
        name, owner = call["name"], call["name"].rpartition(".")
        try:
            if call.get("member"):
                cls = resolve(module, owner[0])
                assert not inspect.isclass(cls) or has_member(cls, owner[2]), "no such attribute"
                continue
            found = resolve(module, name)
            if "args" in call:
                home = resolve(module, owner[0])
                is_method = inspect.isclass(home) and not isinstance(
                    inspect.getattr_static(home, owner[2]), (staticmethod, classmethod)
                )
                optional = call.get("optional", [])
                check_binds(found, call["args"] + is_method, call["keywords"], optional, call["open"])
        except (AssertionError, AttributeError, ImportError, TypeError) as error:
            wrong.append(f"{name} {call.get('args', '')} {call.get('keywords', '')}: {error}")
    assert wrong == []


@pytest.mark.parametrize("module, names", load("published_names.json").items())
def test_published_names(module, names):
    missing = []
    for name in names:
        try:
            resolve(module, name)
        except (AttributeError, ImportError):
            missing.append(name)
    assert missing == []


def is_here(path: str) -> bool:
    module, _, name = path.partition(":")
    try:
        resolve(module, name)
    except (AttributeError, ImportError):
        return False
    return True


def test_names_that_wait_are_absent():
    """Check that waiting names are absent: once present, they belong in published_names.json and engine_calls.json."""
    assert [path for path in load("absent_names.json") if is_here(path)] == []
