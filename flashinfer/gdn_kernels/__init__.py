# SPDX-License-Identifier: Apache-2.0
"""Published paths of single kernels of the gated delta rule; programs also load some of these files by their path."""

from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule as gated_delta_rule
from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_mtp as gated_delta_rule_mtp
from flashinfer.recurrent.gdn_launchers import chunk_gated_delta_rule_sm90 as chunk_gated_delta_rule_sm90
from flashinfer.recurrent.gdn_launchers import get_mtp_config as get_mtp_config
from flashinfer.recurrent.gdn_launchers import get_tile_v_mtp as get_tile_v_mtp
from flashinfer.recurrent.gdn_launchers import get_vec_size_mtp as get_vec_size_mtp
from flashinfer.recurrent.gdn_launchers import run_mtp_decode as run_mtp_decode
from flashinfer.recurrent.gdn_launchers import run_nontranspose_decode as run_nontranspose_decode
from flashinfer.recurrent.gdn_launchers import run_pretranspose_decode as run_pretranspose_decode
from flashinfer.recurrent.gdn_pieces import cp_delta_rule_dsl_sm90 as cp_delta_rule_dsl_sm90
from flashinfer.recurrent.gdn_ring import gated_delta_rule_mtp_ucache as gated_delta_rule_mtp_ucache
from flashinfer.recurrent.gdn_ring import gated_delta_rule_mtp_ucache_flush as gated_delta_rule_mtp_ucache_flush

from . import gdn_decode_bf16_wy_output_only as _output_only

gated_delta_rule_bf16state_cooprow = gated_delta_rule
gated_delta_rule_bf16state_cooprow_mtp = gated_delta_rule_mtp
gated_delta_rule_mtp_wy_output_only = _output_only.gated_delta_rule_mtp
