# SPDX-License-Identifier: Apache-2.0
"""Matrix products of the model in ``examples/serve``: projections, and the gated MLP that is made of three."""

from __future__ import annotations

from typing import Mapping, Optional

import torch

import flashinfer

Weights = Mapping[str, torch.Tensor]  #: weights, keyed by their names in Hugging Face checkpoints


class Linear:
    """A projection, or several of the same input as one matrix product."""

    def __init__(self, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def of(cls, weights: Weights, prefix: str, *names: str) -> Linear:
        """Read the projections of these names."""

        def stacked(kind: str) -> torch.Tensor:
            return torch.cat([weights[f"{prefix}.{name}.{kind}"] for name in names])

        return cls(stacked("weight"), stacked("bias") if f"{prefix}.{names[0]}.bias" in weights else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_up = Linear.of(weights, prefix, "gate_proj", "up_proj")
        self.down = Linear.of(weights, prefix, "down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(flashinfer.silu_and_mul(self.gate_up(x)))
