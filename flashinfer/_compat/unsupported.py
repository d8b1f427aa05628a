# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import but that this package cannot serve: they need another GPU or package."""

from __future__ import annotations

import ast
import functools
from inspect import Parameter, Signature
from typing import Any, Callable, NoReturn, Optional

import torch

from .._runtime.errors import BackendSupportedError

__all__ = ["UnsupportedError", "is_unsupported", "needs"]


class UnsupportedError(BackendSupportedError, ValueError, RuntimeError):
    """Error of an unsupported name; it has the types that callers catch when they probe such names."""


def _never(*args: Any, **kwargs: Any) -> bool:
    """Answer the probes of a function that runs nowhere."""
    return False


def is_unsupported(func: Callable[..., Any]) -> bool:
    """Return True if :func:`needs` made the function."""
    return getattr(func, "has_backend", None) is _never


@functools.cache
def _default(text: str) -> Any:
    """Return the value of a default: a literal, or a dtype such as ``torch.bfloat16``."""
    return getattr(torch, text[len("torch.") :]) if text.startswith("torch.") else ast.literal_eval(text)


def _signature(parameters: str) -> Signature:
    """Return the signature that a text such as ``"a, b=None, *, c=1, **kwargs"`` spells."""
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    found = []
    for part in parameters.split(", ") if parameters else ():
        name, has_default, default = part.partition("=")
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
        elif name.startswith("**"):
            found.append(Parameter(name[2:], Parameter.VAR_KEYWORD))
        else:
            found.append(Parameter(name, kind, default=_default(default) if has_default else Parameter.empty))
    return Signature(found)


def needs(
    name: str, what: str, parameters: Optional[str] = None, trace: Any = None, module: Optional[str] = None
) -> Callable[..., NoReturn]:
    """Return a function that can be imported and that raises an error naming what is missing.

    The function answers the probes of :func:`flashinfer._runtime.requirements.backend_requirement`: it supports no
    backend and no capability.

    Parameters
    ----------
    name : str
        Name of the function.
    what : str
        Hardware or package that the function needs.
    parameters : Optional[str]
        Published signature, such as ``"a, b, alpha=None"``: defaults are literals without commas, or torch dtypes.
    trace : Optional[TraceTemplate]
        Template of the function's definitions: ``fi_trace`` runs no kernel. It needs ``parameters`` and ``module``.
    module : Optional[str]
        Published module of the function, such as ``"quantization.fp4_quantization"``; it is part of definitions.
    """

    def unsupported(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: needs {what}, which this machine lacks")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.__doc__ = f"Not available here: needs {what}."
    probed: Any = unsupported
    if parameters is not None:
        probed.__signature__ = _signature(parameters)
    probed.is_backend_supported = probed.is_compute_capability_supported = probed.has_backend = _never
    has_choices = parameters is not None and "backend" in probed.__signature__.parameters
    probed.has_backend_choices = lambda: has_choices
    probed.suitable_auto_backends = []
    probed.experimental_backends = frozenset()
    if trace is None:

        def fi_trace(*args: Any, **kwargs: Any) -> NoReturn:
            raise UnsupportedError(f"{name}.fi_trace: needs a definition, which {name} does not have here")

        probed.fi_trace = fi_trace
        return unsupported
    from ..api_logging import flashinfer_api

    unsupported.__module__ = f"flashinfer.{module}"
    traced: Callable[..., NoReturn] = flashinfer_api(unsupported, trace=trace)
    return traced
