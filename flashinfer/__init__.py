# SPDX-License-Identifier: Apache-2.0
"""Kernels for LLM serving, compiled on first use for the device of this machine.

Importing this package compiles nothing, writes nothing and touches no GPU.
"""

import gc as _gc
import importlib as _importlib
from typing import Any as _Any

# Published module paths that only re-export, such as flashinfer.fp4_quantization, are files of this folder.
__path__.append(f"{__path__[0]}/_compat/published")

# torch creates a million objects; a garbage collection that walks them while our modules load takes 80 ms each time.
_gc_was_enabled = _gc.isenabled()
_gc.disable()
try:
    from . import jit as jit
    from . import utils as utils  # first: _runtime.probes reads its names
    from ._compat.tllm_enums import *
    from ._compat.unsupported_attention import *
    from ._compat.unsupported_norm import *
    from ._compat.unsupported_quantization import *
    from ._compat.unsupported_recurrent import *
    from ._runtime.errors import *
    from ._runtime.integer_math import next_positive_power_of_2 as next_positive_power_of_2
    from .activation import *
    from .attention import *
    from .cascade import *
    from .concat_ops import *
    from .cudnn import *
    from .decode import *
    from .decode import fast_decode_plan as fast_decode_plan
    from .fi_trace import fi_trace as fi_trace
    from .mla import *
    from .norm import *
    from .norm import supports_gated_residual_next_rmsnorm as supports_gated_residual_next_rmsnorm
    from .norm import supports_gated_residual_rmsnorm as supports_gated_residual_rmsnorm
    from .norm import supports_rmsnorm_sigmoid_gate as supports_rmsnorm_sigmoid_gate
    from .page import *
    from .pod import *
    from .prefill import *
    from .prefill import trtllm_fmha_v2_prefill as trtllm_fmha_v2_prefill
    from .quantization import *
    from .quantization import NVFP44Over6Config as NVFP44Over6Config
    from .quantization import NVFP44Over6ErrMode as NVFP44Over6ErrMode
    from .quantization import get_fp4_quantization_module as get_fp4_quantization_module
    from .quantization import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
    from .rope import *
    from .sampling import *
    from .scale import *
    from .sparse import *
    from .topk import *
    from .version import __git_commit__ as __git_commit__
    from .version import __git_version__ as __git_version__
    from .version import __version__ as __version__
    from .warmup import *
    from .xqa import xqa as xqa

    for _path in ("msa_ops", "nvfp4_attention_sm120", "tllm_enums", "triton"):  # paths in _compat/published
        _importlib.import_module(f".{_path}", __name__)
finally:
    if _gc_was_enabled:
        if not _gc.get_freeze_count():  # what was made above becomes old at once: a collection of it takes 16 ms
            _gc.freeze()
            _gc.unfreeze()
        _gc.enable()


#: Imported on use: a server needs them once, if at all, and tuning alone takes 10 ms.
_ON_USE = (
    "aot",
    "artifacts",
    "attn_scores",
    "autotune_cache",
    "autotuner",
    "collect_env",
    "comm",
    "cutile",
    "deep_gemm",
    "diffusion_ops",
    "dsv3_ops",
    "fp4_quantization",
    "fp8_quantization",
    "fused_moe",
    "gdn_decode",
    "gdn_kernels",
    "gemm",
    "green_ctx",
    "grouped_mm",
    "indexer",
    "integrations",
    "kda",
    "kda_decode",
    "kda_prefill",
    "logits_processor",
    "mamba",
    "mhc",
    "moe_ep",
    "profiler",
    "recurrent",
    "tactics_blocklist",
    "tactics_blocklist_gen",
    "testing",
    "trace_apply",
    "trtllm_low_latency_gemm",
)


#: Names of autotuner that callers import from here.
_OF_AUTOTUNER = ("MeasurementPolicy", "autotune", "autotune_v2", "autotune_v2_reload")

#: Names of gemm that callers import from here.
_OF_GEMM = (
    "SegmentGEMMWrapper",
    "bmm_bf16",
    "bmm_fp8",
    "bmm_mxfp8",
    "mm_bf16",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_fp8",
    "mm_mxfp8",
    "mm_nvfp4_svdquant",
    "nvfp4_quantize_smooth",
    "prepare_bf16_fp4_weights",
    "prepare_low_latency_gemm_weights",
    "svdquant_linear",
    "tgv_gemm_sm100",
)

#: Names of grouped_mm that callers import from here.
_OF_GROUPED_MM = ("grouped_mm_bf16", "grouped_mm_fp4", "grouped_mm_fp8", "grouped_mm_mxfp8")

#: Names of fused_moe that callers import from here.
_OF_FUSED_MOE = (
    "cudnn_frost_grouped_gemm1_swiglu",
    "cudnn_frost_grouped_gemm1_swiglu_workspace_size",
    "cutlass_fused_moe",
    "reorder_rows_for_gated_act_gemm",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
)

#: Names of indexer that callers import from here.
_OF_INDEXER = (
    "compute_paged_mqa_logits_schedule",
    "fp4_paged_mqa_logits",
    "fp8_paged_mqa_logits",
    "min_block_table_width",
    "padded_seq_len",
    "precompile_paged_mqa_logits",
)

#: Names of recurrent that callers import from here.
_OF_RECURRENT = (
    "RecurrentKDAPrefillWorkspace",
    "RecurrentKDAPrefillWrapper",
    "chunk_gated_delta_rule",
    "fused_kda_decode",
    "packed_fused_kda_decode",
    "packed_kda_decode",
    "recurrent_kda",
)


def __getattr__(name: str) -> _Any:
    if name in _OF_AUTOTUNER:
        return getattr(_importlib.import_module(".autotuner", __name__), name)
    if name in _OF_FUSED_MOE:
        return getattr(_importlib.import_module(".fused_moe", __name__), name)
    if name in _OF_INDEXER:
        return getattr(_importlib.import_module(".indexer", __name__), name)
    if name in _OF_RECURRENT:
        return getattr(_importlib.import_module(".recurrent", __name__), name)
    if name in _OF_GEMM or name in _OF_GROUPED_MM:
        family = ".gemm" if name in _OF_GEMM else ".grouped_mm"
        found = globals()[name] = getattr(_importlib.import_module(family, __name__), name)  # found at once from now on
        return found
    if name in _ON_USE:
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if jit.env.knobs.trace_apply:
    _importlib.import_module(".trace.apply.patch", __name__).apply_from_environment()
