# SPDX-License-Identifier: Apache-2.0
"""Modules of products of matrices; :mod:`.core` describes them."""

from .core import W4_KINDS as W4_KINDS
from .core import W4_TILES as W4_TILES
from .core import Tile as Tile
from .core import W4Tile as W4Tile
from .core import gen_dense_gemm_sm90_module as gen_dense_gemm_sm90_module
from .core import gen_fp8_blockscale_gemm_sm90_module as gen_fp8_blockscale_gemm_sm90_module
from .core import gen_gemm_module as gen_gemm_module
from .core import gen_gemm_modules as gen_gemm_modules
from .core import gen_gemm_sm90_module as gen_gemm_sm90_module
from .core import gen_gemm_w4_sm90_module as gen_gemm_w4_sm90_module
from .core import gen_quantize_1x128_module as gen_quantize_1x128_module
from .core import gen_tinygemm2_module as gen_tinygemm2_module
from .core import get_gemm_module as get_gemm_module
from .core import get_gemm_sm90_module as get_gemm_sm90_module
from .core import get_gemm_w4_sm90_module as get_gemm_w4_sm90_module
from .core import get_quantize_1x128_module as get_quantize_1x128_module
from .core import tiles_of as tiles_of
