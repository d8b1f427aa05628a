# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.kernels`."""

from flashinfer.moe_ep.kernels import MegaKernelBackend as MegaKernelBackend
from flashinfer.moe_ep.kernels import SplitKernelBackend as SplitKernelBackend
from flashinfer.moe_ep.kernels import SplitKernelContext as SplitKernelContext
