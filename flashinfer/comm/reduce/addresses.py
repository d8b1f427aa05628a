# SPDX-License-Identifier: Apache-2.0
"""Older calls of the fused all-reduce, whose workspace is a tensor of addresses: the same kernels behind them.

A tensor of addresses belongs to one workspace object of this process; memory that others made cannot be used.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional, Sequence, Union

import torch

from ..._runtime.errors import ArgumentError
from ..allreduce import allreduce_fusion
from .arguments import fp4_outputs
from .types import AllReduceFusionPattern as P
from .workspace import _HEAD_BYTES, TRTLLMAllReduceFusionWorkspace

__all__ = [
    "check_trtllm_allreduce_fusion_workspace_metadata",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]

_FP4 = (P.kARResidualRMSNormFP4Quant, P.kARResidualRMSNormOutFP4Quant)
_METADATA = ("tp_rank", "tp_size", "max_token_num", "hidden_dim", "use_fp32_lamport")
#: Workspaces by the address of their tensor of addresses, with that tensor and the words it points to.
_spaces: dict[int, tuple[TRTLLMAllReduceFusionWorkspace, torch.Tensor, torch.Tensor]] = {}


def _warn(name: str) -> None:
    warnings.warn(f"{name} is deprecated; use create_allreduce_fusion_workspace", DeprecationWarning, stacklevel=3)


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Optional[Any] = None,
    create_metadata: bool = False,
    comm_backend: Optional[Any] = None,
    use_symm_dev_mem: bool = False,
    *,
    device: Union[str, torch.device, None] = None,
) -> tuple[Any, ...]:
    """Return addresses of all ranks (data, flags, slots), the tensor that calls take, and what else is asked for."""
    op = "trtllm_create_ipc_workspace_for_all_reduce_fusion"
    _warn(op)
    if use_symm_dev_mem and not create_metadata:
        raise ArgumentError(f"{op}: create_metadata must be True with use_symm_dev_mem, got False")
    dtype = torch.float32 if use_fp32_lamport else torch.float16
    made = TRTLLMAllReduceFusionWorkspace(
        tp_size, tp_rank, max_token_num, hidden_dim, dtype, comm_backend, group, device=device
    )
    flags = list(made._memory.ptrs)
    data = [ptr + _HEAD_BYTES for ptr in flags]
    control = torch.tensor(
        [0, 0, 0, min(made.metadata["lamport_comm_size"], 2**31 - 1), 0], dtype=torch.int32, device=made.device
    )
    table = torch.tensor([*data, *flags, *data, control.data_ptr()], dtype=torch.int64, device=made.device)
    _spaces[table.data_ptr()] = (made, table, control)
    handles = [data, flags, list(data)]
    more: list[Any] = [[made._memory]] if use_symm_dev_mem else []
    if create_metadata:
        more.append({**made.metadata, **({"control_flag_ptr": control.data_ptr()} if use_symm_dev_mem else {})})
    return (handles, table, *more)


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: Sequence[Sequence[int]], group: Optional[Any] = None
) -> None:
    """Give the memory behind addresses back, those that the creation returned; not collective."""
    _warn("trtllm_destroy_ipc_workspace_for_all_reduce_fusion")
    flags = tuple(workspace[1])
    for key, (made, *_) in list(_spaces.items()):
        # Ranks of one process have the same addresses, and each gives one back: the thread that takes an entry owns it.
        if made._memory.ptrs == flags and _spaces.pop(key, None) is not None:
            made.destroy()
            return


trtllm_destroy_ipc_workspace_for_all_reduce = trtllm_destroy_ipc_workspace_for_all_reduce_fusion


def check_trtllm_allreduce_fusion_workspace_metadata(
    token_num: int, hidden_dim: int, world_size: int, dtype: torch.dtype, metadata: dict[str, Any]
) -> None:
    """Raise ValueError if a workspace of this description does not serve a call."""
    missing = [name for name in _METADATA if name not in metadata]
    if missing:
        raise ArgumentError(f"Workspace metadata validation failed: metadata must have {', '.join(missing)}, got none")
    wrong = []
    if metadata["tp_size"] != world_size:
        wrong.append(f"world_size must be {metadata['tp_size']}, got {world_size}")
    if token_num * hidden_dim > metadata["max_token_num"] * metadata["hidden_dim"]:
        most = f"{metadata['max_token_num']} x {metadata['hidden_dim']}"
        wrong.append(f"token_num x hidden_dim must be at most {most}, got {token_num} x {hidden_dim}")
    if (dtype == torch.float32) != metadata["use_fp32_lamport"]:
        wrong.append(f"dtype must be float32 exactly with use_fp32_lamport, got {dtype}")
    if wrong:
        raise ArgumentError(f"Workspace validation failed: {'; '.join(wrong)}")


def _space(op: str, workspace_ptrs: torch.Tensor, world_size: int, world_rank: int) -> TRTLLMAllReduceFusionWorkspace:
    found = _spaces.get(workspace_ptrs.data_ptr())
    if found is None:
        raise RuntimeError(
            f"{op}: workspace_ptrs must be the tensor of trtllm_create_ipc_workspace_for_all_reduce_fusion in this "
            "process, and not destroyed, got another one"
        )
    made = found[0]
    if (made.world_size, made.rank) != (world_size, world_rank):
        raise ArgumentError(
            f"{op}: world_size and world_rank must be those of the workspace ({made.world_size} and {made.rank}), got "
            f"{world_size} and {world_rank}"
        )
    return made


def _rows(x: Optional[torch.Tensor], tokens: int, hidden: int) -> Optional[torch.Tensor]:
    """Return a flat tensor as rows."""
    return None if x is None else x.view(tokens, hidden)


def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: Optional[bool],
    allreduce_out: Optional[torch.Tensor],
    residual_in: Optional[torch.Tensor],
    residual_out: Optional[torch.Tensor],
    norm_out: Optional[torch.Tensor],
    quant_out: Optional[torch.Tensor],
    scale_out: Optional[torch.Tensor],
    rms_gamma: Optional[torch.Tensor],
    rms_eps: Optional[float],
    scale_factor: Union[torch.Tensor, float, None],
    layout_code: Optional[int],
    metadata: Optional[dict[str, Any]] = None,
    block_quant_group_size: Optional[int] = None,
    weight_bias: Optional[float] = None,
) -> None:
    """Run :func:`allreduce_fusion` on flat tensors of ``token_num * hidden_dim`` elements."""
    made = _space("trtllm_allreduce_fusion", workspace_ptrs, world_size, world_rank)
    if metadata is not None:
        check_trtllm_allreduce_fusion_workspace_metadata(
            token_num, hidden_dim, world_size, allreduce_in.dtype, metadata
        )
    sizes = (token_num, hidden_dim)
    allreduce_fusion(
        allreduce_in.view(sizes),
        made,
        pattern_code,
        launch_with_pdl,
        trigger_completion_at_end,
        _rows(allreduce_out, *sizes),
        _rows(residual_out, *sizes),
        _rows(norm_out, *sizes),
        quant_out if pattern_code in _FP4 else _rows(quant_out, *sizes),
        scale_out,
        _rows(residual_in, *sizes),
        rms_gamma,
        1e-6 if rms_eps is None else rms_eps,
        scale_factor,
        layout_code,
        use_oneshot,
        fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=weight_bias or 0.0,
    )


def _check_backend(op: str, backend: str) -> None:
    if backend != "trtllm":
        raise ArgumentError(f"{op}: backend must be 'trtllm' on this GPU ('cake' needs Blackwell), got {backend!r}")


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    scale_factor: Optional[float],
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: torch.Tensor,
    moe_reduction_active_experts_token_input: torch.Tensor,
    moe_reduction_token_input: torch.Tensor,
    layout_code: Optional[int],
    moe_allreduce_out: Optional[torch.Tensor],
    residual_out: Optional[torch.Tensor],
    norm_out: Optional[torch.Tensor],
    quant_out: Optional[torch.Tensor],
    scale_out: Optional[torch.Tensor],
    weight_bias: Optional[float] = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Run pattern 6 of :func:`allreduce_fusion`: sums over experts and ranks, residual and norm; FP4 if asked."""
    op = "trtllm_moe_allreduce_fusion"
    _check_backend(op, backend)
    made, sizes = _space(op, workspace_ptrs, world_size, world_rank), (token_num, hidden_dim)
    residual = residual_in.view(sizes)
    experts = moe_reduction_device_num_experts
    allreduce_fusion(
        residual,
        made,
        P.kMoEReductionARResidualRMSNorm,
        launch_with_pdl,
        output=_rows(moe_allreduce_out, *sizes),
        residual_out=torch.empty_like(residual) if residual_out is None else residual_out.view(sizes),
        norm_out=torch.empty_like(residual) if norm_out is None else norm_out.view(sizes),
        quant_out=quant_out,
        scale_out=scale_out,
        scale_factor=scale_factor,
        layout_code=layout_code,
        residual_in=residual,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        moe_reduction_scale_input=moe_reduction_scale_input.view(-1)[: experts * token_num].view(experts, token_num),
        moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input.view(-1, hidden_dim)[
            : experts * token_num
        ],
        moe_reduction_token_input=moe_reduction_token_input.view(sizes),
        weight_bias=weight_bias or 0.0,
    )


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: torch.Tensor,
    residual_in: torch.Tensor,
    norm_weight: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    norm_out: Optional[torch.Tensor],
    residual_out: Optional[torch.Tensor],
    quant_out: Optional[torch.Tensor],
    scale_out: Optional[torch.Tensor],
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: Optional[torch.Tensor],
    expert_scale_factor: Optional[torch.Tensor],
    routed_scaling_factor: Optional[float],
    weight_bias: Optional[float] = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Run pattern 7 of :func:`allreduce_fusion`, the sum over experts times ``routed_scaling_factor``; FP4 if asked."""
    op = "trtllm_moe_finalize_allreduce_fusion"
    _check_backend(op, backend)
    made = _space(op, workspace_ptrs, world_size, world_rank)
    fp4 = {} if quant_out is None else fp4_outputs(residual_in, quant_out, scale_out, None)
    made.exchange(
        allreduce_in,
        P.kMoEFinalizeARResidualRMSNorm,
        residual_in=residual_in,
        residual_out=torch.empty_like(residual_in) if residual_out is None else residual_out,
        norm_out=torch.empty_like(residual_in) if norm_out is None else norm_out,
        rms_gamma=norm_weight,
        rms_eps=eps,
        weight_bias=weight_bias or 0.0,
        index=expanded_idx_to_permuted_idx,
        weights=expert_scale_factor,
        add=shared_expert_output,
        factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        launch_with_pdl=launch_with_pdl,
        **fp4,
    )


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: torch.dtype) -> None:
    """Fill ``size`` bytes of device memory with -0.0 of a dtype."""
    from ..memory.cuda import tensor_at

    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentError(f"trtllm_lamport_initialize: dtype must be float16, bfloat16 or float32, got {dtype}")
    tensor_at(buffer_ptr, size, torch.device("cuda", torch.cuda.current_device())).view(dtype).fill_(-0.0)


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: torch.dtype
) -> None:
    """Fill three buffers with -0.0 of a dtype."""
    for ptr in (buffer_0_ptr, buffer_1_ptr, buffer_2_ptr):
        trtllm_lamport_initialize(ptr, size, dtype)
