# SPDX-License-Identifier: Apache-2.0
"""The path under which programs import the decode functions of Kimi delta attention."""

from flashinfer.recurrent import kda_step as _kda_step
from flashinfer.recurrent.kda_step import fused_kda_decode as fused_kda_decode
from flashinfer.recurrent.kda_step import packed_fused_kda_decode as packed_fused_kda_decode
from flashinfer.recurrent.kda_step import packed_kda_decode as packed_kda_decode

recurrent_kda = _kda_step.recurrent_kda_decode
_FUSED_KDA_DECODE_AVAILABLE = True  # an engine reads it before it calls the fused functions
