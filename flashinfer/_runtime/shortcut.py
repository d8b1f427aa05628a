# SPDX-License-Identifier: Apache-2.0
"""Shortcuts: the ordinary calls of an API go straight to the kernel, all others through the checks.

A *shortcut* has those parameters of its API that it needs, and may have ``suitable_auto_backends``, to which it notes
what ``@backend_requirement`` finds for ``backend="auto"``. It tests the little that neither torch nor native code
would refuse, makes the call and returns the result, or None for a call that is not ordinary. The API then runs as if
there were no shortcut; so it does if the shortcut fails, because the checks find the words for what is wrong.

A checked call of a GEMM takes Python 9 to 15 us, a shortcut 2 to 4 (Xeon of 2.5 GHz).
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, TypeVar

from . import arch
from .probes import probes

__all__ = ["shortcut_parts", "with_shortcut"]

F = TypeVar("F", bound=Callable[..., Any])


# A probe that a serving engine has replaced is asked by the checks.
_BODY = """
if _utils.get_compute_capability is _capability_probe and _utils.device_support_pdl is _pdl_probe:
    try:
        _result = _shortcut({needed})
    except Exception:
        _result = None
    if _result is not None:
        return _result
"""
_NAMES: dict[str, Any] = {
    "_utils": probes,
    "_capability_probe": arch.get_compute_capability,
    "_pdl_probe": arch.device_support_pdl,
}

_SUITABLE = "suitable_auto_backends"


def with_shortcut(shortcut: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator below ``@flashinfer_api(trace=...)``, whose wrapper tries ``shortcut`` unless torch traces the call.

    There is no wrapper of its own, because passing the 36 arguments of ``cutlass_fused_moe`` on takes 0.6 us.
    """

    def decorate(func: F) -> F:
        known = {*inspect.signature(func).parameters, *(name for name in (_SUITABLE,) if hasattr(func, name))}
        unknown = set(inspect.signature(shortcut).parameters) - known
        if unknown:
            raise TypeError(
                f"with_shortcut: {shortcut.__name__} must have parameters of {func.__name__}, got {unknown}"
            )
        func._shortcut = shortcut  # type: ignore[attr-defined]
        return func

    return decorate


def shortcut_parts(func: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return statements for :func:`wrap_with` that try the shortcut of ``func``, and the names that they use."""
    shortcut = func.__dict__.get("_shortcut")
    if shortcut is None:
        return "", {}
    needed = ", ".join(inspect.signature(shortcut).parameters)
    names = {**_NAMES, "_shortcut": shortcut, _SUITABLE: getattr(func, _SUITABLE, None)}
    return _BODY.replace("{needed}", needed), names
