# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import but that this package cannot serve: they need another GPU or package."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NoReturn, Optional

import torch

from .errors import BackendSupportedError

__all__ = ["UnsupportedError", "needs"]


class UnsupportedError(BackendSupportedError, ValueError, RuntimeError):
    """Error of an unsupported name; it has the types that callers catch when they probe such names."""


def _never(*args: Any, **kwargs: Any) -> bool:
    """Answer the probes of a function that runs nowhere."""
    return False


def needs(name: str, what: str, parameters: Optional[str] = None) -> Callable[..., NoReturn]:
    """Return a function that can be imported and that raises an error naming what is missing.

    ``parameters`` is the published signature as source text, such as ``"a, b, alpha=None"``. The function answers the
    probes of :func:`flashinfer.backends.backend_requirement`: it supports no backend and no capability.
    """

    def unsupported(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: needs {what}, expected a call only where that is present")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.__doc__ = f"Not available here: needs {what}."
    probed: Any = unsupported
    if parameters is not None:
        probed.__signature__ = inspect.signature(eval(f"lambda {parameters}: None", {"torch": torch}))
    probed.is_backend_supported = probed.is_compute_capability_supported = probed.has_backend = _never
    return unsupported
