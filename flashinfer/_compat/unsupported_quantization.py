# SPDX-License-Identifier: Apache-2.0
"""Names that serving engines import and that only Blackwell GPUs (or an optional package) can serve.

They are no implementations: each raises an error that says what it would need. The dequantisers, the layouts and
MXFP8 quantisation, which need no such hardware, are in the other modules.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, NoReturn, Optional

import torch

from .._runtime.integer_math import round_up
from ..jit.quantization import gen_fp4_kv_quantization_module as gen_fp4_kv_quantization_module
from ..trace.templates import quantize as traces
from .unsupported import needs

__all__ = [
    "fp4_quantize",
    "mxfp4_quantize",
    "mxfp8_grouped_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "scaled_fp4_grouped_quantize",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]


def _needs_gpu(
    name: str, arch: str = "SM100", parameters: Optional[str] = None, trace: Any = None, bits: int = 4
) -> Callable[..., NoReturn]:
    what = f"a Blackwell GPU ({arch}) and quantising kernels for it, which this package does not have"
    return needs(name, what, parameters, trace, f"quantization.fp{bits}_quantization")


fp4_quantize = _needs_gpu(
    "fp4_quantize",
    parameters="input, global_scale=None, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True, "
    "is_sf_8x4_layout=False, is_global_scale_inversed=False, enable_pdl=None, backend='cuda', nvfp4_4over6=...",
    trace=traces.fp4_quantize_trace,
)
mxfp4_quantize = _needs_gpu(
    "mxfp4_quantize",
    parameters="a, backend='cuda', enable_pdl=None, sfLayout=0",
    trace=traces.mxfp4_quantize_trace,
)
mxfp8_grouped_quantize = _needs_gpu(
    "mxfp8_grouped_quantize",
    parameters="a, mask, backend='cuda'",
    trace=traces.mxfp8_grouped_quantize_trace,
    bits=8,
)
nvfp4_batched_quantize = _needs_gpu(
    "nvfp4_batched_quantize", parameters="a, a_global_sf, sf_vec_size=16, nvfp4_4over6=..."
)
nvfp4_kv_quantize = _needs_gpu(
    "nvfp4_kv_quantize",
    parameters="input, global_scale",
    trace=traces.nvfp4_kv_quantize_trace,
)
nvfp4_quantize = _needs_gpu(
    "nvfp4_quantize",
    parameters="a, a_global_sf, sfLayout=0, do_shuffle=False, sf_vec_size=16, enable_pdl=None, backend='cuda', "
    "per_token_activation=False, expanded_idx_to_permuted_idx=None, nvfp4_4over6=..., out_scale=None",
    trace=traces.nvfp4_quantize_trace,
)
nvfp4_quantize_paged_kv_cache = _needs_gpu("nvfp4_quantize_paged_kv_cache")
scaled_fp4_grouped_quantize = _needs_gpu(
    "scaled_fp4_grouped_quantize", parameters="a, mask, a_global_sf, nvfp4_4over6=..."
)
silu_and_mul_nvfp4_quantize = _needs_gpu(
    "silu_and_mul_nvfp4_quantize",
    parameters="input, global_scale=None, sf_vec_size=16, is_sf_swizzled_layout=True, is_sf_8x4_layout=False, "
    "enable_pdl=None, nvfp4_4over6=...",
    trace=traces.silu_and_mul_nvfp4_quantize_trace,
)
silu_and_mul_scaled_nvfp4_experts_quantize = _needs_gpu(
    "silu_and_mul_scaled_nvfp4_experts_quantize", parameters="a, mask, a_global_sf, nvfp4_4over6=..."
)

# Not at top level.
silu_and_mul_mxfp8_quantize = _needs_gpu("silu_and_mul_mxfp8_quantize")
silu_and_mul_mxfp8_quantize_backward = _needs_gpu("silu_and_mul_mxfp8_quantize_backward")
mxfp8_quantize_cute_dsl = needs("mxfp8_quantize_cute_dsl", "an SM100 GPU and the CuTe DSL")
mxfp4_quantize_cute_dsl = needs("mxfp4_quantize_cute_dsl", "an SM100 GPU and the CuTe DSL")
nvfp4_quantize_cute_dsl = needs("nvfp4_quantize_cute_dsl", "an SM100 GPU and the CuTe DSL")
nvfp4_quantize_per_token_cute_dsl = needs("nvfp4_quantize_per_token_cute_dsl", "an SM100 GPU and the CuTe DSL")
get_mxfp8_quantization_sm100_module = _needs_gpu("get_mxfp8_quantization_sm100_module")
gen_fp4_quantization_sm100_module = _needs_gpu("gen_fp4_quantization_sm100_module", "SM100")
gen_fp4_quantization_sm103_module = _needs_gpu("gen_fp4_quantization_sm103_module", "SM103")
gen_fp4_quantization_sm107_module = _needs_gpu("gen_fp4_quantization_sm107_module", "SM107")
gen_fp4_quantization_sm110_module = _needs_gpu("gen_fp4_quantization_sm110_module", "SM110")
gen_fp4_quantization_sm120_module = _needs_gpu("gen_fp4_quantization_sm120_module", "SM120")
gen_fp4_quantization_sm120f_module = _needs_gpu("gen_fp4_quantization_sm120f_module", "SM120f")
gen_fp4_quantization_sm121_module = _needs_gpu("gen_fp4_quantization_sm121_module", "SM121")


def _fake_mxfp8_grouped_quantize(a: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the grouped quantisation of ``(batch, m, k)``; the values are not computed.

    Returns e4m3 ``(m, k', batch)`` with strides ``(k', 1, m * k')`` and uint8 scales
    ``(32, 4, m' / 128, 4, k' / 128, batch)``, where a prime means rounded up to a multiple of 128.
    """
    batch, m, k = a.shape
    padded_m, padded_k = round_up(m, 128), round_up(k, 128)
    strides = (padded_k, 1, m * padded_k)
    values = torch.empty_strided((m, padded_k, batch), strides, dtype=torch.float8_e4m3fn, device=a.device)
    scales = a.new_empty((32, 4, padded_m // 128, 4, padded_k // 128, batch), dtype=torch.uint8)
    return values, scales


def get_mxfp8_grouped_quantization_module() -> SimpleNamespace:
    """Return a stand-in for the grouped MXFP8 module: only the shapes of its results work without a Blackwell GPU."""
    return SimpleNamespace(
        mxfp8_grouped_quantize=mxfp8_grouped_quantize,
        mxfp8_grouped_quantize_impl=mxfp8_grouped_quantize,
        _fake_mxfp8_grouped_quantize=_fake_mxfp8_grouped_quantize,
    )
