# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports generators of adapters of experts."""

from flashinfer.jit.fused_moe import gen_bgmv_moe_module as gen_bgmv_moe_module
from flashinfer.jit.fused_moe import load_bgmv_moe_module as load_bgmv_moe_module
