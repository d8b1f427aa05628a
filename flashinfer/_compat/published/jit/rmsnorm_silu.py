# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of RMSNorm with SiLU."""

from flashinfer.jit.norm import gen_norm_module as gen_rmsnorm_silu_module

__all__ = ["gen_rmsnorm_silu_module"]
