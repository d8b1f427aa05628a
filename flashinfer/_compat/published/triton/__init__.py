# SPDX-License-Identifier: Apache-2.0
"""Module paths under which published code looks for Triton kernels; ours are the native ones."""

import importlib
from typing import Any

from flashinfer.triton import cascade as cascade


def __getattr__(name: str) -> Any:
    """Import the other modules on use: they bring their families with them."""
    if name in ("activation", "gemm", "norm", "sm_constraint_gemm"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
