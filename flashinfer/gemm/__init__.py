# SPDX-License-Identifier: Apache-2.0
"""Matrix products: dense, batched and grouped, with 16-bit, 32-bit and scaled 8-bit operands."""

from .._compat.unsupported_gemm import *
from .._compat.unsupported_gemm import (
    Sm100BlockScaledPersistentDenseGemmKernel as Sm100BlockScaledPersistentDenseGemmKernel,
)
from .._compat.unsupported_gemm import (
    Sm107BlockScaledPersistentDenseGemmKernel as Sm107BlockScaledPersistentDenseGemmKernel,
)
from .._compat.unsupported_gemm import Sm120B12xBlockScaledDenseGemmKernel as Sm120B12xBlockScaledDenseGemmKernel
from .._compat.unsupported_gemm import create_scale_factor_tensor as create_scale_factor_tensor
from .._compat.unsupported_gemm import fp4_linear as fp4_linear
from .._compat.unsupported_gemm import fp8_linear as fp8_linear
from .._compat.unsupported_gemm import gemm_alpha_beta as gemm_alpha_beta
from .._compat.unsupported_gemm import group_gemm_fp8_nt_groupwise_contiguous as group_gemm_fp8_nt_groupwise_contiguous
from .._compat.unsupported_gemm import group_gemm_mxfp4_nt_groupwise as group_gemm_mxfp4_nt_groupwise
from .._compat.unsupported_gemm import group_gemm_mxfp8_mxfp4_nt_groupwise as group_gemm_mxfp8_mxfp4_nt_groupwise
from .._compat.unsupported_gemm import group_gemm_nvfp4_nt_groupwise as group_gemm_nvfp4_nt_groupwise
from .._compat.unsupported_gemm import grouped_gemm_nt_masked as grouped_gemm_nt_masked
from .._compat.unsupported_gemm import masked_bmm as masked_bmm
from .._compat.unsupported_gemm import masked_scaled_bmm as masked_scaled_bmm
from .._compat.unsupported_gemm import ragged_block_scaled_bmm as ragged_block_scaled_bmm
from .._compat.unsupported_gemm import ragged_bmm as ragged_bmm
from .._compat.unsupported_gemm import ragged_scaled_bmm as ragged_scaled_bmm
from ..cutile import is_cuda_tile_available as is_cuda_tile_available
from . import gemm_base as gemm_base
from .bf16 import bmm_bf16, mm_bf16
from .block_scaled import mm_fp4, mm_mxfp8
from .blockscale import fp8_blockscale_gemm_sm90
from .deepgemm import batch_deepgemm_fp8_nt_groupwise, group_deepgemm_fp8_nt_groupwise
from .fp8 import bmm_fp8
from .groupwise import gemm_fp8_nt_blockscaled, gemm_fp8_nt_groupwise, group_gemm_fp8_nt_groupwise
from .routergemm import (
    mm_M1_16_K6144_N256,
    mm_M1_16_K7168_N128,
    mm_M1_16_K7168_N256,
    mm_M1_16_K7168_N256_bf16,
    mm_M1_16_K7168_N384,
    mm_M1_16_K7168_N384_bf16,
    mm_M1_16_K7168_N896,
    mm_M1_16_K7168_N896_bf16,
    tinygemm_bf16,
)
from .segment import SegmentGEMMWrapper

__all__ = [
    "SegmentGEMMWrapper",
    "batch_deepgemm_fp8_nt_groupwise",
    "bmm_bf16",
    "bmm_fp8",
    "fp8_blockscale_gemm_sm90",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "mm_M1_16_K6144_N256",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_bf16",
    "mm_M1_16_K7168_N384",
    "mm_M1_16_K7168_N384_bf16",
    "mm_M1_16_K7168_N896",
    "mm_M1_16_K7168_N896_bf16",
    "mm_bf16",
    "mm_fp4",
    "mm_mxfp8",
    "tinygemm_bf16",
]
