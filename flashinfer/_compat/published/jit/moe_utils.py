# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of the order of tokens by expert."""

from flashinfer.jit.fused_moe import gen_moe_utils_module as gen_moe_utils_module
