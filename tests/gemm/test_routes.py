# SPDX-License-Identifier: Apache-2.0
"""The choice between torch and our kernels, by shape, layout and capability. Needs no GPU: only metadata is read."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.gemm import routes

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def capability(monkeypatch):
    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(flashinfer.utils, "get_compute_capability", lambda device: (major, minor))

    pretend(9, 0)
    return pretend


@pytest.mark.parametrize(
    "m, n, k, is_column_major, prefers_torch",
    [
        (1, 64, 128, True, False),
        (32, 64, 128, True, False),
        (33, 64, 128, True, True),
        (33, 16384, 4096, True, False),
        (64, 12208, 4096, True, False),
        (64, 12200, 4096, True, True),  # fewer weights than LARGE_BF16
        (64, 32768, 2048, True, True),  # K is short
        (65, 16384, 4096, True, True),
        (1, 64, 128, False, True),  # row-major weights
        (1, 60, 128, True, True),  # rows of the result are not whole 16 bytes
        (1, 64, 100, True, True),  # rows of the weights are not whole 16 bytes
    ],
)
def test_bf16(capability, m, n, k, is_column_major, prefers_torch):
    b = torch.empty(n, k, dtype=BF16).T if is_column_major else torch.empty(k, n, dtype=BF16)
    assert routes.prefers_torch_bf16(torch.empty(m, k, dtype=BF16), b) == prefers_torch
    capability(8, 0)
    assert routes.prefers_torch_bf16(torch.empty(m, k, dtype=BF16), b)


def fp8(batch: int, m: int, n: int, k: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, ...]:
    a, b = torch.empty(batch, m, k, dtype=E4M3), torch.empty(batch, n, k, dtype=dtype).mT
    return torch.empty(batch, m, n, dtype=BF16), a, b


def test_fp8(capability):
    assert not routes.prefers_torch_fp8(*fp8(1, 32, 64, 128))
    assert routes.prefers_torch_fp8(*fp8(1, 33, 64, 128))
    assert not routes.prefers_torch_fp8(*fp8(1, 64, 7168, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 64, 6144, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 65, 7168, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 1, 64, 128, dtype=E5M2))  # our Hopper kernels have no e5m2
    assert not routes.prefers_torch_fp8(*fp8(2, 65, 64, 128))  # torch has no batches
    capability(8, 9)
    assert routes.prefers_torch_fp8(*fp8(1, 1, 64, 128))
    capability(8, 0)
    assert not routes.prefers_torch_fp8(*fp8(1, 33, 64, 128))  # no fp8 in cuBLASLt


@pytest.mark.parametrize(
    "change",
    [
        lambda out, a, b: (out, a, b.contiguous()),  # row-major weights
        lambda out, a, b: (out, a.mT.contiguous().mT, b),
        lambda out, a, b: (out.mT.contiguous().mT, a, b),
        lambda out, a, b: (out, a[..., 1:97], b[:, 1:97]),  # addresses and strides without alignment
    ],
)
def test_layouts_that_cublaslt_does_not_take(capability, change):
    good = fp8(1, 80, 96, 112)
    assert routes.has_scaled_mm(*good) and not routes.has_scaled_mm(*change(*good))


@pytest.mark.parametrize("n, k", [(24, 32), (32, 24), (32, 0)])
def test_sizes_that_cublaslt_does_not_take(capability, n, k):
    assert not routes.has_scaled_mm(*fp8(1, 80, n, k))
