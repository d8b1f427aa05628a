# SPDX-License-Identifier: Apache-2.0
"""Names of communication that programs import and that need other GPUs or packages: each raises when it is called."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from .unsupported import needs

__all__ = [
    "CakeFusedNormCombineWorkspace",
    "MNNVLCuteDSLAllGatherDualNormWorkspace",
    "MNNVLCuteDSLAllGatherNormQuantWorkspace",
    "MNNVLCuteDSLAllReduceFusionWorkspace",
    "MixedCommHandler",
    "MixedCommMode",
    "MixedCommOp",
    "NVSHMEMAllReduce",
    "ParallelInfo",
    "PcieIpcAllGatherWorkspace",
    "PcieIpcReduceScatterWorkspace",
    "all_gather_gated_residual_next_rmsnorm",
    "cake_fused_norm_combine",
    "cake_fused_norm_combine_create_workspace",
    "cake_fused_norm_combine_destroy_workspace",
    "cake_fused_norm_combine_workspace_bytes",
    "dispose_ulysses_a2a",
    "get_mixed_comm_module",
    "get_ulysses_a2a_module",
    "init_tp_moe_finalize_rmsnorm",
    "init_ulysses_a2a",
    "is_mnnvl_cutedsl_supported",
    "run_mixed_comm",
    "supports_tp_moe_finalize_rmsnorm",
    "tp_moe_finalize_rmsnorm",
    "ulysses_a2a",
]

_GPU = "compute capability 10.0 or 10.3 (Blackwell) and kernels for it, which this package does not have"
_NVSHMEM = "NVSHMEM (the package nvshmem4py), to which this package has no adapter"

MNNVLCuteDSLAllGatherDualNormWorkspace = needs("MNNVLCuteDSLAllGatherDualNormWorkspace", _GPU)
MNNVLCuteDSLAllGatherNormQuantWorkspace = needs("MNNVLCuteDSLAllGatherNormQuantWorkspace", _GPU)
MNNVLCuteDSLAllReduceFusionWorkspace = needs("MNNVLCuteDSLAllReduceFusionWorkspace", _GPU)
all_gather_gated_residual_next_rmsnorm = needs("all_gather_gated_residual_next_rmsnorm", _GPU)
MixedCommHandler = needs("MixedCommHandler", _NVSHMEM)
run_mixed_comm = needs("run_mixed_comm", _NVSHMEM)
NVSHMEMAllReduce = needs("NVSHMEMAllReduce", _NVSHMEM)
get_mixed_comm_module = needs("get_mixed_comm_module", _NVSHMEM)


class MixedCommOp(enum.Enum):
    """Collectives over several hosts, by their published numbers."""

    ALLREDUCE = 0
    ALLGATHER = 1
    REDUCESCATTER = 2
    ALLREDUCE_ALLGATHER = 3
    REDUCESCATTER_ALLREDUCE = 4


class MixedCommMode(enum.Enum):
    """Ways to run them, by their published numbers."""

    FUSED_OPT_WAITS_MC = 0
    FUSED_OPT_WAITS_UC = 1
    FUSED_OPT_BYTES1_MC = 2
    FUSED_OPT_BYTES1_UC = 3
    FUSED_OPT_BYTES2_MC = 4
    FUSED_OPT_BYTES2_UC = 5
    NCCL_ONE = 6
    NCCL_TP_DP = 7
    AUTOTUNE = 8


@dataclass
class ParallelInfo:
    """Ranks of a rank's host, and hosts."""

    world_rank: int
    world_size: int
    local_rank: int
    local_size: int
    inter_rank: int
    inter_size: int
    local_tp_size: int
    local_dp_size: int
    inter_tp_size: int
    inter_dp_size: int


CakeFusedNormCombineWorkspace = needs("CakeFusedNormCombineWorkspace", _GPU)
cake_fused_norm_combine = needs("cake_fused_norm_combine", _GPU)
cake_fused_norm_combine_create_workspace = needs("cake_fused_norm_combine_create_workspace", _GPU)
cake_fused_norm_combine_destroy_workspace = needs("cake_fused_norm_combine_destroy_workspace", _GPU)
cake_fused_norm_combine_workspace_bytes = needs("cake_fused_norm_combine_workspace_bytes", _GPU)
init_tp_moe_finalize_rmsnorm = needs("init_tp_moe_finalize_rmsnorm", _GPU)
tp_moe_finalize_rmsnorm = needs("tp_moe_finalize_rmsnorm", _GPU)


def is_mnnvl_cutedsl_supported(*args: Any, **kwargs: Any) -> bool:
    """Return False: the kernels need a Blackwell GPU."""
    return False


def supports_tp_moe_finalize_rmsnorm(*args: Any, **kwargs: Any) -> bool:
    """Return False: the kernels need a Blackwell GPU."""
    return False


_PCIE = "a kernel over PCIe, which this package does not have; torch.distributed has this collective"
PcieIpcAllGatherWorkspace = needs("PcieIpcAllGatherWorkspace", _PCIE)
PcieIpcReduceScatterWorkspace = needs("PcieIpcReduceScatterWorkspace", _PCIE)

_ULYSSES = "a kernel over NVLink, which this package does not have; UlyssesCommunicator goes through the process group"
dispose_ulysses_a2a = needs("dispose_ulysses_a2a", _ULYSSES, "fa")
get_ulysses_a2a_module = needs("get_ulysses_a2a_module", _ULYSSES)
init_ulysses_a2a = needs("init_ulysses_a2a", _ULYSSES, "out_ipc_ptrs, signal_ipc_ptrs, rank, world_size, full_nvlink")
ulysses_a2a = needs("ulysses_a2a", _ULYSSES, "fa, inp, out, B, S_local, H, D, mode")
