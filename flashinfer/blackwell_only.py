# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import and that nothing here can serve, because they need a GPU or a package of others."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from .errors import BackendSupportedError

__all__ = ["UnsupportedError", "needs"]


class UnsupportedError(BackendSupportedError, ValueError, RuntimeError):
    """Callers probe such names with any of these types."""


def needs(name: str, what: str) -> Callable[..., NoReturn]:
    """A function that can be imported and whose call says what is missing."""

    def unsupported(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: needs {what}, expected a call only where that is present")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.__doc__ = f"Not available here: needs {what}."
    return unsupported
