# SPDX-License-Identifier: Apache-2.0
"""A whole layer of experts: from routed ids to the weighted sum of the experts' outputs, in one call."""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch

from ..._runtime.allocation import new_empty
from ..._runtime.codegen_wrapper import compiler, is_traced
from ..._runtime.explain_error import explain_type_errors
from ..._runtime.probes import probes
from ...api_logging import flashinfer_api
from ...dump.apis import unspecified_results
from ...tllm_enums import ActivationType, normalize_activation_type
from ...trace.templates.fused_moe import cutlass_fused_moe_trace
from .call import LayerChoice, fused_moe, launch_of, layer_launches, unspecified
from .faults import refuse_modes, refuse_output, refuse_profiles, refuse_ranks
from .formats import Format, format_of, scales_of, sharing_ranks

__all__ = ["cutlass_fused_moe"]

_OUTPUTS = frozenset({torch.float16, torch.bfloat16})
_SWIGLU, _SWIGLU_BIAS = int(ActivationType.Swiglu), int(ActivationType.SwigluBias)
_INVALID = int(ActivationType.InvalidType)
#: Formats that only SM90 and the CPU have, and the argument that selects each.
_OF_SM90 = {
    Format.FP8_BLOCK: "use_deepseek_fp8_block_scale",
    Format.MXFP4: "use_w4_group_scaling",
    Format.INT4_FP8: "use_w4_group_scaling",
    Format.MXFP4_FP8: "use_wfp4afp8_humming",
}


def _activation_number(activation_type: Union[int, ActivationType], has_constants: bool) -> int:
    """Return the number of the activation; Swiglu with constants is SwigluBias."""
    number = int(activation_type) if type(activation_type) is ActivationType else -1
    if number < 0 or number >= _INVALID:
        number = int(normalize_activation_type(activation_type))
        if number == _INVALID:
            normalize_activation_type(-1)
    return _SWIGLU_BIAS if number == _SWIGLU and has_constants else number


def _refuse_format(format: int, device: torch.device) -> None:
    major, minor = probes.get_compute_capability(device)
    if (major, minor) != (9, 0):
        raise NotImplementedError(
            f"cutlass_fused_moe: {_OF_SM90[format]} must be False on GPUs other than SM90, got SM{major}{minor}"
        )


