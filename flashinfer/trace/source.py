# SPDX-License-Identifier: Apache-2.0
"""The reference of a template as text that defines ``run(<inputs in order>)``."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Mapping

from .._runtime.errors import ArgumentError
from .function_text import aliases, literal, text_of
from .template import TraceTemplate, Value

__all__ = ["run_source"]


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
    passed |= {name: literal(fixed[name]) for name in parameters if name in fixed and name not in passed}
    passed |= {name: "None" for name in _SCRATCH if name in parameters and name not in passed}
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in passed]
    if missing:
        raise ArgumentError(
            f"{template.prefix}: arguments of the reference must be inputs or const axes, got {missing}"
        )
    head = f"def run({', '.join(_with_defaults(template, parameters))}):"
    call = ", ".join(f"{name}={value}" for name, value in passed.items())
    text = text_of(template.reference) + aliases(
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
        result.append(f"{name}={literal(default)}" if trailing else name)
    return result[::-1]
