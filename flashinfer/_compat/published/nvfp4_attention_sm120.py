# SPDX-License-Identifier: Apache-2.0
"""Names of NVFP4 attention for SM12x; a call says what it would need."""

from flashinfer._compat.unsupported_attention import nvfp4_attention_sm120_fwd as nvfp4_attention_sm120_fwd
from flashinfer._compat.unsupported_attention import (
    nvfp4_attention_sm120_quantize_qkv as nvfp4_attention_sm120_quantize_qkv,
)
