# SPDX-License-Identifier: Apache-2.0
"""Each Hopper primitive alone: wgmma forms, boxes of the copy engine, a ring across a cluster, stmatrix. Needs SM90."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashinfer.compilation_context import sm90a_nvcc_flags
from flashinfer.jit import env as jit_env
from flashinfer.jit import gen_jit_spec

from .devices import needs_hopper

pytestmark = needs_hopper

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def primitives():
    source = Path(__file__).with_name("primitives.cu")
    spec = gen_jit_spec(
        "test_hopper_primitives",
        [source],
        extra_cuda_cflags=sm90a_nvcc_flags,
        extra_include_paths=[jit_env.FLASHINFER_CSRC_DIR],
    )
    return spec.build_and_load()


def small_integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return integers in -4 .. 4: products and sums are exact in fp32, so results are equal, not close."""
    return torch.randint(-4, 5, shape, device="cuda").to(torch.float32).to(dtype)


@pytest.mark.parametrize("n", [8, 16, 32, 48, 64, 88, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3])
def test_wgmma_k_major(primitives, dtype, n):
    k = 128 // dtype.itemsize
    a, b = small_integers(64, k, dtype=dtype), small_integers(n, k, dtype=dtype)
    c = torch.full((64, n), torch.nan, device="cuda")
    primitives.product(c, a, b)
    assert torch.equal(c, a.float() @ b.float().T)


@pytest.mark.parametrize("form", ["a", "b", "ab", "registers", "registers b"])
def test_wgmma_mn_major_and_registers(primitives, form):
    """Check N = 128, two slabs of 64 columns: swapped offsets in the descriptor would change the result."""
    of_a, of_b = form in ("a", "ab"), form in ("b", "ab", "registers b")
    a, b = small_integers(64, 64, dtype=BF16), small_integers(128, 64, dtype=BF16)
    c = torch.full((64, 128), torch.nan, device="cuda")
    stored = (a.T.contiguous() if of_a else a, b.T.contiguous() if of_b else b)
    primitives.product_form(c, *stored, of_a, of_b, form.startswith("registers"))
    assert torch.equal(c, a.float() @ b.float().T)


@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
def test_ring_with_multicast(primitives, rows):
    """Check boxes past the end: loads give zeros and stores are dropped; the row after the last keeps its value."""
    x = torch.randn(rows, 64, device="cuda").to(BF16)
    y = torch.full((rows + 1, 64), torch.nan, device="cuda", dtype=BF16)
    primitives.ring_copy(y[:rows], x)
    assert torch.equal(y[:rows], x)
    assert y[rows].isnan().all()


def test_store_matrix(primitives):
    plain, transposed = (torch.zeros(16, 16, dtype=torch.int16, device="cuda") for _ in range(2))
    primitives.store_matrix(plain, transposed)
    expected = torch.arange(256, device="cuda", dtype=torch.int16).view(16, 16)
    assert torch.equal(plain, expected)
    assert torch.equal(transposed, expected.T)
