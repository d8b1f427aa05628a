# SPDX-License-Identifier: Apache-2.0
"""Decode and verification on pools of bfloat16 states."""

from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule as gated_delta_rule
from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_mtp as gated_delta_rule_mtp
from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_mtp_wide_vec as gated_delta_rule_mtp_wide_vec
from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_t1_wide_vec as gated_delta_rule_t1_wide_vec

gated_delta_rule_bf16state_cooprow = gated_delta_rule
gated_delta_rule_bf16state_cooprow_mtp = gated_delta_rule_mtp
