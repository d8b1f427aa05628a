# SPDX-License-Identifier: Apache-2.0
"""Settings of kernels that only Blackwell GPUs run."""

from .config import GvrTopKLBConfig as GvrTopKLBConfig
