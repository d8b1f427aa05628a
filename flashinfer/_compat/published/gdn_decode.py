# SPDX-License-Identifier: Apache-2.0
"""The path under which programs import the decode functions of the gated delta rule."""

from flashinfer._compat.unsupported_recurrent import ugpu_state_pool as ugpu_state_pool
from flashinfer.recurrent.gdn_step import gated_delta_rule_decode as gated_delta_rule_decode
from flashinfer.recurrent.gdn_step import gated_delta_rule_decode_pretranspose as gated_delta_rule_decode_pretranspose
from flashinfer.recurrent.gdn_step import gated_delta_rule_mtp as gated_delta_rule_mtp
from flashinfer.recurrent.gdn_step import gated_delta_rule_replayssm_commit as gated_delta_rule_replayssm_commit
