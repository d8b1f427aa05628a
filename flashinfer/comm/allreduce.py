# SPDX-License-Identifier: Apache-2.0
"""All-reduce fused with what follows it in a layer: residual, RMS norm, quantisation."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..trace.templates.comm import allreduce_fusion_trace
from .trtllm_ar import AllReduceFusionPattern as P
from .workspace import TRTLLMAllReduceFusionWorkspace
from .workspace_base import AllReduceFusionWorkspace

__all__ = ["allreduce_fusion"]

_OP = "allreduce_fusion"


class _Outputs(NamedTuple):
    """The outputs that a pattern writes after the residual."""

    norm: bool
    quant: bool = False
    dynamic: bool = False
    packed: bool = False


#: The patterns that have a kernel, but for 0.
_FUSED = {
    P.kARResidualRMSNorm: _Outputs(norm=True),
    P.kARResidualRMSNormFP8Quant: _Outputs(norm=False, quant=True),
    P.kARResidualRMSNormOutFP8Quant: _Outputs(norm=True, quant=True),
    P.kMoEReductionARResidualRMSNorm: _Outputs(norm=True),
    P.kMoEFinalizeARResidualRMSNorm: _Outputs(norm=True),
    P.kARResidualRMSNormPerTokenGroupFP8PackedQuant: _Outputs(norm=False, quant=True, packed=True),
    P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: _Outputs(norm=True, quant=True, packed=True),
    P.kARResidualRMSNormDynamicFP8Quant: _Outputs(norm=False, quant=True, dynamic=True),
    P.kARResidualRMSNormOutDynamicFP8Quant: _Outputs(norm=True, quant=True, dynamic=True),
}
_NAMES = {value: name for name, value in vars(P).items() if name.startswith("k")}


@flashinfer_api(trace=allreduce_fusion_trace)
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    norm_out: Optional[torch.Tensor] = None,
    quant_out: Optional[torch.Tensor] = None,
    scale_out: Optional[torch.Tensor] = None,
    residual_in: Optional[torch.Tensor] = None,
    rms_gamma: Optional[torch.Tensor] = None,
    rms_eps: float = 1e-6,
    scale_factor: Union[torch.Tensor, float, None] = None,
    layout_code: Optional[int] = None,
    use_oneshot: Optional[bool] = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: Optional[int] = None,
    moe_reduction_scale_input: Optional[torch.Tensor] = None,
    moe_reduction_active_experts_token_input: Optional[torch.Tensor] = None,
    moe_reduction_token_input: Optional[torch.Tensor] = None,
    expanded_idx_to_permuted_idx: Optional[torch.Tensor] = None,
    expert_scale_factor: Optional[torch.Tensor] = None,
    shared_expert_output: Optional[torch.Tensor] = None,
    block_quant_group_size: Optional[int] = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    r"""Sum ``input`` over the ranks of a workspace, and run what follows in a layer on the sum.

    ``S = round(sum of the inputs, in rank order)``; ``R = round(S + residual_in)``;
    ``N = round(R * rsqrt(mean(R^2) + rms_eps) * (weight_bias + rms_gamma))``; sums and products in float32, each
    ``round`` to the dtype of ``input``. Every rank gets the same bits. Every rank of the workspace calls with the same
    shape, dtype and pattern; an element of -0.0 counts as +0.0.

    Parameters
    ----------
    input : torch.Tensor
        ``(tokens, hidden)`` float16, bfloat16 or float32, contiguous; rows of a multiple of 16 bytes.
    workspace : AllReduceFusionWorkspace
        Of :func:`create_allreduce_fusion_workspace`.
    pattern : int
        A number of :class:`AllReduceFusionPattern`: 0, 1, 2, 4 or 6 to 11; 3 and 5 raise NotImplementedError.
    launch_with_pdl, trigger_completion_at_end : bool
        Programmatic dependent launch. With ``trigger_completion_at_end=False`` the next kernel may start early; its
        dependency wait still waits for the results.
    output : torch.Tensor, optional
        ``S``; pattern 0 allocates it when it is None.
    residual_in, residual_out, rms_gamma, norm_out
        Like ``input``, but ``rms_gamma`` ``(hidden,)``. Required by the patterns that use them. ``norm_out`` may be
        ``input``, and ``residual_out`` may be ``residual_in`` or ``input``.
    quant_out : torch.Tensor, optional
        float8_e4m3fn, the shape of ``input``: ``N / scale_factor`` (2 and 4), or ``N`` over the scale of its row.
    scale_out : torch.Tensor, optional
        ``(tokens, 1)`` float32: ``amax / 448`` of each row, patterns 10 and 11; of 8 and 9 see below.
    scale_factor : torch.Tensor or float, optional
        One float32, read by the kernel; 1 when None.
    use_oneshot : bool, optional
        Whether every rank sends its rows to every rank, or each sums and sends a part (two-shot, more tokens than
        ranks); default: whichever takes less time for the bytes and ranks. Results have the same values.
    fp32_acc, layout_code
        Accepted; sums are always float32.
    moe_reduction_device_num_experts : int, optional
        Of pattern 6; the number of rows in ``moe_reduction_scale_input`` where None.
    moe_reduction_scale_input, moe_reduction_active_experts_token_input, moe_reduction_token_input
        Pattern 6 sums ``sum_e scale[e, t] * active[e, t] + token[t]`` over the ranks: float32 ``(experts, tokens)``,
        rows ``(experts, tokens, hidden)`` and ``(tokens, hidden)`` like ``residual_in``. ``input`` is not read.
    expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output : torch.Tensor, optional
        Pattern 7 sums ``sum_k expert_scale[t, k] * input[index[t, k]] + shared[t]`` over the ranks: int32
        ``(tokens, top_k)``, negative for nothing; ``(tokens, top_k)`` float32 or like ``input``, 1 where None; optional
        ``(tokens, hidden)``.
    moe_finalize_backend : str
        ``"trtllm"``; ``"cake"`` needs a Blackwell GPU.
    block_quant_group_size : int, optional
        Patterns 8 and 9: columns that share a scale, 16, 32, 64 or 128. The scales are powers of two, of which
        ``scale_out`` int32 ``(tokens, ceil(groups / 4))`` with strides ``(1, round_up(tokens, 4))`` has the exponents.
    rms_eps, weight_bias : float
        Constants of the formula; Gemma has ``weight_bias=1``.

    Returns
    -------
    torch.Tensor
        ``norm_out`` if given, else ``quant_out``, else ``output``.

    Examples
    --------
    Two ranks that are threads of this process:

    >>> from flashinfer.comm.local_ranks import call_on_ranks
    >>> def work(comm):
    ...     group = {"world_size": comm.Get_size(), "rank": comm.Get_rank(), "comm_backend": comm, "device": "cpu"}
    ...     sizes = {"max_token_num": 4, "hidden_dim": 64, "dtype": torch.float32}
    ...     workspace = flashinfer.comm.create_allreduce_fusion_workspace(**group, **sizes)
    ...     total = flashinfer.comm.allreduce_fusion(torch.full((1, 64), 1.0 + comm.Get_rank()), workspace, 0)
    ...     workspace.destroy()
    ...     return total[0, 0].item()
    >>> call_on_ranks(2, work)
    [3.0, 3.0]
    """
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        raise TypeError(
            f"Unknown workspace type: {_OP}: workspace must be an AllReduceFusionWorkspace, got {type(workspace)}"
        )
    if moe_finalize_backend != "trtllm":
        raise ArgumentError(f"{_OP}: moe_finalize_backend must be 'trtllm' on this GPU, got {moe_finalize_backend!r}")
    if input.device != workspace.device:
        raise ArgumentError(f"{_OP}: input must be on {workspace.device} (where workspace is), got {input.device}")
    if (input.dtype is torch.float32) is not workspace.metadata["use_fp32_lamport"]:
        made = "float32" if workspace.metadata["use_fp32_lamport"] else "float16 and bfloat16"
        raise ArgumentError(f"{_OP}: input must be of the dtypes of workspace ({made}), got {input.dtype}")
    given: dict[str, Any] = {"launch_with_pdl": launch_with_pdl, "trigger_early": not trigger_completion_at_end}
    if pattern == P.kAllReduce:
        output = torch.empty_like(input) if output is None else output
        given["is_two_shot"] = _is_two_shot(workspace, input, use_oneshot)
        workspace.exchange(input, pattern, output=output, **given)
        return output
    writes = _FUSED.get(pattern)
    if writes is None:
        raise _refused(pattern)
    if pattern in (P.kMoEReductionARResidualRMSNorm, P.kMoEFinalizeARResidualRMSNorm):
        rows, moe = _moe_rows(
            pattern,
            input,
            {
                "moe_reduction_scale_input": moe_reduction_scale_input,
                "moe_reduction_active_experts_token_input": moe_reduction_active_experts_token_input,
                "moe_reduction_token_input": moe_reduction_token_input,
            },
            expanded_idx_to_permuted_idx,
            expert_scale_factor,
            shared_expert_output,
        )
        given |= moe
        if pattern == P.kMoEFinalizeARResidualRMSNorm and residual_in is not None:
            norm_out = torch.empty_like(residual_in) if norm_out is None else norm_out
            residual_out = torch.empty_like(residual_in) if residual_out is None else residual_out
        input = rows
    needed = {"residual_in": residual_in, "residual_out": residual_out, "rms_gamma": rms_gamma}
    needed |= {"norm_out": norm_out} if writes.norm else {}
    needed |= {"quant_out": quant_out} if writes.quant else {}
    needed |= {"scale_out": scale_out} if writes.dynamic or writes.packed else {}
    for name, tensor in needed.items():
        if tensor is None:
            raise ArgumentError(f"{_OP}: {name} is required for pattern {pattern} ({_NAMES[pattern]}), got None")
    if writes.packed:
        given |= {"packed_out": needed.pop("scale_out"), "group": _group(input, scale_out, block_quant_group_size)}
    if writes.quant and not writes.dynamic and scale_factor is not None:
        is_tensor = isinstance(scale_factor, torch.Tensor)
        given |= {"scale": scale_factor} if is_tensor else {"scale_value": float(scale_factor)}
    assert residual_in is not None
    given["is_two_shot"] = _is_two_shot(workspace, residual_in, use_oneshot)
    workspace.exchange(
        input,
        pattern,
        output=output,
        rms_eps=rms_eps,
        weight_bias=weight_bias,
        **needed,
        **given,
    )
    result = norm_out if writes.norm else quant_out
    assert result is not None
    return result


#: Most bytes of a message that is pushed once, by number of ranks: from there on two steps take less time (the model:
#: docs/communication.md). Between these numbers, that of the next larger one counts.
_ONE_SHOT_BYTES = {2: 1 << 62, 4: 2 << 20, 8: 400 << 10, 16: 128 << 10}


def _is_two_shot(workspace: TRTLLMAllReduceFusionWorkspace, rows: torch.Tensor, use_oneshot: Optional[bool]) -> bool:
    """Return whether each rank sums a part. Depends on what all ranks agree on, and on nothing else."""
    world = workspace.world_size
    if use_oneshot is not None:
        if not use_oneshot and rows.shape[0] <= world:
            raise AssertionError(
                f"{_OP}: sequence length should be larger than tp_size: input must have more than {world} tokens with "
                f"use_oneshot=False, got {rows.shape[0]}"
            )
        return not use_oneshot
    limit = next((most for ranks, most in _ONE_SHOT_BYTES.items() if world <= ranks), 0)
    return rows.numel() * rows.element_size() > limit


def _moe_rows(
    pattern: int,
    input: torch.Tensor,
    reduction: dict[str, Optional[torch.Tensor]],
    index: Optional[torch.Tensor],
    weights: Optional[torch.Tensor],
    shared: Optional[torch.Tensor],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the rows whose weighted sums are pushed, as a matrix, and how they are summed."""
    if pattern == P.kMoEFinalizeARResidualRMSNorm:
        if index is None:
            raise ArgumentError(f"{_OP}: expanded_idx_to_permuted_idx is required for pattern 7, got None")
        return input, {"index": index, "weights": weights, "add": shared}
    for name, tensor in reduction.items():
        if tensor is None:
            raise ArgumentError(f"{_OP}: {name} is required for pattern 6, got None")
    scale, active, token = reduction.values()
    assert active is not None
    return active.reshape(-1, active.shape[-1]), {"weights": scale, "add": token}


