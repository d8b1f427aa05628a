# SPDX-License-Identifier: Apache-2.0
"""Head dimensions of MLA models."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "deepseek_mla_dimensions",
    "nope_mla_dimensions",
    "smaller_mla_dimensions",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
]


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Head dimensions before absorption, and the dimension of the compressed cache (``kv_lora_rank``)."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """Dimensions of a layer: head dimensions and number of heads."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
nope_mla_dimensions = MLAHeadDimensions(256, 0, 256, 512)
supported_mla_head_dimensions = [deepseek_mla_dimensions, smaller_mla_dimensions, nope_mla_dimensions]
supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]
