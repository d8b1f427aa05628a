# SPDX-License-Identifier: Apache-2.0
"""The published templates of quantisation; those defined here need a Blackwell GPU, and a definition runs none."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ..notation import template_of_text
from ..template import TraceTemplate
from .page_nvfp4 import quantize_nvfp4
from .quantization import mxfp8_quantize_trace
from .quantization_blocks import mxfp8_blocks, padded_scales
from .quantization_nvfp4 import _nvfp4_kv_dequantize_paged_hnd_trace, _nvfp4_kv_dequantize_paged_nhd_trace
from .shared import normal, seeded

__all__ = [
    "_nvfp4_kv_dequantize_paged_hnd_trace",
    "_nvfp4_kv_dequantize_paged_nhd_trace",
    "fp4_quantize_trace",
    "mxfp4_quantize_trace",
    "mxfp8_grouped_quantize_trace",
    "mxfp8_quantize_trace",
    "nvfp4_kv_quantize_trace",
    "nvfp4_quantize_trace",
    "silu_and_mul_nvfp4_quantize_trace",
]


def quantize_mxfp4(x: torch.Tensor, vec_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes, and as scale of each block a byte that stands for 2^(byte - 127): amax / 6, rounded up."""
    blocks = x.float().unflatten(-1, (-1, vec_size))
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=-1) / 6.0)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two stays as it is
    byte = torch.where(mantissa == 0, 0, (exponent + 127).clamp(0, 254))
    magnitude = blocks.abs() / torch.exp2(byte.float() - 127).unsqueeze(-1)
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=x.device)
    for i, limit in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += magnitude > limit if i % 2 == 0 else magnitude >= limit
    codes = (codes + torch.signbit(blocks) * 8).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), byte.to(torch.uint8)


