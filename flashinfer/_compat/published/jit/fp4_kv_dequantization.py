# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of NVFP4 caches that are read."""

from flashinfer.jit.quantization import gen_fp4_kv_dequantization_module as gen_fp4_kv_dequantization_module
