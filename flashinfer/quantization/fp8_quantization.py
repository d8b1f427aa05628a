# SPDX-License-Identifier: Apache-2.0
"""MXFP8: fp8 e4m3 in blocks of 32 that share a power of two."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .._compat.unsupported_quantization import (
    get_mxfp8_grouped_quantization_module as get_mxfp8_grouped_quantization_module,
)
from .._compat.unsupported_quantization import mxfp8_grouped_quantize as mxfp8_grouped_quantize
from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError, BackendSupportedError
from .._runtime.explain_error import explain_type_errors
from .._runtime.integer_math import round_up
from .._runtime.probes import probes
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.quantization import mxfp8_dequantize_host_trace, mxfp8_quantize_dispatch
from .layout import SfLayout, chosen_layout, scale_count
from .modules import get_mx_quantization_module

BLOCK = 32


@register_custom_op("flashinfer::mxfp8_quantize", mutates_args=("out", "scales"))
def _mxfp8_quantize(
    out: torch.Tensor, scales: torch.Tensor, input: torch.Tensor, layout: int, enable_pdl: bool
) -> None:
    get_mx_quantization_module(backend_of(input)).mxfp8_quantize(out, scales, input, layout, enable_pdl)


@register_custom_op("flashinfer::dequantize_blocks", mutates_args=("out",), device_types="cpu")
def dequantize_blocks(
    out: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    global_scale: Optional[torch.Tensor],
    block_size: int,
    is_e2m1: bool,
    is_scale_e4m3: bool,
    layout: int,
    op: str,
    input_name: str,
    scales_name: str,
) -> None:
    """Convert fp8 or fp4 blocks to float32, on the host; errors use the argument names of ``op``."""
    get_mx_quantization_module("cpu").dequantize(
        *(out, input, scales, global_scale, block_size, is_e2m1, is_scale_e4m3, layout),
        *(op, input_name, scales_name),
    )


@flashinfer_api(trace=mxfp8_quantize_dispatch)
@explain_type_errors
def mxfp8_quantize(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: Optional[bool] = None,
    backend: str = "cuda",
    sf_swizzle_layout: Optional[SfLayout] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to MXFP8: e4m3 values and one power-of-two scale (ue8m0) for each 32 elements of a row.

    Per block ``t = amax / 448`` in float32; the scale is the least ``2^(byte - 127)`` that is not below ``t`` (at most
    ``2^127``), and a value is ``x / scale`` saturated and rounded to nearest even. A block of zeros has byte 0.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., k)`` float32, float16 or bfloat16 on a CPU or CUDA device.
    is_sf_swizzled_layout : bool
        Scales in the 128 x 4 layout, or linear; ``sf_swizzle_layout`` overrides it.
    alignment : int
        A multiple of 32. Rows are padded with zeros to ``k'``, the next multiple of it.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; default: where the device has it.
    backend : str
        ``"cuda"``; on the CPU it has no meaning.
    sf_swizzle_layout : Optional[SfLayout]
        Layout of the scales. 8 x 4 on CUDA only.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The e4m3 bytes, uint8 ``(..., k')``, and the scale bytes, uint8, one-dimensional: ``m * k' / 32`` of them, where
        ``m`` is the product of the leading dimensions, and the padding of the layout, which is zero.

    Examples
    --------
    >>> x = torch.randn(4, 64).bfloat16()
    >>> codes, scales = flashinfer.mxfp8_quantize(x, is_sf_swizzled_layout=False)
    >>> codes.shape, scales.shape
    (torch.Size([4, 64]), torch.Size([8]))
    """
    op = "mxfp8_quantize"
    if backend != "cuda":
        raise BackendSupportedError(f"{op}: backend must be 'cuda', got {backend!r}; usable here: cuda")
    if input.ndim == 0:
        raise ArgumentError(f"{op}: input must have at least 1 dimension, got 0")
    if alignment < BLOCK or alignment % BLOCK != 0:
        raise ArgumentError(f"{op}: alignment must be a multiple of {BLOCK}, got {alignment}")
    layout = chosen_layout(op, is_sf_swizzled_layout, sf_swizzle_layout)
    if layout == SfLayout.layout_8x4 and not input.is_cuda:
        raise ArgumentError(f"{op}: sf_swizzle_layout must be layout_128x4 or layout_linear on the CPU, got layout_8x4")
    shape, cols = input.shape, round_up(input.shape[-1], alignment)
    if cols != shape[-1]:
        input = torch.nn.functional.pad(input, (0, cols - shape[-1]))
    rows = math.prod(shape[:-1])
    out = torch.empty((rows, cols), dtype=torch.uint8, device=input.device)
    scales = torch.empty(scale_count(rows, cols // BLOCK, layout), dtype=torch.uint8, device=input.device)
    use_pdl = input.is_cuda and enable_pdl is not False and probes.device_support_pdl(input.device)
    _mxfp8_quantize(out, scales, input.reshape(rows, cols).contiguous(), int(layout), use_pdl)
    return out.view(*shape[:-1], cols), scales


@flashinfer_api(trace=mxfp8_dequantize_host_trace)
@explain_type_errors
def mxfp8_dequantize_host(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: Optional[SfLayout] = None,
) -> torch.Tensor:
    r"""MXFP8 to float32 on the host: ``e4m3 * 2^(byte - 127)``.

    Parameters
    ----------
    input : torch.Tensor
        ``(m, k)`` uint8 (or float8_e4m3fn), ``k`` a multiple of 32. A CUDA tensor is copied to the host.
    scale_tensor : torch.Tensor
        uint8 scale bytes in the layout that the other arguments name, as :func:`mxfp8_quantize` returns them.
    is_sf_swizzled_layout, sf_swizzle_layout
        As in :func:`mxfp8_quantize`; every layout is read.

    Returns
    -------
    torch.Tensor
        ``(m, k)`` float32 on the CPU.

    Examples
    --------
    >>> x = torch.ones(4, 64).bfloat16()
    >>> codes, scales = flashinfer.mxfp8_quantize(x, is_sf_swizzled_layout=False)
    >>> y = flashinfer.mxfp8_dequantize_host(codes, scales, is_sf_swizzled_layout=False)
    >>> y[0, :3]
    tensor([1., 1., 1.])
    """
    op = "mxfp8_dequantize_host"
    layout = chosen_layout(op, is_sf_swizzled_layout, sf_swizzle_layout)
    out = torch.empty(input.shape, dtype=torch.float32, device="cpu")
    data, scales = input.cpu().contiguous(), scale_tensor.cpu().contiguous()
    dequantize_blocks(out, data, scales, None, BLOCK, False, False, int(layout), op, "input", "scale_tensor")
    return out
