# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of low-rank adapters on the CPU (tests/emulation), against the kernels of the CPU.

Which kernel a call takes follows from the numbers of its pairs, tokens and columns: tests that compare bits make the
same sums in calls of different size.
"""

from __future__ import annotations

import ctypes
from typing import Any, Optional

import pytest
import torch

from flashinfer.fused_moe import (
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_gemm1_lora_delta,
    bgmv_moe_gemm2_lora_delta,
    bgmv_moe_shrink,
)
from flashinfer.fused_moe.bgmv_moe import _pairs_by_token  # type: ignore[attr-defined]
from flashinfer.testing import assert_close

from ..emulation.build import Library, compile_emulated
from ..guard_pages import guarded, written_outside
from .adapters import EXPERTS, LORAS, TOKENS, bank, pairs_of, table

# rank and features: vectors; more than a step of either kernel; neither in vectors
SIZES = [(16, 64), (136, 264), (5, 37)]
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_bgmv.cpp", tmp_path_factory)


class Pairs:
    """The pairs of a call, with matrices in a table of addresses or in a bank."""

    def __init__(
        self,
        w: torch.Tensor,
        stride: int,
        experts: torch.Tensor,
        loras: torch.Tensor,
        tokens: Optional[torch.Tensor] = None,
        rows: Optional[torch.Tensor] = None,
        adapters: int = LORAS,
        num_rows: int = 1 << 40,
    ) -> None:
        table, in_bank = (w.view(-1, w.shape[-1]), None) if w.dim() < 4 else (None, w)
        self.slices = 1 if table is None else table.shape[0]
        self.pairs, self.tokens = experts.numel(), len(loras)
        lists = [
            x for ids in (tokens, experts, loras, rows) for x in (ids, ids is not None and ids.dtype == torch.int64)
        ]
        numbers = [self.pairs, self.tokens, w.shape[1] if table is None else w.shape[-1], self.slices]
        matrices = [table, in_bank, in_bank is not None and w.stride(1), stride]
        self.fields = [*matrices, *lists, *numbers, experts.shape[-1], adapters, num_rows]


def call(library: Library, name: str, by: Pairs, *fields: Any) -> None:
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else int(x or 0) for x in (*by.fields, *fields)]
    packed = (ctypes.c_int64 * len(values))(*values)
    assert library.call(name, ctypes.addressof(packed)) == 0


def shrink(library: Library, by: Pairs, y: torch.Tensor, x: torch.Tensor, *, per_pair=False, overwrites=False) -> None:
    call(library, "shrink", by, y, TYPES[y.dtype], x, per_pair, x.shape[1], y.shape[2], overwrites)


def expand(
    library: Library,
    by: Pairs,
    y: torch.Tensor,
    x: torch.Tensor,
    columns: int,
    *,
    weights: Optional[torch.Tensor] = None,
    starts: Optional[torch.Tensor] = None,
    start: int = 0,
    order: Optional[torch.Tensor] = None,
    offsets: Optional[torch.Tensor] = None,
    zeros: int = 0,
    scale: int = 1,
    finalize: bool = True,
    overwrites: bool = False,
) -> None:
    of_slice = x.stride(0) if x.shape[0] == by.slices else 0
    fields = (y, TYPES[y.dtype], y.stride(0), x, TYPES[x.dtype], of_slice, weights, starts, start, order, offsets)
    call(library, "expand", by, *fields, x.shape[2], columns, zeros, scale, finalize, overwrites)


def published(w_ptr: torch.Tensor, stride: int, by: dict[str, torch.Tensor]) -> Pairs:
    return Pairs(w_ptr, stride, by["expert_ids"], by["lora_indices"], by["sorted_token_ids"])


def nan(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, float("nan"), dtype=dtype)


@pytest.mark.parametrize("rank, features", SIZES)
@pytest.mark.parametrize("per_pair", [False, True])
def test_shrink(library, rank, features, per_pair):
    w_ptr, stride = table("cpu", *(bank(rank, features, "cpu", BF16) for _ in range(2)))
    by, y = pairs_of("cpu"), torch.randn(2, 18, rank)
    x = torch.randn(18 if per_pair else TOKENS, features).bfloat16()
    expected = y.clone()
    bgmv_moe_shrink(expected, x, w_ptr, **by, lora_stride=stride, per_pair_input=per_pair)
    shrink(library, published(w_ptr, stride, by), y, x, per_pair=per_pair)
    assert_close(y, expected)


@pytest.mark.parametrize("rank, features", SIZES)
@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, BF16], ids=str)
def test_expand(library, rank, features, finalize, x_dtype):
    w_ptr, stride = table("cpu", *(bank(features, rank, "cpu", BF16) for _ in range(2)))
    by, x, weights = pairs_of("cpu"), torch.randn(2, 18, rank).to(x_dtype), torch.rand(18)
    starts = torch.tensor([0, features + 1])
    y = torch.randn(TOKENS if finalize else 18, 2 * features + 1)
    expected, ordered = y.clone(), y.clone()
    bgmv_moe_expand(
        *(expected, x, w_ptr, by["sorted_token_ids"], by["expert_ids"], weights, by["lora_indices"], starts),
        *([features, features], stride),
        finalize=finalize,
    )
    options: dict[str, Any] = {"weights": weights, "starts": starts, "finalize": finalize}
    expand(library, published(w_ptr, stride, by), y, x, features, **options)
    assert_close(y, expected)
    order, offsets = _pairs_by_token(by["sorted_token_ids"], TOKENS)
    expand(library, published(w_ptr, stride, by), ordered, x, features, order=order, offsets=offsets, **options)
    assert torch.equal(y, ordered)


def test_a_row_of_shrink_has_one_order(library):
    """Check that warps of four rows, in calls of many pairs, and of one row make the same bits."""
    w_ptr, stride = table("cpu", *(bank(136, 1304, "cpu", BF16) for _ in range(2)))
    by, x, y = pairs_of("cpu"), torch.randn(TOKENS, 1304).bfloat16(), torch.zeros(2, 18, 136)
    shrink(library, published(w_ptr, stride, by), y, x)  # 4896 rows
    one = torch.zeros(1, 18, 136)
    shrink(library, published(w_ptr[1:], stride, by), one, x)  # 2448
    assert torch.equal(one[0], y[1]) and bool((one != 0).any())


@pytest.mark.parametrize("rank", [24, 200, 6])  # a part of a step; several steps; no vectors
def test_sums_of_a_token_have_one_order(library, rank):
    """Check the same tokens in calls of few and of many, whose pairs are searched in two parts, listed, or ordered.

    Token 1 has more pairs than one round of products of the kernel for few tokens.
    """
    columns, tokens, pairs = 37, 140, 600
    w_ptr, stride = table("cpu", bank(columns, rank, "cpu", BF16))
    ids, experts = torch.randint(-2, tokens, (pairs,)), torch.randint(-1, EXPERTS, (pairs,))
    ids[::12] = 1
    loras, weights = torch.randint(-1, LORAS, (tokens,)), torch.rand(pairs)
    loras[1] = 2
    x, y = torch.randn(1, pairs, rank), nan(tokens, columns)
    of_all = Pairs(w_ptr, stride, experts, loras, ids)
    expand(library, of_all, y, x, columns, weights=weights, overwrites=True)
    expected = torch.zeros(tokens, columns)
    start = torch.zeros(1, dtype=torch.int64)
    bgmv_moe_expand(expected, x, w_ptr, ids, experts, weights, loras, start, [columns], stride)
    assert_close(y, expected)
    order, offsets = _pairs_by_token(ids, tokens)
    ordered, few, listed = nan(tokens, columns), nan(5, columns), nan(1, columns)
    expand(library, of_all, ordered, x, columns, weights=weights, order=order, offsets=offsets, overwrites=True)
    assert torch.equal(ordered, y)
    narrow = Pairs(w_ptr, stride, experts.int(), loras[:5].int(), ids.int())
    expand(library, narrow, few, x, columns, weights=weights, overwrites=True)
    assert torch.equal(few, y[:5])
    own = (ids == 1).nonzero().flatten()  # the same pairs, found by their number
    alone = Pairs(w_ptr, stride, experts[own].view(1, -1), loras[1:2])
    expand(library, alone, listed, x[:, own].contiguous(), columns, weights=weights[own], overwrites=True)
    assert torch.equal(listed, y[1:2])


@pytest.mark.parametrize("rank", [24, 6])
def test_pairs_alone_have_one_order(library, rank):
    """Check that threads with one and, in calls of many pairs, with four columns make the same bits."""
    columns, pairs = 300, 700
    weights = bank(columns, rank, "cpu", BF16)
    w_ptr, stride = table("cpu", weights)
    experts, loras = torch.randint(-20, EXPERTS, (pairs, 1)), torch.zeros(pairs, dtype=torch.int32)  # most are skipped
    experts[0] = 3
    x, y, few = torch.randn(1, pairs, rank), nan(pairs, columns + 4), nan(20, columns + 4)
    options: dict[str, Any] = {"zeros": 4, "finalize": False, "overwrites": True, "scale": 3}
    expand(library, Pairs(w_ptr, stride, experts, loras), y, x, columns, **options)
    expand(library, Pairs(weights, stride, experts[:20], loras), few, x[:, :20], columns, **options)
    assert torch.equal(few, y[:20])
    assert_close(y[0, :columns], 3 * (weights[0, 3].float() @ x[0, 0]))
    assert bool((y[:, columns:] == 0).all()) and bool((y[experts[:, 0] < 0] == 0).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("is_fused", [False, True])
def test_gemm1_delta(library, index_dtype, is_fused):
    """Check both kernels as the delta function launches them: results were not initialised, one A may serve two B."""
    hidden, inner, rank = 64, 40, 12
    a = bank(rank, hidden, "cpu", BF16)
    b = [bank(2 * inner if is_fused else inner, rank, "cpu", BF16) for _ in range(1 if is_fused else 2)]
    (w_a, stride_a), (w_b, stride_b) = table("cpu", a), table("cpu", *b)
    ids = torch.randint(-1, EXPERTS, (TOKENS, 2)).to(index_dtype)
    loras = torch.tensor([0, 1, -1, 2, 0, -1, 1], dtype=index_dtype)
    x, low, out = torch.randn(TOKENS, hidden).bfloat16(), nan(1, 14, rank), nan(14, 2 * inner, dtype=BF16)
    shrink(library, Pairs(w_a, stride_a, ids, loras), low, x, overwrites=True)
    columns = 2 * inner // len(b)
    expand(library, Pairs(w_b, stride_b, ids, loras), out, low, columns, scale=2, finalize=False, overwrites=True)
    expected = bgmv_moe_gemm1_lora_delta(x, w_a, stride_a, w_b, stride_b, ids, loras, rank, inner, scale=2.0)
    assert_close(out.view(TOKENS, 2, -1), expected)
    assert bool((out.view(TOKENS, 2, -1)[2] == 0).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_gemm2_delta(library, index_dtype):
    hidden, inner, rank = 160, 40, 16
    (w_a, stride_a), (w_b, stride_b) = (
        table("cpu", bank(*size, "cpu", BF16)) for size in ((rank, inner), (hidden, rank))
    )
    ids, rows = torch.randint(0, EXPERTS, (TOKENS, 2)), torch.randperm(2 * TOKENS)
    loras = torch.tensor([0, 1, -1, 2, 0, -1, 1])
    rows[1] = rows[6] = rows[7] = -1  # token 3 has no row left
    ids, rows, loras = (t.to(index_dtype) for t in (ids, rows, loras))
    x, weights = torch.randn(2 * TOKENS, inner).bfloat16(), torch.rand(TOKENS, 2)
    low, out = nan(1, 14, rank), nan(TOKENS, hidden, dtype=BF16)
    shrink(library, Pairs(w_a, stride_a, ids, loras, rows=rows), low, x, overwrites=True)
    assert bool(low[0, 1].isnan().all())  # nothing reads it
    expand(library, Pairs(w_b, stride_b, ids, loras, rows=rows), out, low, hidden, weights=weights, overwrites=True)
    call = (x, rows, w_a, stride_a, w_b, stride_b, ids, weights, loras, rank, hidden)
    assert_close(out, bgmv_moe_gemm2_lora_delta(*call))
    assert bool((out[[2, 3, 5]] == 0).all())


def test_banks_of_two_slices_at_odd_addresses(library):
    """Check banks read without a table: one aligned, one not; and columns after the last slice."""
    rank, hidden = 16, 48
    a = [bank(rank, hidden, "cpu", BF16) for _ in range(2)]
    odd = torch.randn(LORAS, EXPERTS + 1, 24 * rank + 3).bfloat16()[:, 1:, 1 : 24 * rank + 1].unflatten(2, (24, rank))
    b = [bank(40, rank, "cpu", BF16), odd]
    by, weights, x = pairs_of("cpu"), torch.rand(18), torch.randn(TOKENS, hidden).bfloat16()
    ids, experts, loras = (t.int() for t in by.values())
    out, start = nan(TOKENS, 70, dtype=BF16), 0
    for first, second in zip(a, b, strict=True):
        low, columns = nan(1, 18, rank), second.shape[2]
        shrink(library, Pairs(first, first.stride(0), experts, loras, ids), low, x, overwrites=True)
        pairs = Pairs(second, second.stride(0), experts, loras, ids)
        zeros = 6 if start else 0
        expand(library, pairs, out, low, columns, weights=weights, start=start, zeros=zeros, overwrites=True)
        start += columns
    expected = bgmv_moe(x, a, b, ids, experts, loras, weights, EXPERTS, output_dim=70)
    assert_close(out, expected)
    assert bool((out[:, 64:] == 0).all()) and bool((out[TOKENS - 1] == 0).all())


@pytest.mark.parametrize("finalize", [False, True])
def test_numbers_that_are_too_large_are_skipped(library, finalize):
    """Check adapters and rows that do not exist, as the CPU refuses them: nothing behind the banks and x is read."""
    rank, hidden = 16, 40
    a, b = (guarded(bank(*size, "cpu", BF16)) for size in ((rank, hidden), (hidden, rank)))
    ids = torch.randint(0, EXPERTS, (TOKENS, 2))
    loras = torch.tensor([0, LORAS, LORAS + 1, 1 << 31, 1 << 62, 2, 1])
    rows = torch.randperm(2 * TOKENS)
    rows[0], rows[11] = 2 * TOKENS, 1 << 40
    x, weights = guarded(torch.randn(2 * TOKENS, hidden).bfloat16()), torch.rand(TOKENS, 2)
    low, out = nan(1, 14, rank), nan(TOKENS if finalize else 14, hidden)
    shrink(library, Pairs(a, a.stride(0), ids, loras, rows=rows, num_rows=2 * TOKENS), low, x, overwrites=True)
    by = Pairs(b, b.stride(0), ids, loras, rows=rows, num_rows=2 * TOKENS)
    expand(library, by, out, low, hidden, weights=weights, finalize=finalize, overwrites=True)
    expected = torch.zeros(14, hidden)
    for pair in (1, 10, 12, 13):
        lora, expert = loras[pair // 2], ids.view(-1)[pair]
        expected[pair] = b[lora, expert].float() @ (a[lora, expert].float() @ x[rows[pair]].float())
    if finalize:
        expected = (expected * weights.view(-1, 1)).view(TOKENS, 2, hidden).sum(1)
    assert_close(out, expected)


def test_matrices_that_only_the_second_table_has(library):
    """Check that the second product reads zeros where the first has no matrix: what is between was not initialised."""
    rank, hidden = 136, 64
    (w_a, stride_a), (w_b, stride_b) = (
        table("cpu", bank(rank, hidden, "cpu", BF16)),
        table("cpu", bank(24, rank, "cpu", BF16)),
    )
    w_a[0, 2] = 0
    ids, loras = torch.tensor([[2, 1]] * 3), torch.tensor([1, 0, -1])
    x, low, out = torch.randn(3, hidden).bfloat16(), nan(1, 6, rank), nan(3, 24)
    shrink(library, Pairs(w_a, stride_a, ids, loras), low, x, overwrites=True)
    assert bool((low[0, [0, 2]] == 0).all()) and bool(low[0, 4:].isnan().all())
    expand(library, Pairs(w_b, stride_b, ids, loras), out, low, 24, weights=torch.ones(6), overwrites=True)
    assert not out.isnan().any() and bool((out[:2] != 0).any(1).all()) and bool((out[2] == 0).all())


@pytest.mark.parametrize("finalize", [False, True])
def test_columns_outside_of_y_are_not_written(library, finalize):
    w_ptr, stride = table("cpu", *(bank(40, 8, "cpu", BF16) for _ in range(2)))
    by, x, weights = pairs_of("cpu"), torch.randn(2, 18, 8), torch.rand(18)
    y = guarded(torch.zeros(TOKENS if finalize else 18, 90))
    starts = torch.tensor([1 << 40, -20])
    expand(library, published(w_ptr, stride, by), y, x, 40, weights=weights, starts=starts, finalize=finalize)
    assert bool((y[:, :20] != 0).any()) and bool((y[:, 20:] == 0).all()) and not written_outside(y)


def test_no_pairs(library):
    w_ptr, stride = table("cpu", bank(24, 8, "cpu", BF16))
    none, out = torch.zeros(0, dtype=torch.int64), nan(3, 24)
    by = Pairs(w_ptr, stride, none, torch.zeros(3, dtype=torch.int64), none)
    expand(library, by, out, torch.zeros(1, 0, 8), 24, overwrites=True)
    assert bool((out == 0).all())
