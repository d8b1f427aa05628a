# SPDX-License-Identifier: Apache-2.0
"""Products of few tokens with the routers of published models: ``mm_M1_16_*``."""

from __future__ import annotations

import pytest
import torch

from flashinfer import dsv3_ops, gemm

from ..bad_arguments import check_refused as refused

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {
    "mm_M1_16_K7168_N128": (7168, 128, BF16),
    "mm_M1_16_K7168_N256": (7168, 256, FP32),
    "mm_M1_16_K6144_N256": (6144, 256, FP32),
    "mm_M1_16_K7168_N256_bf16": (7168, 256, BF16),
    "mm_M1_16_K7168_N384": (7168, 384, FP32),
    "mm_M1_16_K7168_N384_bf16": (7168, 384, BF16),
    "mm_M1_16_K7168_N896": (7168, 896, FP32),
    "mm_M1_16_K7168_N896_bf16": (7168, 896, BF16),
}


@pytest.mark.parametrize("name", SIZES)
def test_matches_reference(device, name):
    """Check one token and the most tokens."""
    k, n, dtype = SIZES[name]
    op = getattr(gemm, name)
    for rows in (1, 16):
        a = torch.randn(rows, k, device=device).to(BF16)
        b = torch.randn(n, k, device=device).to(BF16).T
        out = torch.empty(rows, n, dtype=dtype, device=device)
        assert op(a, b, out, launch_with_pdl=False) is None
        expected = (a.double() @ b.double()).to(dtype)
        close = {"rtol": 1e-5, "atol": 1e-3} if dtype is FP32 else {"rtol": 1e-2, "atol": 1e-2}  # sums of size 85
        torch.testing.assert_close(out, expected, **close)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"mat_a": (17, 7168, BF16)}, "num_tokens"),
        ({"mat_a": (2, 7160, BF16)}, "hidden_dim"),
        ({"mat_b": (64, 7168, BF16)}, "num_experts"),
        ({"out": (3, 128, BF16)}, "num_tokens"),
        ({"mat_a": (2, 7168, torch.float16)}, "bfloat16"),
        ({"out": (2, 128, FP32)}, "bfloat16"),
    ],
)
def test_bad_arguments(changes, text):
    sizes = {"mat_a": (2, 7168, BF16), "mat_b": (128, 7168, BF16), "out": (2, 128, BF16)} | changes
    given = {name: torch.zeros(rows, columns, dtype=dtype) for name, (rows, columns, dtype) in sizes.items()}
    given["mat_b"] = given["mat_b"].T
    refused(gemm.mm_M1_16_K7168_N128, text, **given)


def test_layouts_and_devices():
    a, b, out = torch.zeros(1, 7168, dtype=BF16), torch.zeros(7168, 256, dtype=BF16), torch.zeros(1, 256)
    refused(gemm.mm_M1_16_K7168_N256, "column-major", a, b, out)
    refused(gemm.mm_M1_16_K7168_N256, "float32", a, b.T.contiguous().T, out.to(BF16))
    op = dsv3_ops.mm_M1_16_K7168_N256
    assert op is gemm.mm_M1_16_K7168_N256
    assert op.is_compute_capability_supported(90) and not op.is_compute_capability_supported(80)
