# SPDX-License-Identifier: Apache-2.0
"""Packing and quantisation: bits, block-scaled 8-bit and 4-bit floats, dequantisation and layouts.

``_compat.unsupported_quantization`` holds the names that need a Blackwell GPU; they can be imported from here too.
"""

from .._compat.unsupported_quantization import *
from .._compat.unsupported_quantization import gen_fp4_kv_quantization_module as gen_fp4_kv_quantization_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm100_module as gen_fp4_quantization_sm100_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm103_module as gen_fp4_quantization_sm103_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm107_module as gen_fp4_quantization_sm107_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm110_module as gen_fp4_quantization_sm110_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm120_module as gen_fp4_quantization_sm120_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm120f_module as gen_fp4_quantization_sm120f_module
from .._compat.unsupported_quantization import gen_fp4_quantization_sm121_module as gen_fp4_quantization_sm121_module
from .._compat.unsupported_quantization import (
    get_mxfp8_grouped_quantization_module as get_mxfp8_grouped_quantization_module,
)
from .._compat.unsupported_quantization import (
    get_mxfp8_quantization_sm100_module as get_mxfp8_quantization_sm100_module,
)
from .._compat.unsupported_quantization import mxfp4_quantize_cute_dsl as mxfp4_quantize_cute_dsl
from .._compat.unsupported_quantization import mxfp8_quantize_cute_dsl as mxfp8_quantize_cute_dsl
from .._compat.unsupported_quantization import nvfp4_quantize_cute_dsl as nvfp4_quantize_cute_dsl
from .._compat.unsupported_quantization import nvfp4_quantize_per_token_cute_dsl as nvfp4_quantize_per_token_cute_dsl
from .._compat.unsupported_quantization import silu_and_mul_mxfp8_quantize as silu_and_mul_mxfp8_quantize
from .._compat.unsupported_quantization import (
    silu_and_mul_mxfp8_quantize_backward as silu_and_mul_mxfp8_quantize_backward,
)
from ..jit.quantization import gen_fp4_quantization_module as gen_fp4_quantization_module
from ..jit.quantization import gen_mx_quantization_module as gen_mx_quantization_module
from ..jit.quantization import gen_nvfp4_kv_module as gen_nvfp4_kv_module
from ..jit.quantization import gen_packbits_module as gen_packbits_module
from ..jit.quantization import gen_quantization_module as gen_quantization_module
from .fp4_quantization import (
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)
from .fp4_quantization import gen_fp4_quantization_sm90_module as gen_fp4_quantization_sm90_module
from .fp4_quantization import get_fp4_quantization_module as get_fp4_quantization_module
from .fp4_quantization import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
from .fp8_quantization import mxfp8_dequantize_host, mxfp8_quantize
from .groups import per_token_group_quant_8bit
from .layout import SfLayout
from .modules import get_packbits_module as get_packbits_module
from .nvfp4_kv import nvfp4_kv_dequantize, nvfp4_kv_dequantize_paged
from .nvfp4_quantization_utils import NVFP44Over6Config as NVFP44Over6Config
from .nvfp4_quantization_utils import NVFP44Over6ErrMode as NVFP44Over6ErrMode
from .packbits import packbits, segment_packbits

__all__ = [
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp8_dequantize_host",
    "mxfp8_quantize",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "packbits",
    "per_token_group_quant_8bit",
    "segment_packbits",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
]
