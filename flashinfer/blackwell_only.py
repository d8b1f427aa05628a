# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import but that this package cannot serve: they need another GPU or package."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from .errors import BackendSupportedError

__all__ = ["UnsupportedError", "needs"]


class UnsupportedError(BackendSupportedError, ValueError, RuntimeError):
    """Error of an unsupported name; it has the types that callers catch when they probe such names."""


def needs(name: str, what: str) -> Callable[..., NoReturn]:
    """Return a function that can be imported and that raises an error naming what is missing."""

    def unsupported(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: needs {what}, expected a call only where that is present")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.__doc__ = f"Not available here: needs {what}."
    return unsupported
