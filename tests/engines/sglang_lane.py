# SPDX-License-Identifier: Apache-2.0
"""SGLang's own modules on CPU tensors: how its cases import them, and that they find what they read at import."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .table import case


def backend_module(name: str) -> Any:
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
    backend = backend_module("flashinfer_backend")
    assert backend.BatchPrefillWithPagedKVCacheWrapper.__module__.startswith("flashinfer.")
    assert backend.fast_decode_plan.__module__.startswith("flashinfer.")


@case("sglang", "MLA backend: imports", "flashinfer.mla.BatchMLAPagedAttentionWrapper")
def sglang_mla_imports() -> None:
    backend = backend_module("flashinfer_mla_backend")
    assert backend.BatchMLAPagedAttentionWrapper.__module__.startswith("flashinfer.")


class OnHost:
    """The module torch, for code that names the device "cuda" itself."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "zeros", "ones", "arange", "tensor", "full", "randn"):
            return found
        return lambda *args, device=None, pin_memory=False, **kwargs: found(*args, **kwargs)
