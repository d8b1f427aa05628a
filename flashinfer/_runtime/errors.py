# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the package. The text form is: ``op: argument must Y (because Z), got X``."""

from __future__ import annotations

from typing import Any, Optional

__all__ = [
    "ArgumentError",
    "BackendSupportedError",
    "GPUArchitectureError",
    "InternalError",
    "LibraryError",
    "MissingJITCacheError",
]


class ArgumentError(ValueError, RuntimeError, AssertionError):
    """A bad argument. Published callers catch any of its three bases, whichever layer found the fault."""


class BackendSupportedError(Exception):
    """The function does not support the requested backend, or the compute capability of the device."""


class GPUArchitectureError(Exception):
    """The GPU is too old (or too new) for the call."""


class InternalError(RuntimeError):
    """A broken invariant of native code: our bug, not the caller's."""


class LibraryError(Exception):
    """An optional library is missing or too old for the call."""


class MissingJITCacheError(RuntimeError):
    """``FLASHINFER_DISABLE_JIT`` is set and the module is neither cached nor pre-built."""

    def __init__(self, message: str, spec: Optional[Any] = None) -> None:
        super().__init__(message)
        self.spec = spec
