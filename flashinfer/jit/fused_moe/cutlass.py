# SPDX-License-Identifier: Apache-2.0
"""The module of ``cutlass_fused_moe``: the stages around its products, which are those of the GEMM modules."""

from __future__ import annotations

from ..codegen import module_cache, stage
from ..core import JitSpec

__all__ = ["gen_fused_moe_module", "get_fused_moe_module"]


def gen_fused_moe_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of one backend; formats, element types and activations are dispatched inside."""
    headers = {
        "sort": "moe/sort_permute.cuh",
        "stages": "moe/layer.cuh",
        **{f"mono_{form}": f"moe/mono/{form}.cuh" for form in ("plain", "fp8_one", "fp8_few", "mxfp4_one")},
    }
    units = {name: {"header": header} for name, header in headers.items()}
    return stage("fused_moe", backend=backend, kernels=units)


get_fused_moe_module = module_cache(gen_fused_moe_module)
