# SPDX-License-Identifier: Apache-2.0
"""Verification on pools of bfloat16 states that writes outputs only."""

from typing import Any, Optional

import torch

from flashinfer.recurrent.gdn_bf16_state import gated_delta_rule_mtp as _with_states


def gated_delta_rule_mtp(*args: Any, **kwargs: Any) -> Optional[torch.Tensor]:
    """:func:`flashinfer.gdn_kernels.gdn_decode_bf16_state.gated_delta_rule_mtp` that leaves the pool as it is."""
    return _with_states(*args, **{**kwargs, "disable_state_update": True})
