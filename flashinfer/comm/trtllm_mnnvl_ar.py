# SPDX-License-Identifier: Apache-2.0
"""Calls of the all-reduce by the names of its multicast form. They take any workspace of this package."""

from __future__ import annotations

import enum
import warnings
from typing import Any, NoReturn, Optional

import torch

from .._runtime.errors import ArgumentError
from .allreduce import allreduce_fusion
from .comm_backend import MpiComm
from .reduce.types import AllReduceFusionPattern as P
from .reduce.types import QuantizationSFLayout
from .reduce.workspace import _MNNVL_ONE_SHOT_BYTES, MNNVLAllReduceFusionWorkspace, get_allreduce_module
from .workspace_base import AllReduceFusionWorkspace

__all__ = [
    "MNNVLAllReduceFusionWorkspace",
    "MNNVLAllreduceFusionStrategy",
    "MNNVLQuantType",
    "get_allreduce_mnnvl_workspace",
    "get_trtllm_mnnvl_comm_module",
    "mpi_barrier",
    "trtllm_mnnvl_all_reduce",
    "trtllm_mnnvl_allreduce",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant",
    "trtllm_mnnvl_fused_allreduce_rmsnorm",
]


class MNNVLAllreduceFusionStrategy(enum.Enum):
    """Number of steps in which the data of a call travel."""

    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99

    @staticmethod
    def select_strategy(
        tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype
    ) -> MNNVLAllreduceFusionStrategy:
        """Return the strategy of a call that does not name one."""
        is_small = num_tokens * hidden_dim * tp_size * dtype.itemsize <= _MNNVL_ONE_SHOT_BYTES
        return MNNVLAllreduceFusionStrategy.ONESHOT if is_small else MNNVLAllreduceFusionStrategy.TWOSHOT


class MNNVLQuantType:
    """Quantisation after the norm."""

    NONE = 0
    FP8 = 1
    NVFP4 = 2
    DYNAMIC_FP8 = 3


def mpi_barrier() -> None:
    """Wait for all ranks of MPI, or of the default process group where there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    else:
        MpiComm().Barrier()


def _one_shot(strategy: MNNVLAllreduceFusionStrategy, workspace: AllReduceFusionWorkspace, rows: torch.Tensor) -> Any:
    """Return what ``use_oneshot`` of the call is; two steps need more tokens than ranks."""
    if strategy is MNNVLAllreduceFusionStrategy.AUTO:
        return None
    return strategy is MNNVLAllreduceFusionStrategy.ONESHOT or rows.shape[0] <= workspace.world_size


def _epsilon(epsilon: Optional[float], dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if epsilon is None else epsilon


def trtllm_mnnvl_allreduce(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    launch_with_pdl: bool,
    output: Optional[torch.Tensor] = None,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
) -> torch.Tensor:
    """Return the sum of ``input`` over the ranks: pattern 0 of :func:`allreduce_fusion`."""
    one_shot = _one_shot(strategy, workspace, input)
    return allreduce_fusion(input, workspace, P.kAllReduce, launch_with_pdl, output=output, use_oneshot=one_shot)


def trtllm_mnnvl_fused_allreduce_add_rmsnorm(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    epsilon: Optional[float] = None,
    output: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm and residual of pattern 1; ``epsilon=None`` is the epsilon of the dtype."""
    norm = torch.empty_like(input) if output is None else output
    residual = torch.empty_like(input) if residual_out is None else residual_out
    allreduce_fusion(
        input,
        workspace,
        P.kARResidualRMSNorm,
        launch_with_pdl,
        residual_out=residual,
        norm_out=norm,
        residual_in=residual_in,
        rms_gamma=gamma,
        rms_eps=_epsilon(epsilon, input.dtype),
        use_oneshot=_one_shot(strategy, workspace, input),
        weight_bias=weight_bias,
    )
    return norm, residual


def trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    epsilon: Optional[float] = None,
    output: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    quant_out: Optional[torch.Tensor] = None,
    scale_out: Optional[torch.Tensor] = None,
    output_scale: Any = None,
    layout_code: int = QuantizationSFLayout.SWIZZLED_128x4,
    quant_type: int = MNNVLQuantType.NONE,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, Optional[torch.Tensor]]:
    """Return codes, scales, residual and norm (``output``, None if it is not given) of a quantising pattern."""
    op, tokens, hidden = "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant", *input.shape
    if layout_code == QuantizationSFLayout.SWIZZLED_8x4:
        raise ArgumentError(f"{op}: layout_code must be SWIZZLED_128x4 or LINEAR, not SWIZZLED_8x4, got {layout_code}")
    patterns = {
        MNNVLQuantType.FP8: (P.kARResidualRMSNormFP8Quant, P.kARResidualRMSNormOutFP8Quant),
        MNNVLQuantType.NVFP4: (P.kARResidualRMSNormFP4Quant, P.kARResidualRMSNormOutFP4Quant),
        MNNVLQuantType.DYNAMIC_FP8: (P.kARResidualRMSNormDynamicFP8Quant, P.kARResidualRMSNormOutDynamicFP8Quant),
    }.get(quant_type)
    if patterns is None:
        raise ArgumentError(f"{op}: quant_type must be FP8, NVFP4 or DYNAMIC_FP8 (1, 2, 3), got {quant_type!r}")
    if quant_out is None:
        is_fp4 = quant_type == MNNVLQuantType.NVFP4
        quant_out = input.new_empty(tokens, hidden // 2, dtype=torch.uint8) if is_fp4 else None
        quant_out = torch.empty_like(input, dtype=torch.float8_e4m3fn) if quant_out is None else quant_out
    if scale_out is None and quant_type == MNNVLQuantType.DYNAMIC_FP8:
        scale_out = input.new_empty(tokens, 1, dtype=torch.float32)
    if scale_out is None and quant_type == MNNVLQuantType.NVFP4:
        columns = hidden // 16
        swizzled = -(-tokens // 128) * 128 * (-(-columns // 4) * 4)
        count = swizzled if layout_code == QuantizationSFLayout.SWIZZLED_128x4 else tokens * columns
        scale_out = input.new_empty(count, dtype=torch.uint8)
    residual = torch.empty_like(input) if residual_out is None else residual_out
    allreduce_fusion(
        input,
        workspace,
        patterns[output is not None],
        launch_with_pdl,
        residual_out=residual,
        norm_out=output,
        quant_out=quant_out,
        scale_out=scale_out,
        residual_in=residual_in,
        rms_gamma=gamma,
        rms_eps=_epsilon(epsilon, input.dtype),
        scale_factor=output_scale,
        layout_code=layout_code,
        use_oneshot=_one_shot(strategy, workspace, input),
        weight_bias=weight_bias,
    )
    return quant_out, scale_out, residual, output


def _no_multicast(name: str) -> NoReturn:
    warnings.warn(f"{name} is deprecated; use create_allreduce_fusion_workspace", DeprecationWarning, stacklevel=3)
    raise RuntimeError(
        f"{name}: needs multicast memory, which this package does not set up; use "
        "create_allreduce_fusion_workspace(backend='trtllm') and allreduce_fusion"
    )


def get_allreduce_mnnvl_workspace(
    mapping: Any,
    dtype: torch.dtype,
    comm_backend_for_handle_transfer: Optional[Any] = None,
    buffer_size_in_bytes: Optional[int] = None,
) -> NoReturn:
    """Raise RuntimeError: the workspace would be multicast memory."""
    _no_multicast("get_allreduce_mnnvl_workspace")


def trtllm_mnnvl_all_reduce(
    inp: torch.Tensor,
    multicast_buffer_ptr: int,
    buffer_ptrs_dev: int,
    buffer_M: int,
    buffer_flags_mnnvl: torch.Tensor,
    nranks: int,
    rank: int,
    wait_for_results: bool,
    launch_with_pdl: bool,
    out: Optional[torch.Tensor] = None,
) -> NoReturn:
    """Raise RuntimeError: the call takes a multicast address."""
    _no_multicast("trtllm_mnnvl_all_reduce")


def trtllm_mnnvl_fused_allreduce_rmsnorm(
    prenorm_output: torch.Tensor,
    normed_output: torch.Tensor,
    shard_input: torch.Tensor,
    multicast_buffer_ptr: int,
    buffer_ptrs_dev: int,
    unicast_ptr: int,
    buffer_M: int,
    buffer_flags_mnnvl: torch.Tensor,
    nranks: int,
    rank: int,
    gamma: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor,
    launch_with_pdl: bool,
) -> NoReturn:
    """Raise RuntimeError: the call takes a multicast address."""
    _no_multicast("trtllm_mnnvl_fused_allreduce_rmsnorm")


def get_trtllm_mnnvl_comm_module() -> Any:
    """Return the module of the all-reduce for CUDA."""
    return get_allreduce_module("cuda")
