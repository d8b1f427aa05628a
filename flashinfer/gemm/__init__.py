# SPDX-License-Identifier: Apache-2.0
"""Matrix products: dense, batched and grouped, with 16-bit, 32-bit and scaled 8-bit operands."""

from ..cutile import is_cuda_tile_available as is_cuda_tile_available
from . import gemm_base as gemm_base
from .bf16 import bmm_bf16, mm_bf16
from .blockscale import fp8_blockscale_gemm_sm90
from .fp8 import bmm_fp8
from .routergemm import tinygemm_bf16

__all__ = [
    "bmm_bf16",
    "bmm_fp8",
    "fp8_blockscale_gemm_sm90",
    "mm_bf16",
    "tinygemm_bf16",
]