def _group(input: torch.Tensor, scale_out: Optional[torch.Tensor], group: Optional[int]) -> int:
    """Return the columns that share a scale, after checks of the packed scales."""
    if group is None:
        raise ArgumentError(f"{_OP}: block_quant_group_size is required for patterns 8 and 9, got None")
    if group <= 0:
        raise ArgumentError(f"{_OP}: block_quant_group_size must be > 0, got {group}")
    tokens, hidden = input.shape
    if hidden % group:
        raise ArgumentError(f"{_OP}: input.shape[1] must be divisible by block_quant_group_size {group}, got {hidden}")
    assert scale_out is not None
    shape, stride = (tokens, -(-hidden // group // 4)), (1, -(-tokens // 4) * 4)
    if scale_out.dtype != torch.int32:
        raise ArgumentError(f"{_OP}: scale_out dtype must be torch.int32, got {scale_out.dtype}")
    if tuple(scale_out.shape) != shape:
        raise ArgumentError(f"{_OP}: scale_out shape must be {shape}, got {tuple(scale_out.shape)}")
    if tokens > 0 and scale_out.stride() != stride:
        raise ArgumentError(f"{_OP}: scale_out stride must be {stride}, got {scale_out.stride()}")
    return group


def _refused(pattern: int) -> Exception:
    """Return the exception for a pattern without a kernel."""
    if pattern == P.kMoEFinalizeARResidualRMSNormFP8Quant:
        return ArgumentError(
            f"{_OP}: pattern 12 requires an MNNVLCuteDSLAllReduceFusionWorkspace (Blackwell), got another workspace"
        )
    if pattern not in _NAMES:
        return ArgumentError(f"{_OP}: pattern must be a number of AllReduceFusionPattern (0 to 12), got {pattern!r}")
    served = ", ".join(map(str, [P.kAllReduce, *sorted(_FUSED)]))
    return NotImplementedError(
        f"{_OP}: pattern must be one of {served} in this release, got {pattern} ({_NAMES[pattern]})"
    )
