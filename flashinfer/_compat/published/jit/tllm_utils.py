# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of helpers of TensorRT-LLM, which are not here."""

from flashinfer._compat.unsupported import needs

gen_trtllm_utils_module = needs("gen_trtllm_utils_module", "helpers of TensorRT-LLM, which this package does not have")
