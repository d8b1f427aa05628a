# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of low-rank adapters on the CPU (tests/emulation), against the kernels of the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashinfer.fused_moe import bgmv_moe_expand, bgmv_moe_shrink
from flashinfer.fused_moe.bgmv_moe import _pairs_by_token  # type: ignore[attr-defined]
from flashinfer.testing import assert_close

from ..emulation.build import Library, compile_emulated
from .adapters import EXPERTS, TOKENS, bank, pairs_of, table

# rank and features: vectors; two parts of shared memory and blocks of both grids; neither in vectors
SIZES = [(16, 64), (136, 264), (5, 37)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_bgmv.cpp", tmp_path_factory)


def call(library: Library, name: str, w_ptr: torch.Tensor, stride: int, by: dict, *fields) -> None:
    pairs = [w_ptr, by["sorted_token_ids"], by["expert_ids"], by["lora_indices"]]
    numbers = [stride, len(by["sorted_token_ids"]), TOKENS, EXPERTS, w_ptr.shape[0]]
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else int(x or 0) for x in (*pairs, *numbers, *fields)]
    packed = (ctypes.c_int64 * len(values))(*values)
    assert library.call(name, ctypes.addressof(packed)) == 0


@pytest.mark.parametrize("rank, features", SIZES)
@pytest.mark.parametrize("per_pair", [False, True])
def test_shrink(library, rank, features, per_pair):
    w_ptr, stride = table("cpu", *(bank(rank, features, "cpu", torch.bfloat16) for _ in range(2)))
    by, y = pairs_of("cpu"), torch.randn(2, 18, rank)
    x = torch.randn(18 if per_pair else TOKENS, features).bfloat16()
    expected = y.clone()
    bgmv_moe_shrink(expected, x, w_ptr, **by, lora_stride=stride, per_pair_input=per_pair)
    rows = None if per_pair else by["sorted_token_ids"]
    call(library, "shrink", w_ptr, stride, by, y, x, rows, features, rank)
    assert_close(y, expected)


@pytest.mark.parametrize("rank, features", SIZES)
@pytest.mark.parametrize("finalize", [False, True])
def test_expand(library, rank, features, finalize):
    w_ptr, stride = table("cpu", *(bank(features, rank, "cpu", torch.bfloat16) for _ in range(2)))
    by, x, weights = pairs_of("cpu"), torch.randn(2, 18, rank), torch.rand(18)
    starts = torch.tensor([0, features + 1])
    y = torch.randn(TOKENS if finalize else 18, 2 * features + 1)
    expected = y.clone()
    bgmv_moe_expand(
        *(expected, x, w_ptr, by["sorted_token_ids"], by["expert_ids"], weights, by["lora_indices"], starts),
        *([features, features], stride),
        finalize=finalize,
    )
    order, offsets = _pairs_by_token(by["sorted_token_ids"], TOKENS)
    fields = (y, y.shape[1], x, weights, starts, order, offsets, rank, features, finalize)
    call(library, "expand", w_ptr, stride, by, *fields)
    assert_close(y, expected)
