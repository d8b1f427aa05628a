# SPDX-License-Identifier: Apache-2.0
"""Marks of functions and backends that may change: a warning on first use, and no choice of theirs by "auto"."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, Optional

from .knobs import knobs

__all__ = [
    "ExperimentalWarning",
    "experimental_auto_backends_allowed",
    "experimental_backend",
    "require_experimental_auto_backends",
    "warn_experimental_backend_once",
]


class ExperimentalWarning(UserWarning):
    """A function or a backend may change or go without notice."""


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, ExperimentalWarning, stacklevel=4)


def experimental_auto_backends_allowed() -> bool:
    """Return True if "auto" may choose experimental backends: ``FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS``."""
    return knobs.allow_experimental_auto_backends


def require_experimental_auto_backends(feature: str) -> None:
    """Raise a RuntimeError unless "auto" may choose experimental backends."""
    if not experimental_auto_backends_allowed():
        raise RuntimeError(
            f"{feature}: FLASHINFER_ALLOW_EXPERIMENTAL_AUTO_BACKENDS must be 1 for an experimental one, it is not"
        )


def warn_experimental_backend_once(api: str, backend: str, *, automatic: bool = False) -> None:
    """Warn at the first use of an experimental backend of a function."""
    chosen = "was chosen automatically and " if automatic else ""
    warn_once(f"{api}: backend '{backend}' {chosen}is experimental: it may change or go without notice")


def experimental_backend(checker: Callable[..., bool]) -> Callable[..., bool]:
    """Mark the check of a backend as that of an experimental one."""
    marked: Any = checker
    marked.is_experimental = True
    return checker


def mark_function(func: Callable[..., Any], feature: Optional[str]) -> Callable[..., Any]:
    """Return the function with a warning at its first call."""

    @functools.wraps(func)
    def experimental(*args: Any, **kwargs: Any) -> Any:
        warn_once(f"{feature or func.__name__} is experimental: it may change or go without notice")
        return func(*args, **kwargs)

    marked: Any = experimental
    marked.is_experimental = True
    return experimental
