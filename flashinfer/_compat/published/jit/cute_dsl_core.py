# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the compiler of kernels in the CuTe DSL, of which there is none here."""

from flashinfer._compat.unsupported import needs
from flashinfer.jit.cute_dsl import JitSpecCuteDsl as JitSpecCuteDsl

build_and_load_cute_dsl_kernel = needs(
    "build_and_load_cute_dsl_kernel", "the CuTe DSL and kernels in it, which this package does not have"
)
