# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports SVDQuant products, which need a Blackwell GPU, and their constants."""

from .._compat.unsupported_gemm import get_nvfp4_svdquant_module as get_nvfp4_svdquant_module
from .._compat.unsupported_gemm import mm_nvfp4_svdquant as mm_nvfp4_svdquant
from .._compat.unsupported_gemm import nvfp4_quantize_smooth as nvfp4_quantize_smooth
from .._compat.unsupported_gemm import svdquant_linear as svdquant_linear

#: Bytes of the workspace that published callers allocate.
DEFAULT_WORKSPACE_SIZE = 32 * 1024 * 1024
#: What the rank of the low-rank part is a multiple of.
SVDQUANT_LORA_RANK_GRANULARITY = 32
