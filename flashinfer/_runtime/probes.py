# SPDX-License-Identifier: Apache-2.0
"""Device probes as callers see them: serving engines and tests replace functions of :mod:`flashinfer.utils`.

``probes.get_compute_capability(device)`` is whatever ``flashinfer.utils`` has under this name at the time of the call.
Our modules read it here instead of importing ``utils``, which itself imports some of them.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

__all__ = ["probes"]


class _Probes:
    """Object whose attributes are the names of ``flashinfer.utils``, which makes its own dictionary that of this one.

    An attribute of the module itself takes 0.03 us more, because a module with ``__getattr__`` is slower.
    """

    device_support_pdl: Callable[..., bool]
    get_compute_capability: Callable[..., tuple[int, int]]
    get_shared_bytes_per_block_optin: Callable[..., int]
    is_sm90a_supported: Callable[..., bool]

    def __getattr__(self, name: str) -> Any:
        """Return a name that ``utils`` imports on first use."""
        return getattr(sys.modules["flashinfer.utils"], name)


probes = _Probes()
