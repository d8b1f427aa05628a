# SPDX-License-Identifier: Apache-2.0
"""Residual sum, RMSNorm and quantisation to e4m3 by blocks of 128 columns, in one kernel."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.norm import gen_norm_block_quant_module
from ..trace.templates.norm_block_quant import fused_add_rmsnorm_fp8_block_quant_trace

__all__ = ["fused_add_rmsnorm_fp8_block_quant"]

get_norm_block_quant_module = module_cache(gen_norm_block_quant_module)
_native = NativeFunction(get_norm_block_quant_module, "fused_add_rmsnorm_fp8_block_quant")


@register_custom_op(
    "flashinfer::fused_add_rmsnorm_fp8_block_quant", mutates_args=("out", "block_scale", "normed_out", "residual")
)
def _block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    enable_pdl: Optional[bool],
) -> None:
    _native[input.is_cuda](out, block_scale, normed_out, input, residual, weight, eps, use_pdl(input, enable_pdl))


@flashinfer_api(trace=fused_add_rmsnorm_fp8_block_quant_trace)
@explain_type_errors
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: Optional[bool] = None,
) -> None:
    r"""Add the residual, take the RMSNorm, and quantise it by 1 x 128 blocks: the input of a block-scaled product.

    ``s = input + residual`` in float32; ``residual`` becomes ``s`` rounded and ``normed_out`` becomes
    ``s / sqrt(mean(s ** 2) + eps) * weight``, rounded. Each 128 columns ``y`` of a row of it are stored as
    ``e4m3(y * q)`` with ``q = 448 / max(abs(y))``, or 1 for zeros, and their scale is ``1 / q``.

    Parameters
    ----------
    out : torch.Tensor
        ``(rows, hidden)`` float8_e4m3fn, written.
    block_scale : torch.Tensor
        ``(hidden / 128, n)`` float32, written for ``rows`` of the n columns; n is ``rows`` rounded up to a multiple of
        4 where a copy engine reads the scales.
    normed_out : torch.Tensor
        Shape and dtype of ``input``, written; may be ``input``.
    input : torch.Tensor
        ``(rows, hidden)`` bfloat16 or float16; ``hidden`` is a multiple of 256 up to 8192, of 512 up to 16384. Rows
        here and below begin at multiples of 16 bytes.
    residual : torch.Tensor
        Shape and dtype of ``input``; overwritten with the sum.
    weight : torch.Tensor
        ``(hidden,)``, dtype of ``input``.
    eps : float
        Added to the mean square.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None turns it on where the GPU has it.

    Examples
    --------
    >>> x, residual, w = (torch.ones(*size).bfloat16() for size in ((2, 256), (2, 256), (256,)))
    >>> out, scale = torch.empty(2, 256, dtype=torch.float8_e4m3fn), torch.zeros(2, 4)
    >>> flashinfer.norm.fused_add_rmsnorm_fp8_block_quant(out, scale, y := torch.empty_like(x), x, residual, w)
    >>> residual[0, 0].item(), y[0, 0].item(), out[0, 0].item()
    (2.0, 1.0, 448.0)
    """
    _block_quant(out, block_scale, normed_out, input, residual, weight, eps, enable_pdl)
