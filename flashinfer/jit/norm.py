# SPDX-License-Identifier: Apache-2.0
"""The modules of the norm family: one per stem and backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = [
    "gen_dit_layernorm_module",
    "gen_gated_norm_module",
    "gen_norm_block_quant_module",
    "gen_norm_module",
    "gen_norm_modules",
    "gen_qk_rmsnorm_rope_module",
]


# Template arguments of NormForm in include/flashinfer/norm.h: fp8 output, residual, silu.
_FORMS = ("false, false, false", "true, false, false", "false, true, false", "true, true, false")
_SILU_FORMS = ("false, false, true", "true, false, true")


def gen_norm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of RMSNorm and LayerNorm with their fused and quantising forms."""
    units: dict[str, dict] = {
        dtype: {"dtype": dtype, "forms": _FORMS, "layernorm": False} for dtype in ("float16_t", "bfloat16_t", "float")
    }
    units["silu_layernorm"] = {"dtype": "bfloat16_t", "forms": _SILU_FORMS, "layernorm": True}
    return stage("norm", backend=backend, kernels=units)


def gen_dit_layernorm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the fused LayerNorms of diffusion transformers."""
    return stage("dit_layernorm", backend=backend, kernels={"bfloat16_t": {}})


def gen_gated_norm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the norms with gains and gates."""
    return stage("gated_norm", backend=backend, kernels={"bfloat16_t": {}})


def gen_norm_block_quant_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the residual RMSNorm that also quantises to e4m3 by blocks of 128 columns."""
    return stage("norm_block_quant", backend=backend, kernels={"units": {"types": ("bfloat16_t", "float16_t")}})


def gen_qk_rmsnorm_rope_module() -> JitSpec:
    """Describe the module of QK RMSNorm with 3-D rotary embedding; CUDA only."""
    return stage("qk_rmsnorm_rope", backend="cuda", kernels={"bfloat16_t": {}})


def gen_norm_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_norm_module(backend)
    yield gen_dit_layernorm_module(backend)
    yield gen_gated_norm_module(backend)
    yield gen_norm_block_quant_module(backend)
    if backend == "cuda":
        yield gen_qk_rmsnorm_rope_module()
