# SPDX-License-Identifier: Apache-2.0
"""The modules of the quantization family: one per stem and backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator, Sequence

from .._compat.unsupported import needs
from .codegen import stage
from .core import JitSpec

__all__ = [
    "gen_fp4_kv_dequantization_module",
    "gen_fp4_kv_quantization_module",
    "gen_fp4_quantization_module",
    "gen_mx_quantization_module",
    "gen_nvfp4_kv_module",
    "gen_packbits_module",
    "gen_quantization_module",
    "gen_quantization_modules",
]


def gen_packbits_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that packs truth values into bits, flat and by segment."""
    units: dict[str, dict] = {
        "elements": {"elements": ("uint8_t", "uint16_t", "uint32_t", "uint64_t"), "indices": ()},
        "segments": {"elements": (), "indices": ("int32_t", "int64_t")},
    }
    return stage("packbits", backend=backend, kernels=units)


def gen_quantization_module() -> JitSpec:
    """Published name of :func:`gen_packbits_module`."""
    return gen_packbits_module()


def gen_nvfp4_kv_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that dequantises NVFP4 key-value caches to 16 bits."""
    return stage("nvfp4_kv", backend=backend, kernels={t: {"dtype": t} for t in ("float16_t", "bfloat16_t")})


def gen_fp4_kv_dequantization_module() -> JitSpec:
    """Published name of :func:`gen_nvfp4_kv_module`."""
    return gen_nvfp4_kv_module()


gen_fp4_kv_quantization_module = needs("gen_fp4_kv_quantization_module", "a Blackwell GPU (SM100)")

_MX_UNITS: dict[str, dict] = {
    "inputs": {"inputs": ("float", "float16_t", "bfloat16_t"), "scales": ()},
    "scales": {"inputs": (), "scales": ("uint8_t", "uint16_t")},
}


def gen_mx_quantization_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of MXFP8 quantisation and block-scale layouts; on the CPU also the dequantisers."""
    return stage("mx_quantization", backend=backend, kernels=_MX_UNITS)


def gen_fp4_quantization_module(nvcc_flags: Sequence[str], device_arch: str) -> JitSpec:
    """Describe the CUDA module above with the caller's compiler flags, for callers that build one per architecture."""
    name = f"fp4_quantization_{device_arch}"
    return stage("mx_quantization", backend="cuda", name=name, kernels=_MX_UNITS, extra_cuda_cflags=nvcc_flags)


def gen_quantization_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_packbits_module(backend)
    yield gen_nvfp4_kv_module(backend)
    yield gen_mx_quantization_module(backend)
