# SPDX-License-Identifier: Apache-2.0
"""Published paths of single kernels of the gated delta rule; programs also load some of these files by their path."""

from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule as gated_delta_rule
from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_mtp as gated_delta_rule_mtp
