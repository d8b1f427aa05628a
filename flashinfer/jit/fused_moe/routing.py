# SPDX-License-Identifier: Apache-2.0
"""Modules around the products of the experts: choice of experts, order of tokens by expert, rows in that order."""

from __future__ import annotations

from typing import Any, Iterator

from ..codegen import module_cache, stage
from ..core import JitSpec

__all__ = [
    "gen_dsv3_fused_routing_module",
    "gen_hash_topk_module",
    "gen_moe_permute_module",
    "gen_moe_routing_module",
    "gen_moe_sort_module",
    "gen_moe_utils_module",
    "gen_routing_modules",
    "get_moe_permute_module",
    "get_moe_routing_module",
    "get_moe_sort_module",
]


def gen_moe_routing_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that chooses the experts of tokens."""
    return stage("moe_routing", backend=backend, kernels={"entry": {}})


get_moe_routing_module = module_cache(gen_moe_routing_module)


def gen_moe_sort_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that orders (token, slot) pairs by expert."""
    return stage("moe_sort", backend=backend, kernels={"entry": {}})


get_moe_sort_module = module_cache(gen_moe_sort_module)


def gen_moe_permute_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that gathers activations in expert order and adds up the rows of each token."""
    half, bfloat = "float16_t", "bfloat16_t"
    units: dict[str, dict[str, Any]] = {
        "copy": {"copied": ["uint8_t", "uint16_t", "uint32_t"], "quantized": [half, bfloat], "finalized": []},
        "finalize": {
            "copied": [],
            "quantized": [],
            "finalized": [
                *((element, element) for element in (half, bfloat, "float")),
                *((element, "float") for element in (half, bfloat)),
                *(("float", element) for element in (half, bfloat)),
            ],
        },
    }
    return stage("moe_permute", backend=backend, kernels=units)


get_moe_permute_module = module_cache(gen_moe_permute_module)


# Published names of modules.


def gen_dsv3_fused_routing_module(backend: str = "default") -> JitSpec:
    """Describe the module of ``fused_topk_deepseek``. ``backend`` has no effect."""
    return gen_moe_routing_module("cuda")


def gen_hash_topk_module() -> JitSpec:
    """Describe the module of ``hash_topk``."""
    return gen_moe_routing_module("cuda")


def gen_moe_utils_module() -> JitSpec:
    """Describe the module of ``moe_sort``."""
    return gen_moe_sort_module("cuda")


def gen_routing_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules of this file."""
    yield gen_moe_routing_module(backend)
    yield gen_moe_sort_module(backend)
    yield gen_moe_permute_module(backend)
