# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of layers in one kernel."""

from flashinfer.jit.fused_moe import gen_monomoe_module as gen_monomoe_module
from flashinfer.jit.fused_moe import load_monomoe_module as load_monomoe_module
