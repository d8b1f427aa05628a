# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the routing of DeepSeek V3."""

from __future__ import annotations

from typing import Any

from ..jit.fused_moe.routing import get_moe_routing_module
from .routing import fused_topk_deepseek as fused_topk_deepseek

__all__ = ["fused_topk_deepseek", "get_dsv3_fused_routing_module"]


def get_dsv3_fused_routing_module(backend: str = "default") -> Any:
    """Return the loaded CUDA module of :func:`fused_topk_deepseek`. ``backend`` has no effect."""
    return get_moe_routing_module("cuda")
