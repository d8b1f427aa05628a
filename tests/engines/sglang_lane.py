# SPDX-License-Identifier: Apache-2.0
"""SGLang's own modules: that they import with this package, which is what stops it from starting on Hopper."""

from __future__ import annotations

import importlib
from typing import Any

from .table import case


def _backend(name: str) -> Any:
    """Import a backend as SGLang does where it sees a GPU: without one it does not ask for this package."""
    utils = importlib.import_module("sglang.srt.utils")
    utils.is_flashinfer_available = lambda: True
    return importlib.import_module(f"sglang.srt.layers.attention.{name}")


@case(
    "sglang",
    "attention backend: imports, helpers it takes at import",
    "flashinfer, flashinfer.decode, flashinfer.utils",
)
def sglang_attention_imports() -> None:
    backend = _backend("flashinfer_backend")
    assert backend.BatchPrefillWithPagedKVCacheWrapper.__module__.startswith("flashinfer.")
    assert backend.fast_decode_plan.__module__.startswith("flashinfer.")


@case("sglang", "MLA backend: imports", "flashinfer.mla.BatchMLAPagedAttentionWrapper")
def sglang_mla_imports() -> None:
    backend = _backend("flashinfer_mla_backend")
    assert backend.BatchMLAPagedAttentionWrapper.__module__.startswith("flashinfer.")