def _fp4_quantize_reference(
    input: torch.Tensor,
    global_scale: Optional[torch.Tensor] = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: Optional[bool] = None,
    backend: str = "cuda",
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = (1 if is_sf_8x4_layout else 0) if is_sf_swizzled_layout else 2
    if sf_use_ue8m0:
        codes, scales = quantize_mxfp4(input, sf_vec_size)
    else:
        one = torch.ones((), device=input.device) if global_scale is None else global_scale.reshape(())
        codes, scales = quantize_nvfp4(input, 1.0 / one)
    return codes, padded_scales(scales.view(torch.uint8), layout)


def _nvfp4_quantize_reference(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sfLayout: int = 0,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: Optional[bool] = None,
    backend: str = "cuda",
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize_nvfp4(a, 1.0 / a_global_sf.reshape(()))
    return codes, padded_scales(scales.view(torch.uint8), int(sfLayout))


def _silu_and_mul_nvfp4_quantize_reference(
    input: torch.Tensor,
    global_scale: Optional[torch.Tensor] = None,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: Optional[bool] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = input.float().chunk(2, dim=-1)
    product = (torch.nn.functional.silu(gate) * up).to(input.dtype)
    return _fp4_quantize_reference(product, global_scale, 16, False, is_sf_swizzled_layout, is_sf_8x4_layout)


def _mxfp4_quantize_reference(
    a: torch.Tensor, backend: str = "cuda", enable_pdl: Optional[bool] = None, sfLayout: int = 0, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize_mxfp4(a, 32)
    return codes, padded_scales(scales, int(sfLayout))


def _nvfp4_kv_quantize_reference(
    input: torch.Tensor, global_scale: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_nvfp4(input, global_scale.reshape(()))


def _mxfp8_grouped_quantize_reference(
    a: torch.Tensor, mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros stand for rows that the mask leaves out: rows of group b from ``mask[b]`` on."""
    groups, rows, cols = a.shape
    padded = torch.nn.functional.pad(a, (0, -cols % 128))
    tiles, blocks = (rows + 127) // 128, padded.shape[2] // 128
    values = torch.zeros((groups, rows, padded.shape[2]), dtype=torch.uint8, device=a.device)
    sf = torch.zeros((32, 4, tiles, 4, blocks, groups), dtype=torch.uint8, device=a.device)
    col = torch.arange(4 * blocks, device=a.device)
    for group, count in enumerate(mask.tolist()):
        values[group, :count], scales = mxfp8_blocks(padded[group, :count])
        row = torch.arange(count, device=a.device).unsqueeze(1)
        sf[row % 32, row % 128 // 32, row // 128, col % 4, col // 4, group] = scales
    return values.view(torch.float8_e4m3fn).permute(1, 2, 0), sf


def _fp4_quantize_init(
    *,
    M: int,
    K: int = 4096,
    K_packed: int = 0,
    num_scale_elems: int = 0,
    one: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    x = normal(seeded(seed, device), M, K)
    return {"input": x, "global_scale": (448.0 * 6.0 / x.float().abs().amax()).reshape(one), "sf_vec_size": 16}


def _nvfp4_quantize_init(
    *,
    M: int,
    K: int = 4096,
    K_packed: int = 0,
    num_scale_elems: int = 0,
    one: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    x = normal(seeded(seed, device), M, K)
    return {"a": x, "a_global_sf": (448.0 * 6.0 / x.float().abs().amax()).reshape(one)}


def _silu_and_mul_nvfp4_quantize_init(
    *,
    M: int,
    K_doubled: int = 16384,
    K_packed: int = 0,
    num_scale_elems: int = 0,
    one: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    x = normal(seeded(seed, device), M, K_doubled)
    return {"input": x, "global_scale": torch.full((one,), 448.0, device=device), "sf_vec_size": 16}


def _mxfp4_quantize_init(
    *,
    M: int,
    K: int = 4096,
    K_packed: int = 0,
    num_scale_elems: int = 0,
    one: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    return {"a": normal(seeded(seed, device), M, K)}


def _nvfp4_kv_quantize_init(
    *,
    M: int,
    K: int = 128,
    K_div_2: int = 0,
    K_div_16: int = 0,
    scalar: int = 1,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    x = normal(seeded(seed, device), M, K)
    return {"input": x, "global_scale": (x.float().abs().amax() / (448.0 * 6.0)).reshape(scalar)}


def _mxfp8_grouped_quantize_init(
    *,
    B: int,
    M: int,
    K: int = 4096,
    padded_K: int = 0,
    rm: int = 0,
    rk: int = 0,
    m32: int = 32,
    m4: int = 4,
    k4: int = 4,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    return {
        "a": normal(seeded(seed, device), B, M, K),
        "mask": torch.full((B,), M, dtype=torch.int32, device=device),
    }


_NOTES = {
    "K_packed": "two e2m1 codes in a byte, the first in the low half",
    "num_scale_elems": "with the padding of the layout",
    "global_scale": "448 * 6 / amax of the input",
    "a_global_sf": "448 * 6 / amax of the input",
}


def _fp4_template(
    name: str,
    inputs: str,
    outputs: str,
    constraint: str,
    reference: Callable[..., Any],
    init: Callable[..., dict[str, Any]],
    description: str,
) -> TraceTemplate:
    return template_of_text(
        name,
        "quantization",
        var="M K_packed num_scale_elems one",
        inputs=inputs,
        outputs=outputs,
        notes=_NOTES,
        reference=reference,
        init=init,
        constraints=[constraint],
        description=description,
    )


_QUANTIZED = "quantized[M, K_packed]:uint8; scales[num_scale_elems]:uint8"

fp4_quantize_trace = _fp4_template(
    "fp4_quantize_k{K}",
    "input[M, K]; global_scale[one]:float32?; sf_vec_size:int32?",
    _QUANTIZED,
    "K_packed == K // 2",
    _fp4_quantize_reference,
    _fp4_quantize_init,
    "e2m1 with one scale for a block of a row: e4m3 times the global scale, or a power of two.",
)
nvfp4_quantize_trace = _fp4_template(
    "nvfp4_quantize_k{K}",
    "a[M, K]; a_global_sf[one]:float32; sf_vec_size:int32?",
    _QUANTIZED,
    "K_packed == K // 2",
    _nvfp4_quantize_reference,
    _nvfp4_quantize_init,
    "e2m1 with an e4m3 scale for 16 elements of a row.",
)
silu_and_mul_nvfp4_quantize_trace = _fp4_template(
    "silu_and_mul_nvfp4_quantize_k{K_doubled}",
    "input[M, K_doubled]; global_scale[one]:float32; sf_vec_size:int32?",
    "x_q[M, K_packed]:uint8; sf[num_scale_elems]:uint8",
    "K_packed == K_doubled // 4",
    _silu_and_mul_nvfp4_quantize_reference,
    _silu_and_mul_nvfp4_quantize_init,
    "silu of the first half of a row times the second half, as NVFP4.",
)
mxfp4_quantize_trace = _fp4_template(
    "mxfp4_quantize_k{K}",
    "a[M, K]",
    _QUANTIZED,
    "K_packed == K // 2",
    _mxfp4_quantize_reference,
    _mxfp4_quantize_init,
    "e2m1 with a power of two for 32 elements of a row.",
)
nvfp4_kv_quantize_trace = template_of_text(
    "nvfp4_kv_quantize_k{K}",
    "quantize_fp4",
    var="M K_div_2 K_div_16 scalar",
    inputs="input[M, K]; global_scale[scalar]:float32",
    outputs="x_q[M, K_div_2]:uint8; sf[M, K_div_16]:float8_e4m3fn",
    notes={"global_scale": "value = e2m1 * sf * global_scale"},
    reference=_nvfp4_kv_quantize_reference,
    init=_nvfp4_kv_quantize_init,
    description="e2m1 with an e4m3 scale for 16 elements of a row, scales row by row.",
)
mxfp8_grouped_quantize_trace = template_of_text(
    "mxfp8_grouped_quantize_k{K}",
    "quantization",
    var="B M padded_K rm rk m32 m4 k4",
    inputs="a[B, M, K]; mask[B]:int32",
    outputs="x_q[M, padded_K, B]:float8_e4m3fn; sf[m32, m4, rm, k4, rk, B]:uint8",
    notes={"mask": "valid rows of each group"},
    reference=_mxfp8_grouped_quantize_reference,
    init=_mxfp8_grouped_quantize_init,
    constraints=[
        "padded_K == ((K + 127) // 128) * 128",
        "rm == (M + 127) // 128",
        "rk == padded_K // 128",
        "m32 == 32",
        "m4 == 4",
        "k4 == 4",
    ],
    description="mxfp8_quantize of each group, scales in tiles of 128 x 4.",
)
