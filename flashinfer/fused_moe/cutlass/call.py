# SPDX-License-Identifier: Apache-2.0
"""The op behind ``cutlass_fused_moe``: one call into native code, as ``torch.compile`` sees it."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from ..._runtime.dispatch import NativeFunction, use_pdl
from ..._runtime.torch_ops import called, register_custom_op
from ...autotuner import AutoTuner
from ...gemm.launch import Sm90Devices, Sm90Functions, W4Functions
from ...jit.fused_moe.cutlass import get_fused_moe_module
from ...jit.gemm import get_gemm_module
from .formats import Format
from .tuning import Product, tuned_product

__all__ = ["fused_moe", "native_fused_moe", "sm90_kind", "sm90_product", "w4_product"]

native_fused_moe = NativeFunction(get_fused_moe_module, "fused_moe")
_general_product = NativeFunction(get_gemm_module, "gemm")
_is_sm90 = Sm90Devices()
sm90_product = Sm90Functions("gemm_sm90_experts")
w4_product = W4Functions("gemm_w4_sm90_experts")
_W4_KINDS = {Format.MXFP4: "mxfp4", Format.MXFP4_FP8: "mxfp4_fp8", Format.INT4_FP8: "int4"}


def sm90_kind(device_index: int, input_dtype: torch.dtype, format: int) -> Optional[str]:
    """Return the kind of SM90 module that multiplies for a layer, or None for the general one."""
    if not _is_sm90[device_index]:
        return None
    if format == Format.PLAIN:
        return "bf16" if input_dtype is torch.bfloat16 else "fp16"
    return _W4_KINDS.get(format) or ("fp8" if format == Format.FP8_TENSOR else "fp8_block")


@register_custom_op("flashinfer::cutlass_fused_moe", mutates_args=("output", "workspace"))
@called("cutlass_fused_moe")
def fused_moe(
    output: torch.Tensor,
    input: torch.Tensor,
    experts: torch.Tensor,
    token_scales: Optional[torch.Tensor],
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    bias1: Optional[torch.Tensor],
    bias2: Optional[torch.Tensor],
    scale1: Optional[torch.Tensor],
    scale2: Optional[torch.Tensor],
    factor1: Optional[torch.Tensor],
    factor2: Optional[torch.Tensor],
    quant1: Optional[torch.Tensor],
    quant2: Optional[torch.Tensor],
    alpha: Optional[torch.Tensor],
    beta: Optional[torch.Tensor],
    limit: Optional[torch.Tensor],
    situ_beta: Optional[torch.Tensor],
    situ_linear_beta: Optional[torch.Tensor],
    workspace: Optional[torch.Tensor],
    format: int,
    activation: int,
    first_expert: int,
    adds_bias2: bool,
    enable_pdl: Optional[bool],
    tune_max_num_tokens: int = 8192,
    ranks: int = 1,
) -> None:
    """Enqueue all stages of a layer of experts; arguments as in csrc/fused_moe.cu, but for the tuner's tokens."""
    is_cuda = input.is_cuda
    product: Product = None
    kind: Optional[str] = None
    if is_cuda:
        kind = sm90_kind(input.get_device(), input.dtype, format)
        if kind is None:
            product = _general_product[True]
        else:
            product = w4_product[kind] if format in _W4_KINDS else sm90_product[kind]
    # fmt: off
    if AutoTuner.was_used:
        product = _measured_product(
            (output, input, experts, token_scales, fc1, fc2, bias1, bias2, scale1, scale2, factor1, factor2,
             quant1, quant2, alpha, beta, limit, situ_beta, situ_linear_beta),
            product, kind,
            (format, activation, first_expert, adds_bias2, kind is not None, use_pdl(input, enable_pdl), ranks),
            tune_max_num_tokens,
        )
    native_fused_moe[is_cuda](
        output, input, experts, token_scales, fc1, fc2, bias1, bias2, scale1, scale2, factor1, factor2,
        quant1, quant2, alpha, beta, limit, situ_beta, situ_linear_beta, workspace, product, format, activation,
        first_expert, adds_bias2, kind is not None, use_pdl(input, enable_pdl), ranks,
    )
    # fmt: on


def _measured_product(
    tensors: tuple[Any, ...], by_rule: Product, kind: Optional[str], options: tuple[Any, ...], most_tokens: int
) -> Product:
    """Return the product whose tiles the autotuner chose; its trials allocate their workspaces."""
    native = native_fused_moe[tensors[1].is_cuda]

    def launch(inputs: Sequence[Any], product: Product) -> None:
        native(*inputs, None, product, *options)

    format, activation, *_, ranks = options
    return tuned_product(kind, format, activation, ranks, tensors, by_rule, launch, most_tokens)
