# SPDX-License-Identifier: Apache-2.0
"""The path that the guide names beside ``FLASHINFER_FMHA_V2_VERBOSE``, which ``trtllm_fmha_v2_prefill`` reads."""

from ..front_doors import gen_fmha_v2_module as gen_fmha_v2_module
