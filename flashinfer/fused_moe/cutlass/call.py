# SPDX-License-Identifier: Apache-2.0
"""The way of ``cutlass_fused_moe`` to native code: facts of a call, the launch that was kept for them, or the op.

Checks (``api.py``) lead to a :class:`LayerChoice`. The op takes it apart for ``torch.compile``, and :func:`launch_of`
makes the launch of it that later calls of the same facts take without checks.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch

from ..._runtime.allocation import allocate, cuda_index, new_empty
from ..._runtime.codegen_wrapper import compiler, is_traced
from ..._runtime.dispatch import NativeFunction, use_pdl
from ..._runtime.kept import KeptLaunches
from ..._runtime.torch_ops import called, register_custom_op
from ...autotuner import AutoTuner
from ...gemm.launch import Sm90Devices, experts_product
from ...gemm.speak import speaking_layer
from ...jit.fused_moe.cutlass import get_fused_moe_module
from ...jit.gemm import W4_KINDS, get_gemm_module, get_gemm_sm90_module
from ...tllm_enums import ActivationType
from .formats import NO_SCALES, PICK_SCALES, Format, name_of
from .tuning import FEWEST_TOKENS, NOT_ASKED, Product, product_tuned_before, tuned_product

__all__ = [
    "LayerChoice",
    "fused_moe",
    "launch_of",
    "layer_launches",
    "native_fused_moe",
    "sm90_kind",
    "unspecified",
]

native_fused_moe = NativeFunction(get_fused_moe_module, "fused_moe")
_general_product = NativeFunction(get_gemm_module, "gemm")
_is_sm90 = Sm90Devices()
_W4_KINDS = {Format.MXFP4: "mxfp4", Format.MXFP4_FP8: "mxfp4_fp8", Format.INT4_FP8: "int4"}

#: Activations that GEMM 1 of SM90 applies.
_SWIGLU = (int(ActivationType.Swiglu), int(ActivationType.SwigluBias))

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OptionalTensor = Optional[torch.Tensor]

_KEPT_SIZES = 64
_KEPT_ELEMENTS = 1 << 16  # elements of the largest tensor that is kept: 256 KB
#: Results without meaning by CUDA device index (-1: the CPU), experts and tokens.
_kept_results: dict[tuple[int, int, int], Three] = {}


class LayerChoice(NamedTuple):
    """Decisions that the arguments of a call imply, once for all calls of the same facts: the op's last arguments."""

    format: int
    activation: int
    first_expert: int
    adds_bias2: bool
    enable_pdl: Optional[bool]
    most_tokens: int  #: largest number of tokens to tune for
    ranks: int  #: ranks that share the experts of the tokens

    def text(self, like: torch.Tensor) -> str:
        """Return the choice in words, for the log."""
        kind = sm90_kind(like.get_device(), like.dtype, self.format) if like.is_cuda else None
        products = "general products" if kind is None else f"SM90 products of {kind}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return (
            f"{name_of(self.format)}, {ActivationType(self.activation).name}, {products}, "
            f"experts from {self.first_expert} of {ranks}"
        )


def sm90_kind(device_index: int, input_dtype: torch.dtype, format: int) -> Optional[str]:
    """Return the kind of SM90 module that multiplies for a layer, or None for the general one."""
    if not _is_sm90[device_index]:
        return None
    if format == Format.PLAIN:
        return "bf16" if input_dtype is torch.bfloat16 else "fp16"
    return _W4_KINDS.get(format) or ("fp8" if format == Format.FP8_TENSOR else "fp8_block")


def _product_by_rule(input: torch.Tensor, format: int) -> tuple[Optional[str], Product]:
    """Return the kind of SM90 module and the product that chooses its tiles by rules; two None for the CPU."""
    if not input.is_cuda:
        return None, None
    kind = sm90_kind(input.get_device(), input.dtype, format)
    if kind is None:
        return None, _general_product[True]
    return kind, experts_product(kind)


# All that checks and choices depend on, but for what csrc/fused_moe.cu compares: shapes, dtypes, devices. The number of
# tokens decides about measured tiles only, for which each launch asks.
layer_launches = KeptLaunches(
    "input.get_device(), input.dtype, fc1_expert_weights.dtype, len(fc1_expert_weights), output_dtype, "
    "len(quant_scales) if quant_scales else 0, swiglu_alpha is swiglu_beta is swiglu_limit is None, activation_type, "
    "tp_size, tp_rank, ep_size, ep_rank, enable_alltoall and token_selected_experts.shape[1:], "
    "use_deepseek_fp8_block_scale, use_w4_group_scaling, use_packed_weights, use_wfp4afp8_humming, enable_pdl, "
    "tune_max_num_tokens, profile_ids and len(profile_ids), min_latency_mode or use_mxfp8_act_scaling "
    "or cluster_rank or cluster_size != 1 or input_sf is not None",
    passed="input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, quant_scales, "
    "fc1_expert_biases, fc2_expert_biases, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta, "
    "output, workspace_buffer",
)


