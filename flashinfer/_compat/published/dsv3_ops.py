# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports ops of DeepSeek-V3; each belongs to the family of its kind."""

from flashinfer.concat_ops import concat_mla_k as concat_mla_k
from flashinfer.fused_moe.routing import fused_topk_deepseek as fused_topk_deepseek
from flashinfer.gemm.routergemm import mm_M1_16_K7168_N128 as mm_M1_16_K7168_N128
from flashinfer.gemm.routergemm import mm_M1_16_K7168_N256 as mm_M1_16_K7168_N256
