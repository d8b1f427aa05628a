# SPDX-License-Identifier: Apache-2.0
"""Compiled modules of the family."""

from __future__ import annotations

from ..jit.codegen import module_cache
from ..jit.quantization import gen_mx_quantization_module, gen_nvfp4_kv_module, gen_packbits_module

get_packbits_module = module_cache(gen_packbits_module)
get_nvfp4_kv_module = module_cache(gen_nvfp4_kv_module)
get_mx_quantization_module = module_cache(gen_mx_quantization_module)
