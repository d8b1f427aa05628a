# SPDX-License-Identifier: Apache-2.0
"""Options of attention that ``plan`` takes and the legacy ``forward`` replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

__all__ = ["AttentionOptions"]


@dataclass(slots=True)
class AttentionOptions:
    """Position encoding, visible keys and scales of the logits, as the caller gave them (None: the default)."""

    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: Optional[float]
    sm_scale: Optional[float]
    rope_scale: Optional[float]
    rope_theta: Optional[float]
