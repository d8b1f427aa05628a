# SPDX-License-Identifier: Apache-2.0
"""Published names for the module of ``mono_moe``, which is that of ``cutlass_fused_moe``."""

from __future__ import annotations

from typing import Any

from ..core import JitSpec
from .cutlass import gen_fused_moe_module, get_fused_moe_module

__all__ = ["gen_monomoe_module", "load_monomoe_module"]


def gen_monomoe_module() -> JitSpec:
    """Describe the module of ``cutlass_fused_moe``, which has the kernels of ``mono_moe``."""
    return gen_fused_moe_module("cuda")


def load_monomoe_module() -> Any:
    """Build and load that module for CUDA."""
    return get_fused_moe_module("cuda")
