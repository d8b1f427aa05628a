# SPDX-License-Identifier: Apache-2.0
"""Facade: names that published code imports from ``flashinfer.gemm.gemm_base``, each defined in a module of its own."""

import importlib
from typing import Any

from .._compat.unsupported_gemm import _cudnn_gemm_fp8_runner as _cudnn_gemm_fp8_runner
from .._compat.unsupported_gemm import get_fp8_blockscale_gemm_runner_sm90 as get_fp8_blockscale_gemm_runner_sm90
from .._compat.unsupported_gemm import get_gemm_sm90_module as get_gemm_sm90_module
from .._compat.unsupported_gemm import launch_compute_sm80_group_gemm_args as launch_compute_sm80_group_gemm_args
from .._compat.unsupported_gemm import launch_compute_sm90_group_gemm_args as launch_compute_sm90_group_gemm_args
from .._runtime.cache_buffers import _get_cache_buf as _get_cache_buf
from ..jit.gemm import get_gemm_module as get_gemm_module
from .bf16 import bmm_bf16 as bmm_bf16
from .bf16 import mm_bf16 as mm_bf16
from .bf16_checks import CUDNN_AVAILABLE as CUDNN_AVAILABLE
from .block_scaled import mm_fp4 as mm_fp4
from .block_scaled import mm_mxfp8 as mm_mxfp8
from .blockscale import fp8_blockscale_gemm_sm90 as fp8_blockscale_gemm_sm90
from .deepgemm import batch_deepgemm_fp8_nt_groupwise as batch_deepgemm_fp8_nt_groupwise
from .deepgemm import group_deepgemm_fp8_nt_groupwise as group_deepgemm_fp8_nt_groupwise
from .fp8 import bmm_fp8 as bmm_fp8
from .groupwise import gemm_fp8_nt_blockscaled as gemm_fp8_nt_blockscaled
from .groupwise import gemm_fp8_nt_groupwise as gemm_fp8_nt_groupwise
from .groupwise import group_gemm_fp8_nt_groupwise as group_gemm_fp8_nt_groupwise
from .groupwise import pad_indptr_to_multiple_of_4 as pad_indptr_to_multiple_of_4
from .segment import SegmentGEMMWrapper as SegmentGEMMWrapper

#: Bytes of the workspace that published code allocates for a product. Ours allocate what they need themselves.
DEFAULT_WORKSPACE_SIZE = 32 * 1024 * 1024

CUDNN_FP4_MXFP4_SM120_CUDNN_VERSION_ERROR = "cudnn FP4 GEMM with mxfp4 quantization is not supported on SM120"


def clear_cudnn_graph_cache() -> None:
    """Do nothing: products here make no graph of cuDNN that could be kept."""


def __getattr__(name: str) -> Any:
    if name == "_FP8_GEMM_SM100_TUNING_CONFIG":  # how published products in FP8 vary; ours have their own rules
        autotuner = importlib.import_module("flashinfer.autotuner")
        buckets = tuple(2**i for i in range(14))
        rule = autotuner.make_bucket_mapper(buckets)
        return autotuner.TuningConfig(dynamic_tensor_specs=(autotuner.DynamicTensorSpec((0,), (-2,), buckets, rule),))
    if name == "get_mm_bf16_cublaslt_module":  # imports the autotuner, which takes 10 ms
        return importlib.import_module(".tuning", __package__).get_mm_bf16_cublaslt_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
