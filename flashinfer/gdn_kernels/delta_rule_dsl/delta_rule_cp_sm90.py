# SPDX-License-Identifier: Apache-2.0
"""Published names of the steps of the split form."""

from flashinfer.recurrent.gdn_pieces import BLK as BLK
from flashinfer.recurrent.gdn_pieces import chunk_bound as chunk_bound
from flashinfer.recurrent.gdn_pieces import cp_delta_rule_dsl_sm90 as cp_delta_rule_dsl_sm90
from flashinfer.recurrent.gdn_pieces import cp_delta_rule_fixup_dsl_sm90 as cp_delta_rule_fixup_dsl_sm90
from flashinfer.recurrent.gdn_pieces import cp_delta_rule_mn_precompute_dsl_sm90 as cp_delta_rule_mn_precompute_dsl_sm90
from flashinfer.recurrent.gdn_pieces import cp_delta_rule_prefill_dsl_sm90 as cp_delta_rule_prefill_dsl_sm90
from flashinfer.recurrent.gdn_pieces import cp_delta_rule_t_precompute_dsl_sm90 as cp_delta_rule_t_precompute_dsl_sm90