def launch_of(
    choice: LayerChoice, like: torch.Tensor, experts: int, output_dtype: torch.dtype
) -> Callable[..., Optional[list[torch.Tensor]]]:
    """Return what runs a layer of a choice on the device of ``like``; it returns None for a call that needs checks."""
    format, activation, first_expert, adds_bias2, enable_pdl, most_tokens, ranks = choice
    is_cuda, index, pdl = like.is_cuda, cuda_index(like), use_pdl(like, enable_pdl)
    kind, by_rule = _product_by_rule(like, format)
    has_tiles, is_sm90, pick_scales = kind is not None or not is_cuda, kind is not None, PICK_SCALES[format]

    def launch_layer(
        input: torch.Tensor,
        ids: torch.Tensor,
        token_scales: OptionalTensor,
        fc1: torch.Tensor,
        fc2: torch.Tensor,
        quant_scales: Optional[Sequence[torch.Tensor]],
        bias1: OptionalTensor,
        bias2: OptionalTensor,
        alpha: OptionalTensor,
        beta: OptionalTensor,
        limit: OptionalTensor,
        situ_beta: OptionalTensor,
        situ_linear_beta: OptionalTensor,
        output: OptionalTensor,
        workspace: OptionalTensor,
    ) -> Optional[list[torch.Tensor]]:
        tokens, hidden = input.shape
        if output is None:
            output = allocate((tokens, hidden), (hidden or 1, 1), output_dtype, index)
        elif output.dtype is not output_dtype:
            return None
        if not input.is_contiguous():
            input = input.contiguous()
        product = by_rule
        if AutoTuner.was_used and has_tiles and tokens >= FEWEST_TOKENS:
            inputs = (output, input, ids, token_scales, fc1, fc2, bias1)
            product = product_tuned_before(kind, format, activation, ranks, inputs, most_tokens)
            if product is NOT_ASKED:
                return None
        scales = pick_scales((*quant_scales, None)) if quant_scales else NO_SCALES
        scale1, scale2, factor1, factor2, quant1, quant2 = scales
        # fmt: off
        native_fused_moe[is_cuda](
            output, input, ids, token_scales, fc1, fc2, bias1, bias2, scale1, scale2, factor1, factor2, quant1, quant2,
            alpha, beta, limit, situ_beta, situ_linear_beta, workspace, product, format, activation, first_expert,
            adds_bias2, is_sm90, pdl, ranks,
        )
        # fmt: on
        return [output, *(_kept_results.get((index, experts, tokens)) or unspecified(input, experts, tokens))]

    if kind is None or kind in W4_KINDS:
        return launch_layer
    return speaking_layer(get_gemm_sm90_module(kind), launch_layer, ranks, kind == "fp8_block", activation in _SWIGLU)


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
    """Enqueue all stages of a layer of experts; arguments as in csrc/fused_moe.cu, then a :class:`LayerChoice`."""
    native, (kind, product) = native_fused_moe[input.is_cuda], _product_by_rule(input, format)
    options = (format, activation, first_expert, adds_bias2, kind is not None, use_pdl(input, enable_pdl), ranks)
    # fmt: off
    tensors = (
        output, input, experts, token_scales, fc1, fc2, bias1, bias2, scale1, scale2, factor1, factor2, quant1, quant2,
        alpha, beta, limit, situ_beta, situ_linear_beta,
    )
    # fmt: on
    if AutoTuner.was_used:

        def trial(inputs: Sequence[Any], product: Product) -> None:
            native(*inputs, None, product, *options)  # allocates its workspace

        product = tuned_product(kind, format, activation, ranks, tensors, product, trial, tune_max_num_tokens)
    native(*tensors, workspace, product, *options)


def _allocate(like: torch.Tensor, experts: int, tokens: int) -> Three:
    return (
        new_empty(like, torch.int32, 1),
        new_empty(like, torch.float32, experts, tokens),
        new_empty(like, torch.int32, experts),
    )


def unspecified(like: torch.Tensor, experts: int, tokens: int) -> Three:
    """Return results that have no meaning: int32 ``(1,)``, float32 ``(experts, tokens)``, int32 ``(experts,)``.

    Those of small calls are kept: three allocations take 4 us. Memory of a CUDA graph that is being captured is not
    kept, because it belongs to the graph.
    """
    if is_traced() or compiler._is_compiling_flag:
        return _allocate(like, experts, tokens)
    key = (cuda_index(like), experts, tokens)
    found = _kept_results.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept may be returned in other modes
            found = _allocate(like, experts, tokens)
        is_small = experts * tokens <= _KEPT_ELEMENTS and len(_kept_results) < _KEPT_SIZES
        if is_small and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            _kept_results[key] = found
    return found
