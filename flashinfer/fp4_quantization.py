# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the FP4 functions of :mod:`flashinfer.quantization`."""

from .quantization import *  # noqa: F403
from .quantization import gen_fp4_quantization_module as gen_fp4_quantization_module
from .quantization import gen_fp4_quantization_sm90_module as gen_fp4_quantization_sm90_module
from .quantization import gen_fp4_quantization_sm100_module as gen_fp4_quantization_sm100_module
from .quantization import gen_fp4_quantization_sm103_module as gen_fp4_quantization_sm103_module
from .quantization import gen_fp4_quantization_sm107_module as gen_fp4_quantization_sm107_module
from .quantization import gen_fp4_quantization_sm110_module as gen_fp4_quantization_sm110_module
from .quantization import gen_fp4_quantization_sm120_module as gen_fp4_quantization_sm120_module
from .quantization import gen_fp4_quantization_sm120f_module as gen_fp4_quantization_sm120f_module
from .quantization import gen_fp4_quantization_sm121_module as gen_fp4_quantization_sm121_module
from .quantization import get_fp4_quantization_module as get_fp4_quantization_module
from .quantization import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
from .quantization.blackwell import *  # noqa: F403
