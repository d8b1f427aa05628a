# SPDX-License-Identifier: Apache-2.0
"""Functions as self-contained text: their source, that of the helpers they call, and the imports these need."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any, Callable, Mapping

import torch

from .._runtime.errors import ArgumentError
from .template import TraceTemplate, Value

__all__ = ["function_source", "run_source"]


def run_source(template: TraceTemplate, fixed: Mapping[str, Any]) -> str:
    """Text that defines ``run(<inputs in order>)``, which calls the template's reference.

    ``fixed`` holds what the definition decides by itself, const axes and output dtypes; a reference parameter of such a
    name is bound to that value.
    """
    if template.reference is None:
        signature = ", ".join(template.inputs)
        return f'def run({signature}):\n    raise RuntimeError("{template.prefix} has no reference")\n'
    parameters = _named_parameters(template.reference)
    passed = _passed(template, parameters)
    passed |= {name: _literal(fixed[name]) for name in parameters if name in fixed and name not in passed}
    passed |= {name: "None" for name in _SCRATCH if name in parameters and name not in passed}
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in passed]
    if missing:
        raise ArgumentError(
            f"{template.prefix}: arguments of the reference must be inputs or const axes, got {missing}"
        )
    head = f"def run({', '.join(_with_defaults(template, parameters))}):"
    call = ", ".join(f"{name}={value}" for name, value in passed.items())
    text = _text(template.reference) + _aliases(
        template.reference, f"_{template.stem}_reference" if template.stem else ""
    )
    return f"{text}\n\n\n{head}\n    return {template.reference.__name__}({call})\n"


_SCRATCH = ("workspace_buffer",)  # no reference reads it, but those of the published set take it


def _passed(template: TraceTemplate, parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Inputs as arguments of the reference: by their own names, else by those of the API, whose tuples are put together
    again. What the reference does not name, it ignores."""
    passed: dict[str, str] = {}
    tuples: dict[str, list[str]] = {}
    for name, spec in template.inputs.items():
        if name not in parameters and spec.param in parameters and getattr(spec, "tuple_idx", None) is not None:
            tuples.setdefault(str(spec.param), []).append(name)
            passed[str(spec.param)] = f"({', '.join(tuples[str(spec.param)])})"
        else:
            passed[_target(name, spec, parameters)] = name
    return passed


def _target(name: str, spec: Value, parameters: Mapping[str, inspect.Parameter]) -> str:
    return name if name in parameters or spec.param is None or spec.param not in parameters else spec.param


def _aliases(func: Callable[..., Any], *names: str) -> str:
    """Statements that give a function further names."""
    lines = [f"{name} = {func.__name__}" for name in names if name and name != func.__name__]
    return "\n\n\n" + "\n".join(lines) if lines else ""


def function_source(func: Callable[..., Any], *names: str) -> str:
    """Text that defines ``func``, also under the given names; a ``functools.partial`` keeps its arguments and has one
    name."""
    if not isinstance(func, functools.partial):
        return _text(func) + _aliases(func, *names) + "\n"
    name = names[0] if names else func.func.__name__
    arguments = [_literal(value) for value in func.args]
    arguments += [f"{key}={_literal(value)}" for key, value in func.keywords.items()]
    call = ", ".join([func.func.__name__, *arguments])
    return f"{_text(func.func, 'import functools')}\n\n\n{name} = functools.partial({call})\n"


def _named_parameters(func: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Without ``**_``, which ignores further keywords."""
    parameters = inspect.signature(func).parameters
    return {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}


def _with_defaults(template: TraceTemplate, parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Python wants parameters with a default at the end, so an earlier one loses it."""
    result: list[str] = []
    trailing = True
    for name, spec in reversed(list(template.inputs.items())):
        known = parameters.get(_target(name, spec, parameters))
        default = known.default if known else None if spec.optional else inspect.Parameter.empty
        trailing = trailing and default is not inspect.Parameter.empty
        result.append(f"{name}={_literal(default)}" if trailing else name)
    return result[::-1]


@functools.cache
def _text(func: Callable[..., Any], *imports: str) -> str:
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
            definitions[name] = f"{name} = {_literal(value)}"
    definitions[func.__name__] = source


def _package(func: Callable[..., Any]) -> str:
    """Helpers of the same package are copied into the text, others imported."""
    return func.__module__.rpartition(".")[0]


def _global_names(source: str, func: Callable[..., Any]) -> list[str]:
    """Global names that the function reads, annotations included."""
    local = {*func.__code__.co_varnames, *func.__code__.co_cellvars}
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return [name for name in sorted(names - local) if name in func.__globals__]


def _literal(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return repr(value)
    raise ArgumentError(f"fi_trace: a constant must be a number, a string, a dtype or None, got {value!r}")
