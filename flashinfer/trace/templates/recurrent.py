# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the recurrent layers, gathered from one file for each part of the family."""

from __future__ import annotations

from .recurrent_gdn_step import (
    bf16_gated_delta_rule_mtp_trace,
    bf16_gated_delta_rule_trace,
    gated_delta_rule_decode_pretranspose_trace,
    gated_delta_rule_decode_trace,
    gated_delta_rule_mtp_trace,
    gated_delta_rule_mtp_ucache_flush_trace,
    gated_delta_rule_mtp_ucache_trace,
    gated_delta_rule_replayssm_commit_trace,
)
from .recurrent_kda import (
    fused_kda_decode_trace,
    packed_fused_kda_decode_trace,
    packed_kda_decode_trace,
    recurrent_kda_trace,
)
from .recurrent_mamba import selective_state_update_trace
from .recurrent_mamba_chunk import ssd_combined_fwd_trace
from .recurrent_mamba_replay import checkpointing_ssu_trace

__all__ = [
    "bf16_gated_delta_rule_mtp_trace",
    "bf16_gated_delta_rule_trace",
    "checkpointing_ssu_trace",
    "fused_kda_decode_trace",
    "gated_delta_rule_decode_pretranspose_trace",
    "gated_delta_rule_decode_trace",
    "gated_delta_rule_mtp_trace",
    "gated_delta_rule_mtp_ucache_flush_trace",
    "gated_delta_rule_mtp_ucache_trace",
    "gated_delta_rule_replayssm_commit_trace",
    "packed_fused_kda_decode_trace",
    "packed_kda_decode_trace",
    "recurrent_kda_trace",
    "selective_state_update_trace",
    "ssd_combined_fwd_trace",
]
