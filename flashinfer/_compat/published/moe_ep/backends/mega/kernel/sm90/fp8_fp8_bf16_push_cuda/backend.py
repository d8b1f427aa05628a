# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.mega`."""

from flashinfer.moe_ep.mega import Sm90PushFp8MegaKernelBackend as Sm90PushFp8MegaKernelBackend
