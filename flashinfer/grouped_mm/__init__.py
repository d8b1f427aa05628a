# SPDX-License-Identifier: Apache-2.0
"""Products of packed groups of rows with one weight matrix per group, as a mixture of experts computes them."""

from .core import (
    grouped_mm_bf16,
    grouped_mm_fp4,
    grouped_mm_fp8,
    grouped_mm_mxfp8,
    moe_gemm_fp8_nt_groupwise,
    moe_gemm_mxfp8_nt_groupwise,
)

__all__ = [
    "grouped_mm_bf16",
    "grouped_mm_fp4",
    "grouped_mm_fp8",
    "grouped_mm_mxfp8",
    "moe_gemm_fp8_nt_groupwise",
    "moe_gemm_mxfp8_nt_groupwise",
]
