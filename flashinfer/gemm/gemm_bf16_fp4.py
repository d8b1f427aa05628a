# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports products of bfloat16 rows and FP4 weights, which need a Blackwell GPU."""

from .._compat.unsupported_gemm import mm_bf16_fp4 as mm_bf16_fp4
from .._compat.unsupported_gemm import prepare_bf16_fp4_weights as prepare_bf16_fp4_weights
