# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the low-latency fp8 product, which needs a Blackwell GPU."""

from flashinfer._compat.unsupported_gemm import get_trtllm_low_latency_gemm_module as get_trtllm_low_latency_gemm_module
from flashinfer._compat.unsupported_gemm import prepare_low_latency_gemm_weights as prepare_low_latency_gemm_weights
from flashinfer._compat.unsupported_gemm import trtllm_low_latency_gemm as trtllm_low_latency_gemm
