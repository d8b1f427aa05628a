# SPDX-License-Identifier: Apache-2.0
"""The module of low-rank adapters of experts."""

from __future__ import annotations

from typing import Any

from ..codegen import module_cache, stage
from ..core import JitSpec

__all__ = ["gen_bgmv_moe_module", "get_bgmv_moe_module", "load_bgmv_moe_module"]


def gen_bgmv_moe_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of one backend; the dtype of the adapters is dispatched inside."""
    return stage("bgmv_moe", backend=backend, kernels={name: {"type": f"{name}_t"} for name in ("float16", "bfloat16")})


get_bgmv_moe_module = module_cache(gen_bgmv_moe_module)


def load_bgmv_moe_module() -> Any:
    """Build and load the module for CUDA."""
    return get_bgmv_moe_module("cuda")
