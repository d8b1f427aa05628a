# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of ``checkpointing_ssu``."""

from __future__ import annotations

import torch

from ..core import JitSpec
from ..recurrent.mamba import gen_ssu_replay_module

__all__ = ["gen_checkpointing_ssu_module"]


def gen_checkpointing_ssu_module(
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    dt_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    stateIndex_dtype: torch.dtype,
    state_scale_dtype: object,
    dim: int,
    dstate: int,
    npredicted: int,
    max_window: int,
    heads_per_group: int,
    num_groups: int,
    philox_rounds: int,
    enable_pdl: bool,
) -> JitSpec:
    """Return the module of the first two keys. The others are arguments of its functions, and no keys here."""
    return gen_ssu_replay_module(state_dtype, input_dtype)
