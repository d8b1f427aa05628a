# SPDX-License-Identifier: Apache-2.0
"""Just-in-time compilation: from sources to loaded modules. See docs/architecture.md."""

import importlib
from types import ModuleType

from ..compilation_context import sm90a_nvcc_flags as sm90a_nvcc_flags
from ..compilation_context import sm100a_nvcc_flags as sm100a_nvcc_flags
from ..compilation_context import sm100f_nvcc_flags as sm100f_nvcc_flags
from ..compilation_context import sm103a_nvcc_flags as sm103a_nvcc_flags
from ..compilation_context import sm110a_nvcc_flags as sm110a_nvcc_flags
from ..compilation_context import sm120a_nvcc_flags as sm120a_nvcc_flags
from ..compilation_context import sm120f_nvcc_flags as sm120f_nvcc_flags
from ..compilation_context import sm121a_nvcc_flags as sm121a_nvcc_flags
from . import cpp_ext as cpp_ext
from . import env as env
from . import utils as utils
from .activation import gen_act_and_mul_module as gen_act_and_mul_module
from .activation import get_act_and_mul_cu_str as get_act_and_mul_cu_str
from .attention import *
from .cascade import gen_cascade_module as gen_cascade_module
from .comm import gen_comm_alltoall_module as gen_comm_alltoall_module
from .comm import gen_dcp_alltoall_module as gen_dcp_alltoall_module
from .comm import gen_moe_alltoall_module as gen_moe_alltoall_module
from .comm import gen_pcie_ipc_comm_module as gen_pcie_ipc_comm_module
from .comm import gen_trtllm_comm_module as gen_trtllm_comm_module
from .comm import gen_trtllm_mnnvl_comm_module as gen_trtllm_mnnvl_comm_module
from .comm import gen_vllm_comm_module as gen_vllm_comm_module
from .context import current_compilation_context as current_compilation_context
from .core import JitSpec as JitSpec
from .core import JitSpecNvcc as JitSpecNvcc
from .core import JitSpecRegistry as JitSpecRegistry
from .core import JitSpecStatus as JitSpecStatus
from .core import MissingJITCacheError as MissingJITCacheError
from .core import build_jit_specs as build_jit_specs
from .core import clear_cache_dir as clear_cache_dir
from .core import gen_jit_spec as gen_jit_spec
from .core import jit_spec_registry as jit_spec_registry
from .cubin_loader import setup_cubin_loader as setup_cubin_loader
from .cute_dsl import JitSpecCuteDsl as JitSpecCuteDsl
from .define_variant import define_variant as define_variant
from .fused_moe import gen_bgmv_moe_module as gen_bgmv_moe_module
from .fused_moe import gen_dsv3_fused_routing_module as gen_dsv3_fused_routing_module
from .fused_moe import gen_hash_topk_module as gen_hash_topk_module
from .fused_moe import gen_moe_utils_module as gen_moe_utils_module
from .fused_moe import gen_monomoe_module as gen_monomoe_module
from .fused_moe import load_bgmv_moe_module as load_bgmv_moe_module
from .fused_moe import load_monomoe_module as load_monomoe_module
from .gemm import gen_tinygemm2_module as gen_tinygemm2_module
from .norm import gen_norm_module as gen_norm_module
from .page import gen_page_module as gen_page_module
from .quantization import gen_fp4_kv_dequantization_module as gen_fp4_kv_dequantization_module
from .quantization import gen_fp4_kv_quantization_module as gen_fp4_kv_quantization_module
from .quantization import gen_quantization_module as gen_quantization_module
from .sampling import gen_sampling_module as gen_sampling_module
from .scale import gen_scale_module as gen_scale_module
from .topk import gen_topk_module as gen_topk_module
from .utils import write_if_different as write_if_different

#: Published paths of generators, such as flashinfer.jit.hash_topk, are files of this folder.
__path__.append(f"{__path__[0].removesuffix('jit')}_compat/published/jit")  # noqa: F405


def __getattr__(name: str) -> ModuleType:
    """Import ``cubins`` on use: it needs ``flashinfer.aot``, which needs this package."""
    if name == "cubins":
        return importlib.import_module(f"{__name__}.cubins")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
