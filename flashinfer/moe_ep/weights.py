# SPDX-License-Identifier: Apache-2.0
"""Weights of the experts of one rank: ``w13 (E_local, 2 I, H)`` with rows [gate ; up], and ``w2 (E_local, H, I)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

__all__ = ["MoEWeightPack", "PrequantizedMoEWeights", "UnquantizedMoEWeights", "dummy_moe_weights"]


class MoEWeightPack:
    """Weights with or without scales: ``MoEWeightPack(w13, w2, w13_scale=None, w2_scale=None)`` returns one of
    :class:`UnquantizedMoEWeights` and :class:`PrequantizedMoEWeights`.
    """

    w13: torch.Tensor
    w2: torch.Tensor

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not MoEWeightPack:
            return super().__new__(cls)
        return _pack(*args, **kwargs)


def _pack(
    w13: Optional[torch.Tensor] = None,
    w2: Optional[torch.Tensor] = None,
    w13_scale: Optional[torch.Tensor] = None,
    w2_scale: Optional[torch.Tensor] = None,
) -> Union[UnquantizedMoEWeights, PrequantizedMoEWeights]:
    if w13 is None or w2 is None:
        raise TypeError(f"MoEWeightPack: w13 and w2 must be tensors, got {type(w13).__name__} and {type(w2).__name__}")
    if (w13_scale is None) != (w2_scale is None):
        raise ValueError(
            "MoEWeightPack: w13_scale and w2_scale must be given both or neither, got exactly one of w13_scale/w2_scale"
        )
    if w13_scale is None or w2_scale is None:
        return UnquantizedMoEWeights(w13, w2)
    return PrequantizedMoEWeights(w13, w2, w13_scale, w2_scale)


@dataclass(frozen=True, eq=False, init=False)
class UnquantizedMoEWeights(MoEWeightPack):
    """Weights without scales."""

    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor, w13_scale: None = None, w2_scale: None = None) -> None:
        if w13_scale is not None or w2_scale is not None:
            raise TypeError("UnquantizedMoEWeights: w13_scale and w2_scale must be None, got a tensor")
        object.__setattr__(self, "w13", w13)
        object.__setattr__(self, "w2", w2)

    @property
    def w13_scale(self) -> None:
        return None

    @property
    def w2_scale(self) -> None:
        return None


@dataclass(frozen=True, eq=False)
class PrequantizedMoEWeights(MoEWeightPack):
    """Quantised weights with their scales."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor


def dummy_moe_weights(
    *, num_local_experts: int, hidden: int, intermediate: int = 1, device: Union[torch.device, str] = "cpu"
) -> UnquantizedMoEWeights:
    """Return bfloat16 zeros of the given sizes."""
    w13 = torch.zeros(num_local_experts, 2 * intermediate, hidden, dtype=torch.bfloat16, device=device)
    w2 = torch.zeros(num_local_experts, hidden, intermediate, dtype=torch.bfloat16, device=device)
    return UnquantizedMoEWeights(w13, w2)
