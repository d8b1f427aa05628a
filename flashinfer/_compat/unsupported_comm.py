# SPDX-License-Identifier: Apache-2.0
"""Names of communication that programs import and that need other GPUs or packages: each raises when it is called."""

from __future__ import annotations

from .unsupported import needs

__all__ = [
    "MNNVLCuteDSLAllGatherDualNormWorkspace",
    "MNNVLCuteDSLAllGatherNormQuantWorkspace",
    "MNNVLCuteDSLAllReduceFusionWorkspace",
    "MixedCommHandler",
    "NVSHMEMAllReduce",
    "all_gather_gated_residual_next_rmsnorm",
    "run_mixed_comm",
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
