# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.kernels`."""

from flashinfer.fused_moe.ep.kernels import IdentitySplitKernelBackend as IdentitySplitKernelBackend
