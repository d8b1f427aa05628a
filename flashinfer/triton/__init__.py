# SPDX-License-Identifier: Apache-2.0
"""Module paths under which published code looks for Triton kernels; ours are the native ones."""

from . import cascade as cascade
from . import gemm as gemm
from . import sm_constraint_gemm as sm_constraint_gemm
