# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the recurrent layers, gathered from one file for each part of the family."""

from __future__ import annotations

from .recurrent_mamba import selective_state_update_trace
from .recurrent_mamba_replay import checkpointing_ssu_trace

__all__ = ["checkpointing_ssu_trace", "selective_state_update_trace"]
