# SPDX-License-Identifier: Apache-2.0
"""The choice between torch and our kernels, by shape, layout and capability. Needs no GPU: only metadata is read."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.gemm import bf16
from flashinfer.gemm import decide as routes

from .stand_ins import on_cuda

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
        (1, 3072, 3072, True, False),
        (32, 3072, 3072, True, False),
        (32, 3064, 3072, True, True),  # fewer weights than SMALL_BF16
        (1, 256, 7168, True, True),
        (33, 3072, 3072, True, True),
        (33, 16384, 4096, True, False),
        (64, 12208, 4096, True, False),
        (64, 12200, 4096, True, True),  # fewer weights than LARGE_BF16
        (64, 32768, 2048, True, True),  # K is short
        (65, 16384, 4096, True, True),
        (1, 4096, 4096, False, True),  # row-major weights
        (1, 4092, 4096, True, True),  # rows of the result are not whole 16 bytes
        (1, 4096, 4092, True, True),  # rows of the weights are not whole 16 bytes
    ],
)
def test_bf16(capability, m, n, k, is_column_major, prefers_torch):
    a, b = torch.empty(m, k, dtype=BF16), torch.empty(n, k, dtype=BF16).T
    if not is_column_major:
        b = torch.empty(k, n, dtype=BF16)
    assert routes.prefers_torch_bf16(a, b, is_plain=True) == prefers_torch
    assert routes.prefers_torch_bf16(a[None], b[None], is_plain=True) == prefers_torch
    capability(8, 0)
    assert routes.prefers_torch_bf16(a, b, is_plain=True)


@pytest.mark.parametrize("batch, prefers_torch", [(15, True), (16, False)])
def test_weights_of_a_batch_count_together(capability, batch, prefers_torch):
    a, b = torch.empty(batch, 8, 768, dtype=BF16), torch.empty(batch, 768, 768, dtype=BF16).mT
    assert routes.prefers_torch_bf16(a, b, is_plain=True) == prefers_torch
    many = torch.empty(batch, 40, 768, dtype=BF16)
    assert routes.prefers_torch_bf16(many, b, is_plain=True)


@pytest.mark.parametrize("m, n, k, prefers_torch", [(1, 64, 128, False), (32, 64, 128, False), (33, 64, 128, True)])
def test_other_bf16_products_of_few_rows_are_ours_for_any_weights(capability, m, n, k, prefers_torch):
    a, b = torch.empty(m, k, dtype=BF16), torch.empty(n, k, dtype=BF16).T
    assert routes.prefers_torch_bf16(a, b, is_plain=False) == prefers_torch
    assert routes.prefers_torch_bf16(a, b.contiguous(), is_plain=False)


@pytest.fixture
def ran(capability, monkeypatch):
    """Return the names of the products that bf16 functions have called; they compute nothing."""
    names = []
    for name in ("torch_bf16", "product"):
        monkeypatch.setattr(bf16, name, lambda *args, name=name, **kwargs: names.append(name))
    return names


@pytest.mark.parametrize("n, k", [(64, 256), (3072, 3072)])
@pytest.mark.parametrize("m", [8, 33])
def test_who_computes_bf16_products(ran, m, n, k):
    """Check all functions of the rule, with and without a bias or another dtype, and those that ask for our kernel."""
    a, w, bias = on_cuda(m, k, dtype=BF16), on_cuda(n, k, dtype=BF16), on_cuda(n, dtype=BF16)
    few, many = "product" if m == 8 else "torch_bf16", "product" if m == 8 and n == 3072 else "torch_bf16"
    for arguments, expected in [
        ({}, many),
        ({"backend": "cutile"}, many),
        ({"bias": bias}, few),
        ({"out_dtype": torch.float32}, few),
        ({"backend": "cublaslt"}, "torch_bf16"),
        ({"backend": "tinygemm"}, "product"),
    ]:
        ran.clear()
        flashinfer.mm_bf16(a, w.T, **arguments)
        assert ran == [expected], arguments
    for out_dtype, expected in ((BF16, many), (torch.float16, few)):
        ran.clear()
        flashinfer.bmm_bf16(a[None], w.T[None], out_dtype=out_dtype)
        assert ran == [expected], out_dtype
    ran.clear()
    flashinfer.gemm.tinygemm_bf16(a, w, on_cuda(m, n, dtype=BF16))
    assert ran == [few]


def fp8(batch: int, m: int, n: int, k: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, ...]:
    a, b = torch.empty(batch, m, k, dtype=E4M3), torch.empty(batch, n, k, dtype=dtype).mT
    return torch.empty(batch, m, n, dtype=BF16), a, b


def test_fp8(capability):
    assert not routes.prefers_torch_fp8(*fp8(1, 32, 2560, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 32, 2544, 4096))  # fewer weights than SMALL_FP8
    assert routes.prefers_torch_fp8(*fp8(1, 33, 2560, 4096))
    assert not routes.prefers_torch_fp8(*fp8(1, 1, 72, 128))  # cuBLASLt does not take 72 columns
    assert not routes.prefers_torch_fp8(*fp8(1, 64, 7168, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 64, 6144, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 65, 7168, 4096))
    assert routes.prefers_torch_fp8(*fp8(1, 1, 2560, 4096, dtype=E5M2))  # our Hopper kernels have no e5m2
    for batch in (0, 2):  # torch has no batches
        assert not routes.prefers_torch_fp8(*fp8(batch, 1, 64, 128))
        assert not routes.prefers_torch_fp8(*fp8(batch, 65, 64, 128))
    capability(8, 9)
    assert routes.prefers_torch_fp8(*fp8(1, 1, 2560, 4096))
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
