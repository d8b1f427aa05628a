# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of the routing of DeepSeek-V3."""

from flashinfer.jit.fused_moe import gen_dsv3_fused_routing_module as gen_dsv3_fused_routing_module
