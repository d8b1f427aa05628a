# SPDX-License-Identifier: Apache-2.0
"""Errors of exchanges between ranks."""

from __future__ import annotations

__all__ = ["CommTimeoutError"]


class CommTimeoutError(RuntimeError):
    """A rank did not come to a collective call in time; the text names it, the call and what was waited for."""
