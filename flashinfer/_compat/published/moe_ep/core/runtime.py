# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.runtime`."""

from flashinfer.moe_ep.runtime import NVSHMEM as NVSHMEM
from flashinfer.moe_ep.runtime import TORCH_DIST as TORCH_DIST
from flashinfer.moe_ep.runtime import bootstrap_moe_ep_runtime as bootstrap_moe_ep_runtime
from flashinfer.moe_ep.runtime import ensure_moe_ep_cuda_device as ensure_moe_ep_cuda_device
from flashinfer.moe_ep.runtime import finalize_moe_ep_runtime as finalize_moe_ep_runtime
