# SPDX-License-Identifier: Apache-2.0
"""Matrix products of the model in ``examples/serve``: projections in 16 bits or e4m3, and the gated MLP made of three.

With e4m3 weights a block of 128 x 128 has a scale, and a product quantises its input by 1 x 128: the form in which
DeepSeek and Qwen publish such weights. Norms, embeddings, routers and the output matrix stay as they are. Codes of a
checkpoint are restored in float32 and quantised again, which gives the same codes.
"""

from __future__ import annotations

from typing import Iterator, Mapping, Optional, Union

import torch

import flashinfer

Weights = Mapping[str, torch.Tensor]  #: weights, keyed by their names in Hugging Face checkpoints


BLOCK, LARGEST_E4M3 = 128, 448.0
SCALE = "_scale_inv"  #: suffix of a weight's name: the scales of its blocks
FLOAT32 = (".A_log", ".dt_bias")  #: exponents of decays: float32, whatever the rest is


class Prepared(Mapping[str, torch.Tensor]):
    """Weights on their device in the model's dtype, one by one when they are asked for; e4m3 ones as float32."""

    def __init__(self, weights: Weights, device: Union[str, torch.device], dtype: torch.dtype) -> None:
        self.weights, self.device, self.dtype = weights, device, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self.weights[name].detach()
        if name + SCALE in self.weights:
            return restore_blocks(weight.to(self.device), self.weights[name + SCALE].to(self.device))
        return weight.to(self.device, torch.float32 if name.endswith(FLOAT32) else self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


class Linear:
    """A projection, or several of the same input as one matrix product."""

    @classmethod
    def takes_codes(cls, weight: torch.Tensor) -> bool:
        """Tell whether this kind of projection has e4m3 codes for a weight."""
        return False

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


def restore_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers that codes and scales of blocks stand for."""
    n, k = codes.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return codes.float() * wide


class Fp8Linear(Linear):
    """A projection with e4m3 weights, for inputs of bfloat16. Sizes that have no kernel stay in 16 bits."""

    @classmethod
    def takes_codes(cls, weight: torch.Tensor) -> bool:
        return weight.shape[-2] % 64 == 0 and weight.shape[-1] % BLOCK == 0

    def __init__(self, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> None:
        self.scale: Optional[torch.Tensor] = None
        if self.takes_codes(weight):
            weight, self.scale = quantize_blocks(weight)
        super().__init__(weight if self.scale is not None else weight.bfloat16(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return super().__call__(x)
        out = flashinfer.gemm.fp8_blockscale_gemm_sm90(x, self.weight, None, self.scale)
        return out if self.bias is None else out.add_(self.bias)


class StoredFp8Linear(Fp8Linear):
    """A projection of a checkpoint with e4m3 codes, which has some weights in 16 bits: these stay as they are."""

    @classmethod
    def takes_codes(cls, weight: torch.Tensor) -> bool:
        return weight.dtype is torch.float32 and super().takes_codes(weight)


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, weights: Weights, prefix: str, linear: type[Linear] = Linear) -> None:
        self.gate_up = linear.of(weights, prefix, "gate_proj", "up_proj")
        self.down = linear.of(weights, prefix, "down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(flashinfer.silu_and_mul(self.gate_up(x)))
