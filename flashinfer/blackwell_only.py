# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import and that only kernels for Blackwell GPUs could serve. This package has none."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from .errors import BackendSupportedError

__all__ = ["UnsupportedError", "needs_blackwell"]


class UnsupportedError(BackendSupportedError, RuntimeError):
    """Callers probe such names with either type."""


def needs_blackwell(name: str) -> Callable[..., NoReturn]:
    """A function that can be imported and whose call says what is missing."""

    def unsupported(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: needs kernels for Blackwell GPUs (SM100), which this package does not have")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.__doc__ = "Not available here: needs kernels for Blackwell GPUs (SM100)."
    return unsupported
