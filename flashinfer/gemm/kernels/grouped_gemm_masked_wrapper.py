# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the masked product of 4-bit groups, which needs a Blackwell GPU."""

from ..._compat.unsupported_gemm import grouped_gemm_nt_masked as grouped_gemm_nt_masked
