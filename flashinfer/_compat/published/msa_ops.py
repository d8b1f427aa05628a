# SPDX-License-Identifier: Apache-2.0
"""Names of sparse attention for SM12x; a call says what it would need."""

from typing import Any

from flashinfer._compat.unsupported_attention import MSA_NAMES as _NAMES


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
