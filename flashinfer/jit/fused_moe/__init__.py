# SPDX-License-Identifier: Apache-2.0
"""Modules of mixture-of-experts layers."""

from __future__ import annotations

from typing import Iterator

from ..core import JitSpec
from .bgmv_moe import gen_bgmv_moe_module as gen_bgmv_moe_module
from .bgmv_moe import load_bgmv_moe_module as load_bgmv_moe_module
from .cutlass import gen_fused_moe_module as gen_fused_moe_module
from .monomoe import gen_monomoe_module as gen_monomoe_module
from .monomoe import load_monomoe_module as load_monomoe_module
from .routing import gen_dsv3_fused_routing_module as gen_dsv3_fused_routing_module
from .routing import gen_hash_topk_module as gen_hash_topk_module
from .routing import gen_moe_permute_module as gen_moe_permute_module
from .routing import gen_moe_routing_module as gen_moe_routing_module
from .routing import gen_moe_sort_module as gen_moe_sort_module
from .routing import gen_moe_utils_module as gen_moe_utils_module
from .routing import gen_routing_modules as gen_routing_modules


def gen_fused_moe_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield from gen_routing_modules(backend)
    yield gen_fused_moe_module(backend)
    yield gen_bgmv_moe_module(backend)
