# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce in graphs of ``torch.compile`` and ``torch.export``: one op, to which a workspace is a name.

A graph may come from a cache, in a process where nobody has created the workspace: the op says so.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from ..._runtime.torch_ops import called, register_custom_op
from .call import run
from .names import workspace_named
from .types import AllReduceFusionPattern as P

__all__ = ["launch_traced"]


@register_custom_op(
    "flashinfer::allreduce_fusion", mutates_args=("output", "residual_out", "norm_out", "quant_out", "scale_out")
)
@called("allreduce_fusion")
def _allreduce_fusion(
    input: torch.Tensor,
    workspace: str,
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
    scale: Optional[torch.Tensor],
    scale_value: float,
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
) -> None:
    found = workspace_named(workspace)
    if found is None:
        raise RuntimeError(
            f"allreduce_fusion: this compiled program needs the workspace {workspace!r}, got a process where it is not "
            "created, or is destroyed: call create_allreduce_fusion_workspace as the process that compiled it did"
        )
    more = (moe_scale, moe_active, moe_token, expanded_idx, expert_scale, shared)
    run(
        input,
        found,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        output,
        residual_out,
        norm_out,
        quant_out,
        scale_out,
        residual_in,
        rms_gamma,
        rms_eps,
        scale_value if scale is None else scale,
        layout_code,
        use_oneshot,
        *more,
        group,
        weight_bias,
    )


def launch_traced(
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
    *more: Any,
) -> Any:
    """Put the op into the graph that is being traced; return what the call returns. Checks run with the graph."""
    if pattern == P.kAllReduce:
        output = torch.empty_like(input) if output is None else output
    elif pattern == P.kMoEFinalizeARResidualRMSNorm and residual_in is not None:
        norm_out = torch.empty_like(residual_in) if norm_out is None else norm_out
        residual_out = torch.empty_like(residual_in) if residual_out is None else residual_out
    scale = scale_factor if isinstance(scale_factor, torch.Tensor) else None
    value = 1.0 if scale_factor is None or scale is not None else float(scale_factor)
    _allreduce_fusion(
        input,
        workspace.name,
        pattern,
        launch_with_pdl,
        trigger_completion_at_end,
        output,
        residual_out,
        norm_out,
        quant_out,
        scale_out,
        residual_in,
        rms_gamma,
        rms_eps,
        scale,
        value,
        *more,
    )
    if pattern == P.kAllReduce:
        return output
    return norm_out if norm_out is not None else quant_out