@flashinfer_api(trace=cutlass_fused_moe_trace)
@unspecified_results(1, 2, 3)
@layer_launches
@explain_type_errors
def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Optional[Sequence[torch.Tensor]],
    fc1_expert_biases: Optional[torch.Tensor] = None,
    fc2_expert_biases: Optional[torch.Tensor] = None,
    input_sf: Optional[torch.Tensor] = None,
    swiglu_alpha: Optional[torch.Tensor] = None,
    swiglu_beta: Optional[torch.Tensor] = None,
    swiglu_limit: Optional[torch.Tensor] = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Optional[torch.Tensor] = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: Optional[bool] = None,
    activation_type: Union[int, ActivationType] = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: Optional[Sequence[int]] = None,
    workspace_buffer: Optional[torch.Tensor] = None,
    *,
    situ_beta: Optional[torch.Tensor] = None,
    situ_linear_beta: Optional[torch.Tensor] = None,
) -> list[torch.Tensor]:
    r"""Mixture of experts: ``out[t] = sum over slots s of scale[t, s] * fc2[e] act(fc1[e] x[t] + b1[e]) + b2[e]``.

    Sums are float32 in both products and over the slots, in a fixed order; on CUDA the outputs of experts are
    rounded to ``output_dtype`` before the sum over slots, but for up to 8 tokens (one with e4m3 blocks or MXFP4).
    Results are the same bits at each call; on the CPU, and on CUDA among such calls, those of a token do not depend on
    the others.

    Parameters
    ----------
    input : torch.Tensor
        ``(T, H)`` float16, bfloat16 or float8_e4m3fn.
    token_selected_experts : torch.Tensor
        ``(T, top_k)`` int32 global expert ids. Ids of other ranks, and ids that no rank has, contribute nothing.
    token_final_scales : Optional[torch.Tensor]
        ``(T, top_k)`` float32 weights of the experts; None is 1.
    fc1_expert_weights : torch.Tensor
        ``(E_local, 2 * I, H)``, rows [up ; gate]: the second half is activated. ``(E_local, I, H)`` if the activation
        is not gated. Four-bit weights are uint8 with two codes per element of the last dimension.
    fc2_expert_weights : torch.Tensor
        ``(E_local, H, I)``.
    output_dtype : torch.dtype
        torch.float16 or torch.bfloat16; that of ``input`` for 16-bit weights.
    quant_scales : Optional[Sequence[torch.Tensor]]
        Scales of the format; docs/fused_moe.md lists them. None or empty for 16-bit weights.
    fc1_expert_biases, fc2_expert_biases : Optional[torch.Tensor]
        ``(E_local, rows of the weight)`` in ``output_dtype``, both or neither. That of fc2 counts on tensor-parallel
        rank 0 only.
    input_sf : Optional[torch.Tensor]
        Must be None: scales of Blackwell formats.
    swiglu_alpha, swiglu_beta, swiglu_limit : Optional[torch.Tensor]
        ``(E_local,)`` float32. With one of them, Swiglu is SwigluBias.
    tp_size, tp_rank : int
        Tensor-parallel group; weights are slices along I already.
    ep_size, ep_rank : int
        Expert-parallel group: this rank has experts ``ep_rank * E_local`` to ``(ep_rank + 1) * E_local - 1``.
    cluster_size, cluster_rank : int
        Must be 1 and 0.
    output : Optional[torch.Tensor]
        ``(T, H)``; written and returned when given.
    enable_alltoall : bool
        Tokens are those that a transport sent here, each with a local expert: tiles are chosen for as many rows. Rows
        of tokens without one are zero either way.
    use_deepseek_fp8_block_scale : bool
        float8_e4m3fn weights with scales of 128 x 128 blocks; bfloat16 ``input`` is quantised by 1 x 128. SM90 and CPU.
    use_w4_group_scaling : bool
        Four-bit weights: MXFP4 with bfloat16 activations, unless the next flags say otherwise. SM90 and CPU.
    use_packed_weights : bool
        Four-bit weights are int4, activations are quantised to float8_e4m3fn.
    use_wfp4afp8_humming : bool
        Four-bit weights are MXFP4, activations are quantised to float8_e4m3fn. SM90 and CPU.
    use_mxfp8_act_scaling, min_latency_mode : bool
        Must be False.
    tune_max_num_tokens : int
        Inside ``flashinfer.autotune()``, tiles are measured for up to so many tokens; more use the tiles of so many.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None turns it on where the GPU has it.
    activation_type : Union[int, ActivationType]
        The activation between the products.
    swizzled_input_sf, use_fused_finalize : bool
        No effect: the sum over slots is always deterministic.
    profile_ids : Optional[Sequence[int]]
        Two numbers or None. No effect.
    workspace_buffer : Optional[torch.Tensor]
        1-D int8 or uint8 of at least :func:`cutlass_fused_moe_workspace_size` bytes, aligned to 128 bytes (64 on the
        CPU). Without it the call uses memory of its stream or allocates one.
    situ_beta, situ_linear_beta : Optional[torch.Tensor]
        ``(E_local,)`` float32, constants of Situ.

    Returns
    -------
    list[torch.Tensor]
        The output ``(T, H)``, then an int32 ``(1,)``, a float32 ``(E_local, T)`` and an int32 ``(E_local,)`` tensor,
        whose contents have no meaning; calls may return the same ones.

    Examples
    --------
    >>> x, ids = torch.randn(4, 64).bfloat16(), torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]], dtype=torch.int32)
    >>> w1, w2 = torch.randn(2, 64, 64).bfloat16(), torch.randn(2, 64, 32).bfloat16()
    >>> y = flashinfer.fused_moe.cutlass_fused_moe(x, ids, None, w1, w2, torch.bfloat16, None)[0]
    """
    if min_latency_mode or use_mxfp8_act_scaling or cluster_size != 1 or cluster_rank or input_sf is not None:
        refuse_modes(min_latency_mode, use_mxfp8_act_scaling, cluster_size, cluster_rank, input_sf is not None)
    if not (0 <= tp_rank < tp_size and 0 <= ep_rank < ep_size):
        refuse_ranks("cutlass_fused_moe", tp_size, tp_rank, ep_size, ep_rank)
    if profile_ids is not None:
        refuse_profiles(profile_ids)
    has_constants = not (swiglu_alpha is None and swiglu_beta is None and swiglu_limit is None)
    activation = _activation_number(activation_type, has_constants)
    format = format_of(
        fc1_expert_weights.dtype,
        use_deepseek_fp8_block_scale,
        use_w4_group_scaling,
        use_packed_weights,
        use_wfp4afp8_humming,
    )
    if format in _OF_SM90 and input.is_cuda:
        _refuse_format(format, input.device)
    tokens, experts = input.shape[0], fc1_expert_weights.shape[0]
    shape = (tokens, fc2_expert_weights.shape[-2])
    if output is None:
        if output_dtype not in _OUTPUTS:
            refuse_output(output, shape, output_dtype, input.device)
        output = new_empty(input, output_dtype, *shape)
    elif output.shape != shape or output.dtype is not output_dtype or output.device != input.device:
        refuse_output(output, shape, output_dtype, input.device)
    if not input.is_contiguous():
        input = input.contiguous()
    choice = LayerChoice(
        format,
        activation,
        ep_rank * experts,
        tp_rank == 0,
        enable_pdl,
        tune_max_num_tokens,
        sharing_ranks(ep_size, enable_alltoall, token_selected_experts),
    )
    scale1, scale2, factor1, factor2, quant1, quant2 = scales_of(format, quant_scales)  # * takes 0.3 us more
    fused_moe(
        output,
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc2_expert_weights,
        fc1_expert_biases,
        fc2_expert_biases,
        scale1,
        scale2,
        factor1,
        factor2,
        quant1,
        quant2,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        situ_beta,
        situ_linear_beta,
        workspace_buffer,
        *choice,
    )
    if not (is_traced() or compiler._is_compiling_flag):
        launch = launch_of(choice, input, experts, output_dtype)
        layer_launches.keep_call(launch, choice.text(input), locals())
    return [output, *unspecified(input, experts, tokens)]
