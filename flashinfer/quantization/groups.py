# SPDX-License-Identifier: Apache-2.0
"""Quantisation of activations to 8 bits with one scale for a group of columns of a token."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.errors import ArgumentError, BackendSupportedError
from .._runtime.explain_error import explain_type_errors
from .._runtime.integer_math import round_up
from ..api_logging import flashinfer_api
from ..trace.templates.quantization_groups import per_token_group_quant_8bit_trace

__all__ = ["per_token_group_quant_8bit"]

_OP = "per_token_group_quant_8bit"
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two, exactly."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def _laid_out(scale: torch.Tensor, is_column_major: bool, is_aligned: bool) -> torch.Tensor:
    """Return scales ``(..., groups)`` with the strides that a product wants."""
    if not is_column_major:
        return scale.contiguous()
    rows = round_up(scale.shape[-2], 4) if is_aligned else scale.shape[-2]
    made = scale.new_zeros(*scale.shape[:-2], scale.shape[-1], rows).transpose(-1, -2)[..., : scale.shape[-2], :]
    return made.copy_(scale)


@flashinfer_api(trace=per_token_group_quant_8bit_trace)
@explain_type_errors
def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: Optional[torch.dtype] = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cutile",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise each ``group_size`` columns of a token with a scale of their own: ``q = round(x / scale)``.

    ``scale = max(max|x|, eps) / largest`` where ``largest`` is that of the dtype. Computed by torch on every device.

    Parameters
    ----------
    x : torch.Tensor
        ``(..., columns)`` float; columns are a multiple of ``group_size``.
    group_size : int
        Columns that share a scale.
    eps : float
        Least magnitude of a group.
    dst_dtype : Optional[torch.dtype]
        float8_e4m3fn (default), float8_e5m2 or int8; values saturate.
    column_major_scales : bool
        Whether scales of neighbouring tokens lie side by side.
    scale_tma_aligned : bool
        With ``column_major_scales``: whether their columns begin at multiples of 16 bytes.
    scale_ue8m0 : bool
        Whether scales are rounded up to powers of two.
    backend : str
        "cutile", the published name; kernels of ``cuda.tile`` are not needed.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Values of the shape of ``x``, and float32 scales ``(..., columns / group_size)``.

    Examples
    --------
    >>> q, scale = flashinfer.quantization.per_token_group_quant_8bit(torch.full((2, 256), 7.0), 128)
    >>> q[0, 0].item(), scale[0].tolist()
    (448.0, [0.015625, 0.015625])
    """
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    if backend not in ("auto", "cutile"):
        raise BackendSupportedError(f"{_OP} does not support backend '{backend}'; usable here: auto, cutile")
    if dtype not in _LARGEST:
        raise ArgumentError(f"{_OP}: dst_dtype must be float8_e4m3fn, float8_e5m2 or int8, got {dst_dtype}")
    if not x.is_floating_point() or x.ndim < 1 or group_size < 1 or x.shape[-1] % group_size:
        raise ArgumentError(
            f"{_OP}: x must be a float tensor whose last dimension is divisible by group_size = {group_size}, got "
            f"{tuple(x.shape)} {x.dtype}"
        )
    if not eps > 0:
        raise ArgumentError(f"{_OP}: eps must be positive, got {eps}")
    if scale_tma_aligned and not column_major_scales:
        raise ArgumentError(f"{_OP}: scale_tma_aligned must be False without column_major_scales, got True")
    if column_major_scales and x.ndim < 2:
        raise ArgumentError(f"{_OP}: x must have 2 or more dimensions with column_major_scales, got {x.ndim}")
    largest, groups = _LARGEST[dtype], x.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(dim=-1).clamp(min=eps) / largest
    if scale_ue8m0:
        scale = _power_of_two(scale)
    values = (groups / scale.unsqueeze(-1)).flatten(-2)
    values = (values.round() if dtype is torch.int8 else values).clamp(-largest, largest).to(dtype)
    return values, _laid_out(scale, column_major_scales, scale_tma_aligned)
