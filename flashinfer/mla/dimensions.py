# SPDX-License-Identifier: Apache-2.0
"""Sizes of latent attention in a model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MLAHeadDimensions", "MLALayerDimensions"]


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Columns of a head before absorption, and of the compressed cache."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """A layer: its heads, and how many there are."""

    head_dimensions: MLAHeadDimensions
    num_heads: int
