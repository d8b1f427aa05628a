# SPDX-License-Identifier: Apache-2.0
"""Facade: names that published code imports from ``flashinfer.gemm.gemm_base``, each defined in a module of its own."""

import importlib
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name == "get_mm_bf16_cublaslt_module":  # imports the autotuner, which takes 10 ms
        return importlib.import_module(".tuning", __package__).get_mm_bf16_cublaslt_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
