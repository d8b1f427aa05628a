# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: gated delta rule, Kimi delta attention, Mamba-2.

Published paths (``flashinfer.gdn_decode``, ``flashinfer.kda`` and so on) re-export what the modules of this folder
define; those are files of ``_compat/published``.
"""

from .gdn_prefill import chunk_gated_delta_rule as chunk_gated_delta_rule
from .mamba_replay import CheckpointingSSURunner as CheckpointingSSURunner
from .mamba_replay import allocate_checkpointing_ssu_scratch as allocate_checkpointing_ssu_scratch
from .mamba_replay import checkpointing_ssu
from .mamba_replay import replayssm_materialize as replayssm_materialize
from .mamba_update import cake_selective_state_update as cake_selective_state_update
from .mamba_update import selective_state_update

__all__ = ["chunk_gated_delta_rule", "checkpointing_ssu", "selective_state_update"]
