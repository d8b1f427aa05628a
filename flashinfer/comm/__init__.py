# SPDX-License-Identifier: Apache-2.0
"""Communication between GPUs: which rank does what, memory that ranks share, and the fused all-reduce.

Functions whose presence tells an engine that a kernel exists are absent until it does. Importing this package starts no
CUDA context and needs neither MPI nor another package.
"""

from .allreduce import allreduce_fusion
from .mapping import Mapping
from .trtllm_ar import (
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    QuantizationSFLayout,
    compute_fp4_swizzled_layout_sf_size,
)
from .workspace import (
    CommTimeoutError,
    MNNVLAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
)
from .workspace_base import AllReduceFusionWorkspace

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "CommTimeoutError",
    "MNNVLAllReduceFusionWorkspace",
    "Mapping",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
]
