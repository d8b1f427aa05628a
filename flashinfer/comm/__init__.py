# SPDX-License-Identifier: Apache-2.0
"""Communication between GPUs: which rank does what, memory that ranks share, the fused all-reduce, exchanges of tokens.

Functions whose presence tells an engine that a kernel exists are absent until it does. Importing this package starts no
CUDA context and needs neither MPI nor another package. Names that set up, probe or forward are imported ``as``
themselves and stay out of ``__all__``.
"""

from .._compat.unsupported_comm import CakeFusedNormCombineWorkspace as CakeFusedNormCombineWorkspace
from .._compat.unsupported_comm import PcieIpcAllGatherWorkspace as PcieIpcAllGatherWorkspace
from .._compat.unsupported_comm import PcieIpcReduceScatterWorkspace as PcieIpcReduceScatterWorkspace
from .._compat.unsupported_comm import cake_fused_norm_combine as cake_fused_norm_combine
from .._compat.unsupported_comm import (
    cake_fused_norm_combine_create_workspace as cake_fused_norm_combine_create_workspace,
)
from .._compat.unsupported_comm import (
    cake_fused_norm_combine_destroy_workspace as cake_fused_norm_combine_destroy_workspace,
)
from .._compat.unsupported_comm import (
    cake_fused_norm_combine_workspace_bytes as cake_fused_norm_combine_workspace_bytes,
)
from .._compat.unsupported_comm import dispose_ulysses_a2a as dispose_ulysses_a2a
from .._compat.unsupported_comm import get_ulysses_a2a_module as get_ulysses_a2a_module
from .._compat.unsupported_comm import init_tp_moe_finalize_rmsnorm as init_tp_moe_finalize_rmsnorm
from .._compat.unsupported_comm import init_ulysses_a2a as init_ulysses_a2a
from .._compat.unsupported_comm import is_mnnvl_cutedsl_supported as is_mnnvl_cutedsl_supported
from .._compat.unsupported_comm import supports_tp_moe_finalize_rmsnorm as supports_tp_moe_finalize_rmsnorm
from .._compat.unsupported_comm import tp_moe_finalize_rmsnorm as tp_moe_finalize_rmsnorm
from .._compat.unsupported_comm import ulysses_a2a as ulysses_a2a
from ..jit.comm import gen_trtllm_comm_module as gen_trtllm_comm_module
from . import pcie_ipc_policy, pcie_ipc_tuning, vllm_ar
from . import trtllm_alltoall as trtllm_alltoall
from .allreduce import allreduce_fusion
from .cuda_ipc import CudaRTLibrary as CudaRTLibrary
from .cuda_ipc import create_shared_buffer as create_shared_buffer
from .cuda_ipc import free_shared_buffer as free_shared_buffer
from .dcp_alltoall import (
    decode_cp_a2a_allocate_mnnvl_workspace as decode_cp_a2a_allocate_mnnvl_workspace,
)
from .dcp_alltoall import (
    decode_cp_a2a_alltoall,
    decode_cp_a2a_lse_reduce,
    decode_cp_a2a_lse_reduce_workspace_size,
    decode_cp_a2a_workspace_size,
)
from .dcp_alltoall import (
    decode_cp_a2a_init_workspace as decode_cp_a2a_init_workspace,
)
from .dcp_alltoall import (
    decode_cp_a2a_lse_reduce_create_workspace as decode_cp_a2a_lse_reduce_create_workspace,
)
from .errors import CommTimeoutError
from .mapping import Mapping
from .memory.strided import pack_strided_memory as pack_strided_memory
from .pcie_ipc_ar import PcieIpcAllReduceWorkspace as PcieIpcAllReduceWorkspace
from .pcie_ipc_ar import get_pcie_ipc_comm_module as get_pcie_ipc_comm_module
from .pcie_ipc_policy import get_pcie_ipc_launch_config as get_pcie_ipc_launch_config
from .pcie_ipc_topology import probe_pcie_ipc_rank_topology as probe_pcie_ipc_rank_topology
from .pcie_ipc_topology import resolve_pcie_ipc_profile as resolve_pcie_ipc_profile
from .reduce.addresses import (
    trtllm_allreduce_fusion as trtllm_allreduce_fusion,
)
from .reduce.addresses import (
    trtllm_create_ipc_workspace_for_all_reduce_fusion as trtllm_create_ipc_workspace_for_all_reduce_fusion,
)
from .reduce.addresses import (
    trtllm_destroy_ipc_workspace_for_all_reduce as trtllm_destroy_ipc_workspace_for_all_reduce,
)
from .reduce.addresses import (
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion as trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from .reduce.addresses import (
    trtllm_lamport_initialize as trtllm_lamport_initialize,
)
from .reduce.addresses import (
    trtllm_lamport_initialize_all as trtllm_lamport_initialize_all,
)
from .reduce.addresses import (
    trtllm_moe_allreduce_fusion as trtllm_moe_allreduce_fusion,
)
from .reduce.addresses import (
    trtllm_moe_finalize_allreduce_fusion as trtllm_moe_finalize_allreduce_fusion,
)
from .reduce.gathered import all_gather_matmul as all_gather_matmul
from .reduce.gathered import prepare_all_gather_matmul as prepare_all_gather_matmul
from .reduce.gathered import quantized_all_reduce as quantized_all_reduce
from .reduce.types import (
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    QuantizationSFLayout,
    compute_fp4_swizzled_layout_sf_size,
)
from .reduce.workspace import (
    MNNVLAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
)
from .trtllm_moe_alltoall import (
    MoeAlltoAll,
    moe_a2a_active_rank_mask,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
)
from .trtllm_moe_alltoall import (
    moe_a2a_sanitize_expert_ids as moe_a2a_sanitize_expert_ids,
)
from .trtllm_moe_alltoall import (
    moe_a2a_wrap_payload_tensor_in_workspace as moe_a2a_wrap_payload_tensor_in_workspace,
)
from .ulysses import (
    UlyssesCommunicator,
    UlyssesWorkspace,
)
from .ulysses import (
    merge_ulysses_output_head_chunk as merge_ulysses_output_head_chunk,
)
from .ulysses import (
    pack_ulysses_qkv_head_chunk as pack_ulysses_qkv_head_chunk,
)
from .ulysses_topology import (
    UlyssesBackendDecision,
    UlyssesBackendError,
    UlyssesRankTopology,
    decide_ulysses_backend,
)
from .ulysses_topology import (
    probe_ulysses_rank_topology as probe_ulysses_rank_topology,
)
from .ulysses_topology import (
    resolve_ulysses_backend as resolve_ulysses_backend,
)
from .vllm_ar import all_reduce as vllm_all_reduce
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
    "MoeAlltoAll",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "UlyssesCommunicator",
    "UlyssesWorkspace",
    "UlyssesBackendDecision",
    "UlyssesBackendError",
    "UlyssesRankTopology",
    "decide_ulysses_backend",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
    "decode_cp_a2a_alltoall",
    "decode_cp_a2a_lse_reduce",
    "decode_cp_a2a_lse_reduce_workspace_size",
    "decode_cp_a2a_workspace_size",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "vllm_all_reduce",
]

# Published under other names than those of their modules.
PcieIpcLaunchConfig = pcie_ipc_policy.IpcLaunchConfig
PcieIpcVariant = pcie_ipc_policy.IpcVariant
pcie_ipc_default_cache_path = pcie_ipc_tuning.default_cache_path
vllm_dispose = vllm_ar.dispose
vllm_get_graph_buffer_ipc_meta = vllm_ar.get_graph_buffer_ipc_meta
vllm_init_custom_ar = vllm_ar.init_custom_ar
vllm_meta_size = vllm_ar.meta_size
vllm_register_buffer = vllm_ar.register_buffer
vllm_register_graph_buffers = vllm_ar.register_graph_buffers

# Published module paths that only re-export, such as flashinfer.comm.mixed_comm, are files of this folder.
__path__.append(f"{__path__[0].removesuffix('comm')}_compat/published/comm")
