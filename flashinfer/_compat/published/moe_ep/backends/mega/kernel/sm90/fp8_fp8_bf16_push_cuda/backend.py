# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.fused_moe.ep.mega`."""

from flashinfer.fused_moe.ep.mega import Sm90PushFp8MegaKernelBackend as Sm90PushFp8MegaKernelBackend
