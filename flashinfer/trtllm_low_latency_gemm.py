# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the low-latency fp8 product, which needs a Blackwell GPU."""

from .gemm.blackwell import get_trtllm_low_latency_gemm_module as get_trtllm_low_latency_gemm_module
from .gemm.blackwell import prepare_low_latency_gemm_weights as prepare_low_latency_gemm_weights
from .gemm.blackwell import trtllm_low_latency_gemm as trtllm_low_latency_gemm
