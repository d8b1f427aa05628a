# SPDX-License-Identifier: Apache-2.0
"""FP4 (e2m1) with block scales: dequantisation on the host, and the layouts of scales and weights."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._compat.unsupported_quantization import fp4_quantize as fp4_quantize
from .._compat.unsupported_quantization import mxfp4_quantize as mxfp4_quantize
from .._compat.unsupported_quantization import nvfp4_kv_quantize as nvfp4_kv_quantize
from .._compat.unsupported_quantization import nvfp4_quantize as nvfp4_quantize
from .._compat.unsupported_quantization import silu_and_mul_nvfp4_quantize as silu_and_mul_nvfp4_quantize
from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..jit.core import JitSpec
from ..jit.quantization import gen_mx_quantization_module
from ..trace.templates.quantization import (
    block_scale_interleave_trace,
    e2m1_and_ufp8sf_scale_to_float_trace,
    mxfp4_dequantize_host_trace,
    mxfp4_dequantize_trace,
    shuffle_matrix_a_trace,
    shuffle_matrix_sf_a_trace,
)
from .fp8_quantization import dequantize_blocks
from .layout import SfLayout, chosen_layout, scale_count
from .modules import get_mx_quantization_module
from .nvfp4_kv import nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged
from .nvfp4_quantization_utils import NVFP4_QUANT_ENV_VARS as NVFP4_QUANT_ENV_VARS


def gen_fp4_quantization_sm90_module() -> JitSpec:
    """Describe the module of FP4 and MXFP8 on SM90; its kernels are the same for every architecture."""
    return gen_mx_quantization_module("cuda")


def get_fp4_quantization_module(backend: str = "100") -> Any:
    """Load the module; ``backend`` is an architecture such as "90", and all architectures have the same kernels."""
    return get_mx_quantization_module("cuda")


@register_custom_op("flashinfer::block_scale_interleave", mutates_args=("out",))
def _block_scale_interleave(out: torch.Tensor, unswizzled_sf: torch.Tensor) -> None:
    get_mx_quantization_module(backend_of(unswizzled_sf)).block_scale_interleave(out, unswizzled_sf)


@flashinfer_api(trace=block_scale_interleave_trace)
@explain_type_errors
def block_scale_interleave(unswizzled_sf: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    r"""Bring row-major block scales into the 128 x 4 layout of block-scaled matrix units, padded with zeros.

    Parameters
    ----------
    unswizzled_sf : torch.Tensor
        ``(rows, cols)`` or ``(experts, rows, cols)``, uint8 or bfloat16, on a CPU or CUDA device.
    out : Optional[torch.Tensor]
        Contiguous, with as many elements as the result has and of its dtype; written, and returned with its shape.

    Returns
    -------
    torch.Tensor
        One-dimensional, same dtype: ``round_up(rows, 128) * P`` scales for each expert, ``P = round_up(cols, 4)``.
        Scale ``(r, c)`` of an expert is, with integer divisions, at
        ``(r / 128) * 128 * P + (c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4``.

    Examples
    --------
    >>> scales = torch.arange(128 * 4, dtype=torch.int16).to(torch.uint8).view(128, 4)
    >>> flashinfer.block_scale_interleave(scales).numel()
    512
    """
    if unswizzled_sf.ndim not in (2, 3):
        raise ArgumentError(
            f"block_scale_interleave: unswizzled_sf must have 2 or 3 dimensions, got {unswizzled_sf.ndim}"
        )
    rows, cols = unswizzled_sf.shape[-2:]
    experts = unswizzled_sf.shape[0] if unswizzled_sf.ndim == 3 else 1
    size = experts * scale_count(rows, cols, SfLayout.layout_128x4)
    if out is None:
        out = unswizzled_sf.new_empty(size)
    elif out.numel() != size or out.dtype != unswizzled_sf.dtype or not out.is_contiguous():
        raise ArgumentError(
            f"block_scale_interleave: out must be contiguous with {size} elements of {unswizzled_sf.dtype}, got "
            f"{tuple(out.shape)} of {out.dtype}"
        )
    _block_scale_interleave(out.view(-1), unswizzled_sf.contiguous())
    return out


nvfp4_block_scale_interleave = block_scale_interleave


def _fp4_to_float(
    op: str,
    names: tuple[str, str],
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: Optional[torch.Tensor],
    block_size: int,
    is_scale_e4m3: bool,
    layout: SfLayout,
) -> torch.Tensor:
    """Convert an FP4 matrix to float32 on the host; ``names`` are the caller's names of ``data`` and ``scales``."""
    if data.ndim != 2:
        raise ArgumentError(f"{op}: {names[0]} must have 2 dimensions, got {data.ndim}")
    if global_scale is not None and not isinstance(global_scale, torch.Tensor):
        raise ArgumentError(f"{op}: global_scale_tensor must be a float32 tensor of one element, got {global_scale!r}")
    out = torch.empty((data.shape[0], data.shape[1] * 2), dtype=torch.float32, device="cpu")
    factor = None if global_scale is None else global_scale.cpu()
    data, scales = data.cpu().contiguous(), scales.cpu().contiguous()
    dequantize_blocks(out, data, scales, factor, block_size, True, is_scale_e4m3, int(layout), op, *names)
    return out


@flashinfer_api(trace=e2m1_and_ufp8sf_scale_to_float_trace)
@explain_type_errors
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: Optional[torch.Tensor] = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    r"""FP4 with 8-bit block scales to float32 on the host: ``e2m1 * scale * global``.

    Parameters
    ----------
    e2m1_tensor : torch.Tensor
        ``(m, k / 2)`` uint8, the even element in the low nibble. CUDA tensors are copied to the host.
    ufp8_scale_tensor : torch.Tensor
        uint8 scale bytes, one for ``sf_vec_size`` elements, in the layout that the flags name.
    global_scale_tensor : Optional[torch.Tensor]
        One float32 factor; default 1.
    sf_vec_size : int
        Elements that share a scale; ``k`` is a multiple.
    ufp8_type : int
        1: scales are e4m3; 0: they are ue8m0, ``2^(byte - 127)``.
    is_sf_swizzled_layout : bool
        Whether the scales are in tiles of 128 x 4, or of 8 x 4 when ``is_sf_8x4_layout``; else row by row.

    Returns
    -------
    torch.Tensor
        ``(m, k)`` float32 on the CPU.

    Examples
    --------
    >>> codes = torch.full((1, 8), 0x22, dtype=torch.uint8)  # sixteen codes of 1.0
    >>> scale = torch.tensor([0x40], dtype=torch.uint8)  # 2.0 in e4m3
    >>> flashinfer.e2m1_and_ufp8sf_scale_to_float(codes, scale, None, 16, 1, False)[0, :3]
    tensor([2., 2., 2.])
    """
    op = "e2m1_and_ufp8sf_scale_to_float"
    if ufp8_type not in (0, 1):
        raise ArgumentError(f"{op}: ufp8_type must be 0 (ue8m0) or 1 (e4m3), got {ufp8_type}")
    swizzled = SfLayout.layout_8x4 if is_sf_8x4_layout else SfLayout.layout_128x4
    layout = swizzled if is_sf_swizzled_layout else SfLayout.layout_linear
    scales = (ufp8_scale_tensor, global_scale_tensor, sf_vec_size)
    names = ("e2m1_tensor", "ufp8_scale_tensor")
    return _fp4_to_float(op, names, e2m1_tensor, *scales, ufp8_type == 1, layout)


@flashinfer_api(trace=mxfp4_dequantize_trace)
@explain_type_errors
def mxfp4_dequantize(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> torch.Tensor:
    r"""MXFP4 (e2m1, a ue8m0 scale for 32 elements) to float32 on the host.

    Parameters
    ----------
    a_fp4 : torch.Tensor
        ``(m, k / 2)`` uint8, the even element in the low nibble.
    a_sf : torch.Tensor
        uint8 scale bytes in ``sfLayout``.
    sfLayout : SfLayout
        Layout of the scales.

    Returns
    -------
    torch.Tensor
        ``(m, k)`` float32 on the CPU.

    Examples
    --------
    >>> codes = torch.full((128, 64), 0x22, dtype=torch.uint8)  # codes of 1.0
    >>> scales = torch.full((128 * 4,), 128, dtype=torch.uint8)  # 2 ** (128 - 127)
    >>> flashinfer.mxfp4_dequantize(codes, scales)[0, :3]
    tensor([2., 2., 2.])
    """
    layout = chosen_layout("mxfp4_dequantize", True, sfLayout)
    return _fp4_to_float("mxfp4_dequantize", ("a_fp4", "a_sf"), a_fp4, a_sf, None, 32, False, layout)


@flashinfer_api(trace=mxfp4_dequantize_host_trace)
@explain_type_errors
def mxfp4_dequantize_host(weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    r"""MXFP4 weights with row-major scales to float32 on the host.

    Parameters
    ----------
    weight : torch.Tensor
        ``(..., k / 2)`` uint8, the even element in the low nibble.
    scale : torch.Tensor
        ``(..., k / group_size)`` uint8, ue8m0.
    group_size : int
        Elements that share a scale.

    Returns
    -------
    torch.Tensor
        ``(..., k)`` float32 on the CPU.

    Examples
    --------
    >>> codes = torch.full((1, 16), 0x22, dtype=torch.uint8)  # 32 codes of 1.0
    >>> scale = torch.tensor([[128]], dtype=torch.uint8)  # 2 ** (128 - 127)
    >>> flashinfer.mxfp4_dequantize_host(codes, scale)[0, :3]
    tensor([2., 2., 2.])
    """
    op = "mxfp4_dequantize_host"
    if weight.ndim == 0:
        raise ArgumentError(f"{op}: weight must have at least 1 dimension, got 0")
    out = torch.empty((*weight.shape[:-1], weight.shape[-1] * 2), dtype=torch.float32, device="cpu")
    data = weight.cpu().reshape(weight.numel() // max(weight.shape[-1], 1), weight.shape[-1])
    layout = int(SfLayout.layout_linear)
    dequantize_blocks(
        *(out, data, scale.cpu().contiguous(), None, group_size, True, False, layout),
        *(op, "weight", "scale"),
    )
    return out


def get_shuffle_block_size(epilogue_tile_m: int) -> int:
    """Return the rows per block that :func:`shuffle_matrix_a` reorders: 32 if 128 divides the tile size, else 16."""
    return 32 if epilogue_tile_m % 128 == 0 else 16


def _block_of(op: str, x: torch.Tensor, epilogue_tile_m: int) -> int:
    """Return the rows per block of ``x``; raise if the rows of ``x`` are not a multiple of it."""
    block = get_shuffle_block_size(epilogue_tile_m)
    if x.ndim != 2 or x.shape[0] % block != 0:
        raise ArgumentError(
            f"{op}: input_tensor must have 2 dimensions and rows in blocks of {block} (epilogue_tile_m is "
            f"{epilogue_tile_m}), got {tuple(x.shape)}"
        )
    return block


def _shuffled(x: torch.Tensor, block: int) -> torch.Tensor:
    """Reorder the rows of each block: of 16 rows, even indices first; of 32 rows, every fourth row first."""
    return x.reshape(x.shape[0] // block, 8, block // 8, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _row_indices(op: str, x: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    block = _block_of(op, x, epilogue_tile_m)
    return _shuffled(torch.arange(x.shape[0], device="cpu"), block)


def _check_scales(op: str, x: torch.Tensor, num_elts_per_sf: int) -> None:
    if num_elts_per_sf not in (16, 32):
        raise ArgumentError(f"{op}: num_elts_per_sf must be 16 or 32, got {num_elts_per_sf}")
    if x.ndim > 0 and x.shape[0] % 128 != 0:
        raise ArgumentError(f"{op}: input_tensor.shape[0] must be a multiple of 128, got {x.shape[0]}")


@explain_type_errors
def get_shuffle_matrix_a_row_indices(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Return the row order of :func:`shuffle_matrix_a`: ``(m,)``, int64, on the CPU."""
    return _row_indices("get_shuffle_matrix_a_row_indices", input_tensor, epilogue_tile_m)


@explain_type_errors
def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Return the row order in which :func:`shuffle_matrix_sf_a` interleaves scales: ``(m,)``, int64, on the CPU."""
    op = "get_shuffle_matrix_sf_a_row_indices"
    _check_scales(op, input_tensor, num_elts_per_sf)
    return _row_indices(op, input_tensor, epilogue_tile_m)


@flashinfer_api(trace=shuffle_matrix_a_trace)
@explain_type_errors
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    r"""Reorder the rows of a weight for kernels whose epilogue works on transposed tiles.

    In each block of 16 rows, row ``2 i + j`` goes to ``8 j + i``; when 128 divides ``epilogue_tile_m``, in each block
    of 32, row ``4 i + j`` goes to ``8 j + i``.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``(m, k)``, any dtype and device; ``m`` a multiple of the block.
    epilogue_tile_m : int
        Rows of the kernel's tile.

    Returns
    -------
    torch.Tensor
        ``(m, k)``, a copy.

    Examples
    --------
    >>> rows = torch.arange(16)[:, None]
    >>> flashinfer.shuffle_matrix_a(rows, 16)[:4, 0]
    tensor([0, 2, 4, 6])
    """
    return _shuffled(input_tensor, _block_of("shuffle_matrix_a", input_tensor, epilogue_tile_m))


@flashinfer_api(trace=shuffle_matrix_sf_a_trace)
@explain_type_errors
def shuffle_matrix_sf_a(input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> torch.Tensor:
    r"""Reorder block scales as :func:`shuffle_matrix_a` does the weight, then :func:`block_scale_interleave`.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``(m, cols)`` uint8 or bfloat16 scales, ``m`` a multiple of 128.
    epilogue_tile_m : int
        Rows of the kernel's tile.
    num_elts_per_sf : int
        Elements that share a scale, 16 or 32. The order does not depend on it.

    Returns
    -------
    torch.Tensor
        One-dimensional, as :func:`block_scale_interleave` returns it.

    Examples
    --------
    >>> scales = torch.zeros(128, 4, dtype=torch.uint8)
    >>> flashinfer.shuffle_matrix_sf_a(scales, 128).numel()
    512
    """
    op = "shuffle_matrix_sf_a"
    _check_scales(op, input_tensor, num_elts_per_sf)
    return block_scale_interleave(_shuffled(input_tensor, _block_of(op, input_tensor, epilogue_tile_m)))
