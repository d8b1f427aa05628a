# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.kernels`."""

from flashinfer.moe_ep.kernels import create_mega_kernel as create_mega_kernel
from flashinfer.moe_ep.kernels import create_split_kernel as create_split_kernel
from flashinfer.moe_ep.kernels import is_mega_kernel_config as is_mega_kernel_config
from flashinfer.moe_ep.kernels import kernel_requires_weights as kernel_requires_weights
from flashinfer.moe_ep.kernels import register_mega_kernel as register_mega_kernel
from flashinfer.moe_ep.kernels import register_split_kernel as register_split_kernel
from flashinfer.moe_ep.kernels import run_split_kernel as run_split_kernel
