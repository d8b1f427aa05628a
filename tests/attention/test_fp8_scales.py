# SPDX-License-Identifier: Apache-2.0
"""Scales for kernels that multiply 8-bit queries, and which calls such kernels serve."""

from __future__ import annotations

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.attention.options import fa3_multiplies_fp8
from flashinfer.attention.scales import fp8_scales
from flashinfer.jit.attention.generate import hopper_serves

F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
QUERY = torch.zeros(3, 4, 64).to(E4M3)


def test_numbers_multiply_sm_scale():
    """Numbers for q and k, and one-element tensors on the host, need no tensor; those for v do."""
    scales, sm_scale = fp8_scales("op", QUERY, 0.5, (2.0, torch.tensor([4.0]), 3.0), 2, q_scale=8.0, k_scale=None)
    assert sm_scale == 0.5 * 2 * 4 * 8
    assert scales[:2] == [None, None] and scales[2].tolist() == [3.0, 3.0]


def test_tensors_stay_tensors():
    given = (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0]).half(), torch.tensor([7.0, 8.0]))
    scales, sm_scale = fp8_scales("op", QUERY, 0.5, given, 2)
    assert sm_scale == 0.5
    assert scales[0] is not None and scales[0].data_ptr() == given[0].data_ptr()  # used in place, no launch
    for got, want in zip(scales, given, strict=True):
        assert got.dtype == torch.float32 and got.is_contiguous() and torch.equal(got, want.float())


def test_no_scales():
    assert fp8_scales("op", QUERY, 0.5, (None, None, None), 2) == ([None, None, None], 0.5)


def test_scales_of_another_number_of_heads():
    with pytest.raises(ArgumentError, match=r"op: scale_k must have 1 or 2 elements \(one for each head.*, got 3"):
        fp8_scales("op", QUERY, 0.5, (None, torch.ones(3), None), 2)


@pytest.mark.parametrize(
    "dtypes, dims, pos_encoding, serves",
    [
        ((BF16, BF16, BF16), (128, 128), 0, True),
        ((BF16, BF16, F16), (128, 128), 0, False),
        ((BF16, E4M3, BF16), (128, 128), 0, True),
        ((F16, E5M2, F16), (64, 64), 0, True),
        ((F16, torch.uint8, F16), (128, 128), 0, False),
        ((E4M3, E4M3, BF16), (128, 128), 0, True),
        ((E4M3, E4M3, F16), (256, 256), 0, True),
        ((E4M3, E4M3, F16), (48, 64), 0, False),
        ((E4M3, BF16, BF16), (128, 128), 0, False),
        ((E5M2, E5M2, BF16), (128, 128), 0, False),
        ((E4M3, E4M3, BF16), (128, 128), 1, False),
    ],
    ids=str,
)
def test_what_the_hopper_kernels_serve(dtypes, dims, pos_encoding, serves):
    assert hopper_serves(dtypes, *dims, pos_encoding) == serves
    assert fa3_multiplies_fp8(*dtypes, *dims, pos_encoding) == (serves and dtypes[0] == E4M3)
