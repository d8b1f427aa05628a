# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: gated delta rule, Kimi delta attention, Mamba-2.

Published paths (``flashinfer.gdn_decode``, ``flashinfer.kda`` and so on) re-export what the modules of this folder
define; those are files of ``_compat/published``.
"""

from .gdn_prefill import chunk_gated_delta_rule as chunk_gated_delta_rule
from .gdn_step import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
    gated_delta_rule_replayssm_commit,
)
from .kda import recurrent_kda
from .kda_step import fused_kda_decode, packed_fused_kda_decode, packed_kda_decode
from .kda_wrapper import RecurrentKDAPrefillWorkspace, RecurrentKDAPrefillWrapper
from .mamba_chunk import SSDCombined, ssd_combined_fwd
from .mamba_replay import CheckpointingSSURunner as CheckpointingSSURunner
from .mamba_replay import allocate_checkpointing_ssu_scratch as allocate_checkpointing_ssu_scratch
from .mamba_replay import checkpointing_ssu
from .mamba_replay import replayssm_materialize as replayssm_materialize
from .mamba_update import cake_selective_state_update as cake_selective_state_update
from .mamba_update import selective_state_update

__all__ = [
    "RecurrentKDAPrefillWorkspace",
    "RecurrentKDAPrefillWrapper",
    "SSDCombined",
    "checkpointing_ssu",
    "chunk_gated_delta_rule",
    "fused_kda_decode",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "gated_delta_rule_replayssm_commit",
    "packed_fused_kda_decode",
    "packed_kda_decode",
    "recurrent_kda",
    "selective_state_update",
    "ssd_combined_fwd",
]
