# SPDX-License-Identifier: Apache-2.0
"""Facade: the names published code imports from ``flashinfer.utils``, each defined in a module of its own.

Serving engines and tests replace ``get_compute_capability``, ``device_support_pdl`` and ``is_sm90a_supported`` here, so
our own code reads a probe at the time of a call (:mod:`flashinfer._runtime.probes`). No module of ours imports it.
"""

import importlib
from typing import Any

from ._compat.backend_rules import check_trtllm_gen_sm107_only_feature as check_trtllm_gen_sm107_only_feature
from ._compat.backend_rules import determine_attention_backend as determine_attention_backend
from ._compat.backend_rules import determine_mla_backend as determine_mla_backend
from ._compat.backend_rules import is_cutlass_backend_supported as is_cutlass_backend_supported
from ._compat.backend_rules import is_fa3_backend_supported as is_fa3_backend_supported
from ._compat.backend_rules import is_fa3_prefill_head_dim_supported as is_fa3_prefill_head_dim_supported
from ._compat.installed import get_cuda_python_version as get_cuda_python_version
from ._compat.installed import has_cuda_cudart as has_cuda_cudart
from ._compat.installed import version_at_least as version_at_least
from ._runtime.arch import device_support_pdl as device_support_pdl
from ._runtime.arch import get_compute_capability as get_compute_capability
from ._runtime.arch import get_default_generators as get_default_generators
from ._runtime.arch import get_device_index as get_device_index
from ._runtime.arch import get_device_name as get_device_name
from ._runtime.arch import get_device_properties as get_device_properties
from ._runtime.arch import get_device_sm_count as get_device_sm_count
from ._runtime.arch import get_gpu_memory_bandwidth as get_gpu_memory_bandwidth
from ._runtime.arch import get_shared_bytes_per_block_optin as get_shared_bytes_per_block_optin
from ._runtime.arch import is_cvt_rs_supported as is_cvt_rs_supported
from ._runtime.arch import is_sm12x_supported as is_sm12x_supported
from ._runtime.arch import is_sm90a_supported as is_sm90a_supported
from ._runtime.arch import is_sm100a_supported as is_sm100a_supported
from ._runtime.arch import is_sm100f_supported as is_sm100f_supported
from ._runtime.arch import is_sm110a_supported as is_sm110a_supported
from ._runtime.arch import is_sm120a_supported as is_sm120a_supported
from ._runtime.arch import is_sm120f_supported as is_sm120f_supported
from ._runtime.arch import is_sm121a_supported as is_sm121a_supported
from ._runtime.cache_buffers import _cache_buf as _cache_buf
from ._runtime.cache_buffers import _get_cache_buf as _get_cache_buf
from ._runtime.cache_buffers import _get_range_buf as _get_range_buf
from ._runtime.checks import LSE_BASES as LSE_BASES
from ._runtime.checks import LSE_LAYOUTS as LSE_LAYOUTS
from ._runtime.checks import canonicalize_torch_dtype as canonicalize_torch_dtype
from ._runtime.checks import check_lse_base as check_lse_base
from ._runtime.checks import check_lse_layout as check_lse_layout
from ._runtime.checks import check_shape_dtype_device as check_shape_dtype_device
from ._runtime.checks import get_native_fp4_dtype as get_native_fp4_dtype
from ._runtime.checks import is_float8 as is_float8
from ._runtime.enums import MaskMode as MaskMode
from ._runtime.enums import PosEncodingMode as PosEncodingMode
from ._runtime.enums import TensorLayout as TensorLayout
from ._runtime.enums import get_alibi_slopes as get_alibi_slopes
from ._runtime.enums import get_indptr as get_indptr
from ._runtime.enums import log2e as log2e
from ._runtime.errors import BackendSupportedError as BackendSupportedError
from ._runtime.errors import GPUArchitectureError as GPUArchitectureError
from ._runtime.errors import LibraryError as LibraryError
from ._runtime.experimental import experimental_backend as experimental_backend
from ._runtime.integer_math import calculate_tile_tokens_dim as calculate_tile_tokens_dim
from ._runtime.integer_math import ceil_div as ceil_div
from ._runtime.integer_math import (
    get_trtllm_gen_multi_ctas_kv_counter_bytes as get_trtllm_gen_multi_ctas_kv_counter_bytes,
)
from ._runtime.integer_math import last_positive_power_of_2 as last_positive_power_of_2
from ._runtime.integer_math import next_positive_power_of_2 as _ceil_pow2  # noqa: F401  (a published name)
from ._runtime.integer_math import next_positive_power_of_2 as next_positive_power_of_2
from ._runtime.integer_math import round_up as round_up
from ._runtime.log import LogLevel as LogLevel
from ._runtime.log import get_logging_module as get_logging_module
from ._runtime.log import set_log_level as set_log_level
from ._runtime.probes import probes as _probes
from ._runtime.requirements import backend_requirement as backend_requirement
from ._runtime.requirements import supported_compute_capability as supported_compute_capability
from ._runtime.torch_ops import register_custom_op as register_custom_op
from ._runtime.torch_ops import register_fake_op as register_fake_op

_probes.__dict__ = globals()

#: Imported on first use, because few callers need them.
_LATE = {
    "FP4Tensor": ".quantization.fp4_tensor",
    "SINGLE_KERNEL_TMP_SIZE": ".attention.single",
    "determine_gemm_backend": ".gemm.segment",
    "get_globaltimer_kernel": "._runtime.globaltimer",
    "get_shuffle_block_size": ".quantization.fp4_quantization",
    "get_shuffle_matrix_a_row_indices": ".quantization.fp4_quantization",
    "get_shuffle_matrix_sf_a_row_indices": ".quantization.fp4_quantization",
    "has_flashinfer_cubin": ".jit.env",
    "has_flashinfer_jit_cache": ".jit.env",
    "is_confidential_compute": "._runtime.globaltimer",
    "prepare_jit_additional_args": ".attention.jit_arguments",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
