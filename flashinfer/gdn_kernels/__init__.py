# SPDX-License-Identifier: Apache-2.0
"""Published paths of single kernels of the gated delta rule; programs also load some of these files by their path."""

from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule as gated_delta_rule
from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_mtp as gated_delta_rule_mtp
from flashinfer.recurrent.gdn_ring import gated_delta_rule_mtp_ucache as gated_delta_rule_mtp_ucache
from flashinfer.recurrent.gdn_ring import gated_delta_rule_mtp_ucache_flush as gated_delta_rule_mtp_ucache_flush

from . import gdn_decode_bf16_wy_output_only as _output_only

gated_delta_rule_mtp_wy_output_only = _output_only.gated_delta_rule_mtp
