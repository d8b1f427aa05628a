# SPDX-License-Identifier: Apache-2.0
"""Published path of the modules behind ``trtllm_fmha_v2_prefill``."""
