# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports generators of FP4 quantisation."""

from flashinfer.quantization import gen_fp4_quantization_module as gen_fp4_quantization_module
from flashinfer.quantization.fp4_quantization import (
    gen_fp4_quantization_sm90_module as gen_fp4_quantization_sm90_module,
)
