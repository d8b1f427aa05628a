# SPDX-License-Identifier: Apache-2.0
"""Choice between torch (cuBLASLt) and our kernels for dense products on CUDA. On the CPU our kernels always run.

Our Hopper kernels swap the operands and stream the weights. For few rows they are faster once there are enough weights
to stream (:func:`are_streamed_faster`). bf16 products of few rows with a bias, or to another dtype, are ours for any
weights: torch takes several kernels for a bias and for fp16. Batched fp8 is always ours: torch has none.

The thresholds were measured on an H200 with operands read from DRAM, in microseconds (ours / cuBLASLt):

| rows x weights x k | bf16 | e4m3, one scale per tensor |
|---|---|---|
| 1 x 256 x 7168 | 10.8 / 9.8 | |
| 1 x 4096 x 2048 | 12.0 / 11.1 | 10.3 / 9.3 |
| 1 x 3072 x 3072 | 13.2 / 14.1 | 10.3 / 9.1 |
| 1 x 1536 x 7168 | 13.8 / 14.8 | 11.8 / 11.7 |
| 1 x 512 x 128, 128 entries | 12.1 / 11.0 | |
| 1 x 1024 x 1024, 16 entries | 16.0 / 16.5 | |
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

from .._runtime import arch
from .._runtime.arch import capability_of
from .._runtime.probes import probes

__all__ = [
    "FEW_ROWS",
    "LARGE_BF16",
    "LARGE_FP8",
    "MANY_ROWS",
    "SMALL_BF16",
    "SMALL_FP8",
    "are_streamed_faster",
    "capability",
    "depends_on_layout",
    "has_few_rows",
    "has_scaled_mm",
    "prefers_torch_bf16",
    "prefers_torch_fp8",
    "streams_fp8",
]

#: Rows of tokens up to which our Hopper kernels are faster than cuBLASLt from ``SMALL_*`` weights on.
FEW_ROWS = 32
#: Rows from which the choice is the same for any number of them.
MANY_ROWS = 65
#: Weights of all batch entries from which they are faster for up to FEW_ROWS rows.
SMALL_BF16, SMALL_FP8 = 9 << 20, 10 << 20
#: Weights of each batch entry from which they are faster for 33 to 64 rows.
LARGE_BF16, LARGE_FP8 = 50_000_000, 28_000_000


def are_streamed_faster(m: int, n: int, k: int, batch: int, small: int, large: int) -> bool:
    """Return True if our Hopper kernels multiply ``m`` rows with ``n x k`` weights in each batch entry faster."""
    if m <= FEW_ROWS:
        return batch * n * k >= small
    return m < MANY_ROWS and k >= 4096 and n * k >= large


def capability(a: torch.Tensor) -> tuple[int, int]:
    """Return the capability of a tensor's device, (0, 0) for the CPU; a replaced probe is asked."""
    if probes.get_compute_capability is arch.get_compute_capability:
        return divmod(capability_of[a.get_device()], 10)
    return probes.get_compute_capability(a.device)


def has_few_rows(a: torch.Tensor, b: torch.Tensor, small: int, large: int) -> bool:
    """Return True if products of the sizes of ``a (.., m, k)`` and ``b (.., k, n)`` are streamed faster by us."""
    shape = b.shape
    batch = shape[0] if len(shape) == 3 else 1
    return are_streamed_faster(a.shape[-2], shape[-1], shape[-2], batch, small, large)


def _hopper_streams(a: torch.Tensor, b: torch.Tensor, step: int, small: int, large: int) -> bool:
    """Return True if few rows meet weights that our Hopper kernel reads: K-major, rows of ``step`` elements.

    ``step`` elements are 16 bytes. Other layouts would run on the general kernel, which is slower than cuBLASLt.
    """
    shape = b.shape
    return (
        has_few_rows(a, b, small, large)
        and b.stride(-2) == 1
        and shape[-2] % step == 0
        and shape[-1] % 8 == 0
        and capability(a)[0] == 9
    )


def prefers_torch_bf16(a: torch.Tensor, b: torch.Tensor, *, is_plain: bool) -> bool:
    """Return True if torch multiplies bf16 ``a (.., m, k)`` and ``b (.., k, n)`` faster. ``a`` is on a CUDA device.

    ``is_plain`` is False where few rows are ours for any weights: with a bias, a result that is not bf16, or a caller
    that asks for our kernel.
    """
    return not _hopper_streams(a, b, 8, SMALL_BF16 if is_plain else 0, LARGE_BF16)


def depends_on_layout(a: torch.Tensor, b: torch.Tensor, *, is_plain: bool) -> bool:
    """Return True if other strides of ``b`` than these may change what :func:`prefers_torch_bf16` returns."""
    return capability(a)[0] == 9 and has_few_rows(a, b, SMALL_BF16 if is_plain else 0, LARGE_BF16)


def streams_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if our Hopper kernel multiplies these fp8 operands faster than cuBLASLt.

    It has e4m3 on both sides; other pairs would run on the general kernel.
    """
    return a.dtype is b.dtype is torch.float8_e4m3fn and _hopper_streams(a, b, 16, SMALL_FP8, LARGE_FP8)


def has_scaled_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if torch has a product of fp8 ``a (1, m, k)`` and ``b (1, k, n)`` with these layouts.

    cuBLASLt takes one batch entry, row-major ``a`` and ``out``, column-major ``b``, and rows of 16 bytes; it needs
    capability 8.9.
    """
    batch, k, n = b.shape
    return (
        batch == 1
        and k % 16 == 0
        and n % 16 == 0
        and k > 0
        and a.stride(2) == 1
        and b.stride(1) == 1
        and out.stride(2) == 1
        and (a.stride(1) | b.stride(2) | out.stride(1)) % 16 == 0
        and (a.data_ptr() | b.data_ptr() | out.data_ptr()) % 16 == 0
        and capability(a) >= (8, 9)
    )


def prefers_torch_fp8(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if torch multiplies fp8 ``a (batch, m, k)`` and ``b (batch, k, n)`` faster. CUDA tensors."""
    return not streams_fp8(a, b) and has_scaled_mm(out, a, b)
