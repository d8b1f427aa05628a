# SPDX-License-Identifier: Apache-2.0
"""One call of the fused all-reduce: what a pattern needs and writes, and the launch."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch

from ..._runtime.errors import ArgumentError
from .arguments import fp4_outputs, group_of, moe_rows
from .types import AllReduceFusionPattern as P
from .workspace import TRTLLMAllReduceFusionWorkspace

__all__ = ["run"]

_OP = "allreduce_fusion"


class _Outputs(NamedTuple):
    """The outputs that a pattern writes after the residual."""

    norm: bool
    quant: bool = False
    dynamic: bool = False
    packed: bool = False
    fp4: bool = False


#: The patterns that have a kernel, but for 0.
_FUSED = {
    P.kARResidualRMSNorm: _Outputs(norm=True),
    P.kARResidualRMSNormFP8Quant: _Outputs(norm=False, quant=True),
    P.kARResidualRMSNormFP4Quant: _Outputs(norm=False, quant=True, fp4=True),
    P.kARResidualRMSNormOutFP8Quant: _Outputs(norm=True, quant=True),
    P.kARResidualRMSNormOutFP4Quant: _Outputs(norm=True, quant=True, fp4=True),
    P.kMoEReductionARResidualRMSNorm: _Outputs(norm=True),
    P.kMoEFinalizeARResidualRMSNorm: _Outputs(norm=True),
    P.kARResidualRMSNormPerTokenGroupFP8PackedQuant: _Outputs(norm=False, quant=True, packed=True),
    P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: _Outputs(norm=True, quant=True, packed=True),
    P.kARResidualRMSNormDynamicFP8Quant: _Outputs(norm=False, quant=True, dynamic=True),
    P.kARResidualRMSNormOutDynamicFP8Quant: _Outputs(norm=True, quant=True, dynamic=True),
}
#: Patterns that sum over experts before the ranks. With ``quant_out`` they write FP4 as well.
_SUMS = (P.kMoEReductionARResidualRMSNorm, P.kMoEFinalizeARResidualRMSNorm)
_NAMES = {value: name for name, value in vars(P).items() if name.startswith("k")}


def run(
    input: torch.Tensor,
    workspace: Any,
    pattern: int,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    output: Optional[torch.Tensor],
    residual_out: Optional[torch.Tensor],
    norm_out: Optional[torch.Tensor],
    quant_out: Optional[torch.Tensor],
    scale_out: Optional[torch.Tensor],
    residual_in: Optional[torch.Tensor],
    rms_gamma: Optional[torch.Tensor],
    rms_eps: float,
    scale_factor: Union[torch.Tensor, float, None],
    layout_code: Optional[int],
    use_oneshot: Optional[bool],
    moe_scale: Optional[torch.Tensor],
    moe_active: Optional[torch.Tensor],
    moe_token: Optional[torch.Tensor],
    expanded_idx: Optional[torch.Tensor],
    expert_scale: Optional[torch.Tensor],
    shared: Optional[torch.Tensor],
    group: Optional[int],
    weight_bias: float,
) -> torch.Tensor:
    """Check the arguments of :func:`~.allreduce.allreduce_fusion` and launch; return what it returns."""
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        raise TypeError(
            f"Unknown workspace type: {_OP}: workspace must be an AllReduceFusionWorkspace, got {type(workspace)}"
        )
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
    if pattern in _SUMS:
        rows, moe = moe_rows(
            pattern,
            input,
            {
                "moe_reduction_scale_input": moe_scale,
                "moe_reduction_active_experts_token_input": moe_active,
                "moe_reduction_token_input": moe_token,
            },
            *(expanded_idx, expert_scale, shared),
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
    is_fp4 = writes.fp4 or (pattern in _SUMS and quant_out is not None)
    if is_fp4:
        assert residual_in is not None and quant_out is not None
        needed.pop("quant_out", None)
        given |= fp4_outputs(residual_in, quant_out, scale_out, layout_code)
    if writes.packed:
        given |= {"packed_out": needed.pop("scale_out"), "group": group_of(input, scale_out, group)}
    if (is_fp4 or (writes.quant and not writes.dynamic)) and scale_factor is not None:
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


def _refused(pattern: int) -> Exception:
    """Return the exception for a pattern without a kernel."""
    if pattern == P.kMoEFinalizeARResidualRMSNormFP8Quant:
        return ArgumentError(
            f"{_OP}: pattern 12 requires an MNNVLCuteDSLAllReduceFusionWorkspace (Blackwell), got another workspace"
        )
    return ArgumentError(f"{_OP}: pattern must be a number of AllReduceFusionPattern (0 to 12), got {pattern!r}")
