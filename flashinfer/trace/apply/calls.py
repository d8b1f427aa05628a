# SPDX-License-Identifier: Apache-2.0
"""Description of a call: its arguments by name, the template that fits them, and the sizes of the axes."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Iterable, Mapping

from ..._runtime.errors import ArgumentError
from ..definition import axis_values
from ..template import TraceTemplate

__all__ = ["bind_namespace", "build_extractor_maps", "extract_axes", "templates_of"]

Extractor = Callable[[Mapping[str, Any]], dict[str, int]]


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def bind_namespace(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, defaults and further keywords included.

    Examples
    --------
    >>> bind_namespace(lambda x, eps=1e-6: x, (3,), {})
    {'x': 3, 'eps': 1e-06}
    """
    signature = _signature(original)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    namespace = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            namespace |= namespace.pop(name)
    return namespace


def templates_of(spec: Any) -> tuple[TraceTemplate, ...]:
    """Return the templates of an API: one, or those among which its arguments choose."""
    return (spec,) if isinstance(spec, TraceTemplate) else tuple(getattr(spec, "templates", ()))


def build_extractor_maps(templates: Iterable[TraceTemplate]) -> dict[str, Extractor]:
    """Return, by the first part of their definitions' names, functions that read the axes from arguments."""
    return {template.prefix: functools.partial(axis_values, template) for template in templates}


def extract_axes(extractor_maps: Mapping[str, Extractor], namespace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the sizes of the axes for each template that the arguments fit, by the first part of its name."""
    found = {}
    for prefix, extract in extractor_maps.items():
        try:
            found[prefix] = extract(namespace)
        except ArgumentError:
            continue
    return found
