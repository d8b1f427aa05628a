# SPDX-License-Identifier: Apache-2.0
"""Functions as self-contained text: their source, that of the helpers they call, and the imports these need."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any, Callable

import torch

from .._runtime.errors import ArgumentError

__all__ = ["aliases", "function_source", "literal", "text_of"]


def function_source(func: Callable[..., Any], *names: str) -> str:
    """Text that defines ``func``, also under the given names; a ``functools.partial`` keeps its arguments and has one
    name."""
    if not isinstance(func, functools.partial):
        return text_of(func) + aliases(func, *names) + "\n"
    name = names[0] if names else func.func.__name__
    arguments = [literal(value) for value in func.args]
    arguments += [f"{key}={literal(value)}" for key, value in func.keywords.items()]
    call = ", ".join([func.func.__name__, *arguments])
    return f"{text_of(func.func, 'import functools')}\n\n\n{name} = functools.partial({call})\n"


def aliases(func: Callable[..., Any], *names: str) -> str:
    """Statements that give a function further names."""
    lines = [f"{name} = {func.__name__}" for name in names if name and name != func.__name__]
    return "\n\n\n" + "\n".join(lines) if lines else ""


@functools.cache
def text_of(func: Callable[..., Any], *imports: str) -> str:
    needed = set(imports)
    definitions: dict[str, str] = {}
    _collect(func, needed, definitions)
    blocks = ["from __future__ import annotations", *(["\n".join(sorted(needed))] if needed else [])]
    return "\n\n".join(blocks) + "\n\n\n" + "\n\n\n".join(definitions.values())


def _collect(func: Callable[..., Any], imports: set[str], definitions: dict[str, str]) -> None:
    """Add the function after everything it uses."""
    if func.__code__.co_freevars or "<" in func.__name__:
        raise ArgumentError(f"fi_trace: what travels as text must be a function of a module, got {func.__qualname__}")
    source = textwrap.dedent(inspect.getsource(func)).rstrip()
    for name in _global_names(source, func):
        value = func.__globals__[name]
        if name in definitions or value is func:
            continue
        if isinstance(value, types.ModuleType):
            imports.add(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
        elif isinstance(value, types.FunctionType) and _package(value) == _package(func):
            _collect(value, imports, definitions)
        elif hasattr(value, "__module__") and hasattr(value, "__qualname__"):
            imports.add(f"from {value.__module__} import {value.__qualname__}")
        else:
            definitions[name] = f"{name} = {literal(value)}"
    definitions[func.__name__] = source


def _package(func: Callable[..., Any]) -> str:
    """Helpers of the same package are copied into the text, others imported."""
    return func.__module__.rpartition(".")[0]


def _global_names(source: str, func: Callable[..., Any]) -> list[str]:
    """Global names that the function reads, annotations included."""
    local = {*func.__code__.co_varnames, *func.__code__.co_cellvars}
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return [name for name in sorted(names - local) if name in func.__globals__]


def literal(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return repr(value)
    raise ArgumentError(f"fi_trace: a constant must be a number, a string, a dtype or None, got {value!r}")
