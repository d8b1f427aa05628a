# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of routing by hashes."""

from flashinfer.jit.fused_moe import gen_hash_topk_module as gen_hash_topk_module
