# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.kernels`."""

from flashinfer.moe_ep.kernels import IdentitySplitKernelBackend as IdentitySplitKernelBackend
