# SPDX-License-Identifier: Apache-2.0
"""Matrix products of the model in ``examples/serve``: projections in 16 bits or e4m3, and the gated MLP made of three.

With e4m3 weights a block of 128 x 128 has a scale, and a product quantises its input by 1 x 128: the form in which
DeepSeek and Qwen publish such weights. Norms, embeddings, routers and the output matrix stay as they are.
"""

from __future__ import annotations

from typing import Mapping, Optional

import torch

import flashinfer

Weights = Mapping[str, torch.Tensor]  #: weights, keyed by their names in Hugging Face checkpoints


BLOCK, LARGEST_E4M3 = 128, 448.0


class Linear:
    """A projection, or several of the same input as one matrix product."""

    is_fp8 = False

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


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes of ``(n, k)``, and the float32 scale of each block of 128 x 128, which restores them."""
    n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
    codes = (blocks / scale).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:n, :k].contiguous(), scale.view(rows, columns)


class Fp8Linear(Linear):
    """A projection with e4m3 weights, for inputs of bfloat16. Sizes that have no kernel stay in 16 bits."""

    is_fp8 = True

    def __init__(self, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> None:
        super().__init__(weight, bias)
        self.scale: Optional[torch.Tensor] = None
        if weight.shape[0] % 64 == 0 and weight.shape[1] % BLOCK == 0:
            self.weight, self.scale = quantize_blocks(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return super().__call__(x)
        out = flashinfer.gemm.fp8_blockscale_gemm_sm90(x, self.weight, None, self.scale)
        return out if self.bias is None else out.add_(self.bias)


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, weights: Weights, prefix: str, linear: type[Linear] = Linear) -> None:
        self.gate_up = linear.of(weights, prefix, "gate_proj", "up_proj")
        self.down = linear.of(weights, prefix, "down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(flashinfer.silu_and_mul(self.gate_up(x)))
