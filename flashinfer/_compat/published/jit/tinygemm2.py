# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of products of few rows."""

from flashinfer.jit.gemm import gen_tinygemm2_module as gen_tinygemm2_module
