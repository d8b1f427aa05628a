# SPDX-License-Identifier: Apache-2.0
"""Choice between torch (cuBLASLt) and our kernels for dense products on CUDA. On the CPU our kernels always run.

The thresholds were measured on an H200 with operands read from DRAM, in microseconds (ours / cuBLASLt):

| rows x weights x k | bf16 | e4m3, one scale per tensor |
|---|---|---|
| 1 x 7168 x 4096 | 22.0 / 26.4 | 14.2 / 15.9 |
| 16 x 4096 x 14336 | 38.2 / 41.7 | 23.7 / 26.7 |
| 64 x 6144 x 4096 | 24.6 / 22.8 | 15.2 / 15.0 |
| 64 x 7168 x 4096 | 25.3 / 24.9 | 15.6 / 16.5 |
| 64 x 14336 x 4096 | 38.8 / 41.2 | 23.5 / 26.2 |
| 64 x 4096 x 14336 | 42.8 / 44.1 | 25.3 / 25.3 |
| 64 x 24576 x 1536 | | 19.5 / 18.9 |
| 96 x 14336 x 4096 | 42.8 / 42.3 | 25.9 / 26.0 |
| 4096 x 7168 x 4096 | 319 / 302 | |
| 8192 x 8192 x 8192 | | 752 / 740 |
"""

from __future__ import annotations

import torch

from .. import utils

__all__ = [
    "FEW_ROWS",
    "LARGE_BF16",
    "LARGE_FP8",
    "are_few_rows",
    "has_scaled_mm",
    "prefers_torch_bf16",
    "prefers_torch_fp8",
]

#: Rows of tokens up to which our Hopper kernels are faster whatever the weights.
FEW_ROWS = 32
#: Weights from which our Hopper kernels, which swap the operands, are faster than cuBLASLt for 33 to 64 rows.
LARGE_BF16, LARGE_FP8 = 50_000_000, 28_000_000
#: Batch entries up to which cuBLASLt is faster for per-tensor fp8; torch has no batched fp8 product.
MOST_BATCHES_OF_TORCH = 1


def are_few_rows(m: int, n: int, k: int, large: int) -> bool:
    """Return True if ``m`` rows of tokens are so few that our Hopper kernels read ``n x k`` weights faster."""
    return m <= FEW_ROWS or (m <= 64 and k >= 4096 and n * k >= large)


def _hopper_streams(a: torch.Tensor, b: torch.Tensor, step: int, large: int) -> bool:
    """Return True if few rows meet weights that our Hopper kernel reads: K-major, rows of ``step`` elements.

    ``step`` elements are 16 bytes. Other layouts would run on the general kernel, which is slower than cuBLASLt.
    """
    shape = b.shape
    return (
        are_few_rows(a.shape[-2], shape[-1], shape[-2], large)
        and b.stride(-2) == 1
        and shape[-2] % step == 0
        and shape[-1] % 8 == 0
        and utils.get_compute_capability(a.device)[0] == 9
    )


def prefers_torch_bf16(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if torch multiplies bf16 ``a (.., m, k)`` and ``b (.., k, n)`` faster. ``a`` is on a CUDA device."""
    return not _hopper_streams(a, b, 8, LARGE_BF16)


def has_scaled_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if torch has a product of fp8 ``a (1, m, k)`` and ``b (1, k, n)`` with these layouts.

    cuBLASLt takes one batch entry, row-major ``a`` and ``out``, column-major ``b``, and rows of 16 bytes; it needs
    capability 8.9.
    """
    batch, k, n = b.shape
    return (
        batch <= MOST_BATCHES_OF_TORCH
        and k % 16 == 0
        and n % 16 == 0
        and k > 0
        and a.stride(2) == 1
        and b.stride(1) == 1
        and out.stride(2) == 1
        and (a.stride(1) | b.stride(2) | out.stride(1)) % 16 == 0
        and (a.data_ptr() | b.data_ptr() | out.data_ptr()) % 16 == 0
        and utils.get_compute_capability(a.device) >= (8, 9)
    )


def prefers_torch_fp8(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if torch multiplies fp8 ``a (batch, m, k)`` and ``b (batch, k, n)`` faster. CUDA tensors.

    Our Hopper kernels have e4m3 on both sides; other pairs would run on the general kernel.
    """
    if b.shape[0] > MOST_BATCHES_OF_TORCH:
        return False
    is_ours = a.dtype is b.dtype is torch.float8_e4m3fn and _hopper_streams(a, b, 16, LARGE_FP8)
    return not is_ours and has_scaled_mm(out, a, b)
