# SPDX-License-Identifier: Apache-2.0
"""Values of prepared four-bit weights, for the references of ``cutlass_fused_moe``: the orders of codes and of scales,
undone. Weights are in the order of include/flashinfer/gemm/w4_layout.h."""

from __future__ import annotations

import torch

from .quantization_blocks import scale_values

__all__ = [
    "e2m1_weights",
    "int4_weights",
    "mxfp4_weights",
    "shifted_codes",
    "shifted_mxfp4_weights",
    "unfold_scales",
    "w4_codes",
]

#: Bits of e2m1 codes 0 to 3 in a 16-bit word: the sign, and the lowest of the three of the magnitude.
_E2M1_PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def w4_codes(weight: torch.Tensor, is_int4: bool) -> torch.Tensor:
    """Four-bit codes (n, k), uint8, of the bytes (n, k / 2) of one expert."""
    n, k = weight.shape[0], weight.shape[1] * 2
    # Blocks of 16 rows and 64 columns; in each, lanes (8 rows, 4 pairs of columns) of 4 words of 2 halves of 2 bytes.
    pairs = weight.reshape(n // 16, k // 64, 8, 4, 4, 2, 2).int()
    halves = pairs[..., 0] | (pairs[..., 1] << 8)
    if is_int4:
        codes = [(halves >> 4 * i) & 15 for i in range(4)]
    else:
        codes = [((halves >> sign) & 1) << 3 | ((halves >> low) & 7) for sign, low in _E2M1_PLACES]
    # Code i of a half is that of row (i % 2) * 8 and of column (i / 2) * 8 from the first of its lane.
    blocks = torch.stack(codes, dim=-1).to(torch.uint8).reshape(n // 16, k // 64, 8, 4, 4, 2, 2, 2)
    return blocks.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(n, k)


#: Bits of the signs of codes 0 to 7 in a 32-bit word; magnitudes are its nibbles.
_SHIFTED_SIGNS = (3, 11, 19, 27, 7, 15, 23, 31)


def shifted_codes(weight: torch.Tensor) -> torch.Tensor:
    """Four-bit codes (n, k), uint8, of one expert's bytes (n, k / 2) that become e4m3."""
    n, k = weight.shape[0], weight.shape[1] * 2
    # Blocks of 16 rows and 64 columns; in each, lanes (8 rows, 4 of 16 columns) of words (32 columns, 8 rows), 4 bytes.
    parts = weight.reshape(n // 16, k // 64, 8, 4, 2, 2, 4).long()
    words = (parts << 8 * torch.arange(4, device=weight.device)).sum(dim=-1)
    codes = [words >> 4 * i & 7 | (words >> sign & 1) << 3 for i, sign in enumerate(_SHIFTED_SIGNS)]
    # Codes are those of 4 columns of the first and of the second 16.
    blocks = torch.stack(codes, dim=-1).to(torch.uint8).reshape(n // 16, k // 64, 8, 4, 2, 2, 2, 4)
    return blocks.permute(0, 5, 2, 1, 4, 6, 3, 7).reshape(n, k)


def unfold_scales(scales: torch.Tensor, dtype: torch.dtype, group: int) -> torch.Tensor:
    """Scales (experts, rows, columns / group) of blocks of 64 rows and 128 columns; any view of their bytes will do."""
    experts, row_blocks, column_blocks = scales.shape[:3]
    per_block = 128 // group
    strips = 16 // (dtype.itemsize * per_block)
    flat = scales.reshape(experts, row_blocks, column_blocks, -1).view(torch.uint8).view(dtype)
    split = flat.reshape(experts, row_blocks, column_blocks, 64 // strips, strips, per_block)
    return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, row_blocks * 64, column_blocks * per_block)


def e2m1_weights(codes: list[torch.Tensor], scales: torch.Tensor) -> torch.Tensor:
    """e2m1 values times a number for each 32 columns, of the codes (n, k) of each expert; (experts, n, k)."""
    table = torch.tensor(_E2M1_VALUES, device=scales.device)
    values = [table[x.int()] * s.repeat_interleave(32, dim=1) for x, s in zip(codes, scales, strict=True)]
    return torch.stack(values)


def mxfp4_weights(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e2m1 values times 2^(byte - 127)."""
    numbers = scale_values(unfold_scales(scales, torch.uint8, 32), False)
    return e2m1_weights([w4_codes(weight, False) for weight in weights], numbers)


def shifted_mxfp4_weights(weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """e2m1 values times 2^(byte - 6), bytes 1 to 12: all of them are e4m3 numbers."""
    numbers = torch.exp2(unfold_scales(offsets, torch.uint8, 32).float() - 6)
    return e2m1_weights([shifted_codes(weight) for weight in weights], numbers)


def int4_weights(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Two's complement numbers times a bfloat16 for each 128 columns, whose bits may have any 16-bit dtype."""
    numbers = unfold_scales(scales, torch.bfloat16, 128).float()
    return torch.stack(
        [
            ((w4_codes(weight, True) ^ 8).float() - 8) * scale.repeat_interleave(128, dim=1)
            for weight, scale in zip(weights, numbers, strict=True)
        ]
    )
