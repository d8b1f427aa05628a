# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.kernels`."""

from flashinfer.fused_moe.ep.kernels import MegaKernelBackend as MegaKernelBackend
from flashinfer.fused_moe.ep.kernels import SplitKernelBackend as SplitKernelBackend
from flashinfer.fused_moe.ep.kernels import SplitKernelContext as SplitKernelContext
