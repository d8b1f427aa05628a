# SPDX-License-Identifier: Apache-2.0
"""Errors of expert-parallel layers."""

from __future__ import annotations

from typing import Optional

__all__ = [
    "MoEEpArchError",
    "MoEEpConfigError",
    "MoEEpFaultToleranceUnsupportedError",
    "MoEEpNotBuiltError",
    "MoEEpRankEvictedError",
    "MoEEpTransportError",
]


class MoEEpConfigError(ValueError):
    """A configuration that no layer could serve."""


class MoEEpArchError(MoEEpConfigError):
    """A GPU that a backend does not run on."""


class MoEEpNotBuiltError(RuntimeError):
    """A transport that is not installed."""


class MoEEpFaultToleranceUnsupportedError(RuntimeError):
    """A transport that cannot go on without a rank."""


class MoEEpRankEvictedError(RuntimeError):
    """This rank was taken out of the group."""


class MoEEpTransportError(RuntimeError):
    """A failed call of a transport."""

    def __init__(self, fn: str, code: int, detail: str = "", code_name: Optional[str] = None) -> None:
        self.fn, self.code, self.detail, self.code_name = fn, code, detail, code_name
        shown = f"{code}" if code_name is None else f"{code_name} ({code})"
        super().__init__(f"{fn} failed: {shown}{detail}")
