# SPDX-License-Identifier: Apache-2.0
"""Published path of gathers fused with norms, which need a Blackwell GPU."""

from flashinfer._compat.unsupported_comm import (
    MNNVLCuteDSLAllGatherDualNormWorkspace,
    MNNVLCuteDSLAllGatherNormQuantWorkspace,
    all_gather_gated_residual_next_rmsnorm,
)

__all__ = [
    "MNNVLCuteDSLAllGatherDualNormWorkspace",
    "MNNVLCuteDSLAllGatherNormQuantWorkspace",
    "all_gather_gated_residual_next_rmsnorm",
]
