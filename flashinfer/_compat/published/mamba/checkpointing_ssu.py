# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the state update by replay."""

from flashinfer.recurrent.mamba_replay import CheckpointingSSURunner as CheckpointingSSURunner
from flashinfer.recurrent.mamba_replay import _get_module as _get_module
from flashinfer.recurrent.mamba_replay import allocate_checkpointing_ssu_scratch as allocate_checkpointing_ssu_scratch
from flashinfer.recurrent.mamba_replay import checkpointing_ssu as checkpointing_ssu
from flashinfer.recurrent.mamba_replay import replayssm_materialize as replayssm_materialize
