# SPDX-License-Identifier: Apache-2.0
"""moe_permute, moe_unpermute and the permutations that quantise: values, rows without a token, views."""

from __future__ import annotations

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.fused_moe import moe_permute, moe_unpermute
from flashinfer.jit.fused_moe.routing import get_moe_permute_module
from flashinfer.testing import assert_close
from flashinfer.trace.templates.fused_moe_permute import moe_permute_trace, moe_unpermute_trace

from ..tensors import view_of_wider

HALVES = [torch.float16, torch.bfloat16]
COLUMNS = [8, 37, 1160]  # one vector; no vectors; more than a block of threads has in flight


def row_to_pair(tokens: int, top_k: int, device: str) -> torch.Tensor:
    """Make pairs in random order, with gaps."""
    pairs = torch.randperm(tokens * top_k, device=device).int()
    return torch.cat([pairs[:3], torch.full_like(pairs[:2], -1), pairs[3:]])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_copies(device, dtype, columns):
    x = torch.randn(5, columns, device=device).to(dtype)
    rows = row_to_pair(5, 3, device)
    out = torch.full((20, columns), 0.5, device=device).to(dtype)
    arguments = (x, out.clone(), None, rows, None, len(rows), 3, 1)
    expected = moe_permute_trace.reference(
        input=x.float(),
        permuted_output=out.float(),
        permuted_idx_to_expanded_idx=rows,
        max_num_permuted_tokens=len(rows),
        top_k=3,
    )
    assert moe_permute(*arguments) is None
    assert torch.equal(arguments[1].float(), expected)


def test_rows_of_wider_tensors(device):
    x, out = (view_of_wider(torch.randn(n, 24, device=device)) for n in (4, 8))
    rows = torch.arange(8, dtype=torch.int32, device=device)
    moe_permute(x, out, None, rows, None, 8, 2, 1)
    assert torch.equal(out, x.repeat_interleave(2, 0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_one_factor(device, dtype, columns):
    """Check codes of one factor for all; the largest number saturates."""
    x = torch.randn(5, columns, device=device).to(dtype)
    x[0, 0] = 500.0
    rows, factor = row_to_pair(5, 2, device), torch.tensor([1.75], device=device)
    for q in (factor, None):
        out = torch.zeros(len(rows), columns, dtype=torch.float8_e4m3fn, device=device)
        get_moe_permute_module(device).moe_permute_fp8(out, x, rows, q, 2, False)
        codes = (x.float() * (1.0 if q is None else 1.75)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        expected = torch.where((rows < 0).unsqueeze(1), 0.0, codes[rows.clamp(min=0).long() // 2])
        assert torch.equal(out.float(), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("columns", [128, 4224])
def test_scales_of_128_columns(device, dtype, columns):
    x = torch.randn(5, columns, device=device).to(dtype)
    x[1, :128] = 0
    rows = row_to_pair(5, 2, device)
    out = torch.zeros(len(rows), columns, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(columns // 128, 16, device=device)[:, : len(rows)]
    get_moe_permute_module(device).moe_permute_fp8_block(out, scales, x, rows, 2, False)
    blocks = x.float().view(5, -1, 128)
    amax = blocks.abs().amax(2, keepdim=True)
    q = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)  # 448.0 / amax would round twice
    codes = (blocks * q).clamp(-448, 448).to(torch.float8_e4m3fn).view(5, columns).float()
    is_empty, tokens = (rows < 0).unsqueeze(1), rows.clamp(min=0).long() // 2
    assert torch.equal(out.float(), torch.where(is_empty, 0.0, codes[tokens]))
    assert_close(scales.T, torch.where(is_empty, 0.0, (1 / q).squeeze(2)[tokens]))


@pytest.mark.parametrize(
    "dtypes",
    [(a, b) for a in (*HALVES, torch.float32) for b in (*HALVES, torch.float32) if torch.float32 in (a, b) or a == b],
    ids=str,
)
@pytest.mark.parametrize("columns", COLUMNS)
def test_sums(device, dtypes, columns):
    """Check sums of more slots than a thread has in flight; one token has no row."""
    rows = torch.randn(11, columns, device=device).to(dtypes[0])
    index = torch.randint(-1, 11, (4, 6), dtype=torch.int32, device=device)
    index[2] = -1
    scales = torch.rand(4, 6, device=device)
    for weights in (scales, None):
        out = torch.full((4, columns), torch.nan, dtype=dtypes[1], device=device)
        arguments = (rows, out, index, weights, 4, 6)
        expected = moe_unpermute_trace.reference(*arguments[:4])
        assert moe_unpermute(*arguments) is None
        assert_close(out, expected)
        assert bool((out[2] == 0).all())


def test_sums_are_those_of_the_order_of_slots(device):
    """Check the order: 1e8 and -1e8 cancel before 1 is added, not after."""
    rows = torch.tensor([[1e8], [1.0], [-1e8]], device=device)
    out = torch.empty(2, 1, device=device)
    moe_unpermute(rows, out, torch.tensor([[0, 2, 1], [0, 1, 2]], dtype=torch.int32, device=device), None, 2, 3)
    assert out.flatten().tolist() == [1.0, 0.0]


def test_nothing(device):
    x, index = torch.randn(0, 16, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device)
    moe_permute(x, x, None, index.flatten(), None, 0, 2, 1)
    moe_unpermute(x, x.clone(), index, None, 0, 2)


def test_errors(device):
    x, rows = torch.randn(4, 16, device=device), torch.arange(8, dtype=torch.int32, device=device)
    out = torch.empty(8, 16, device=device)
    with pytest.raises(ValueError, match="max_num_permuted_tokens = 9 elements, got 8"):
        moe_permute(x, out, None, rows, None, 9, 2, 1)
    with pytest.raises(ValueError, match=r"moe_permute: output must have at least 8 rows .*, got 7"):
        moe_permute(x, out[:7], None, rows, None, 8, 2, 1)
    with pytest.raises(ValueError, match=r"moe_permute: output must be float32.*, got float16"):
        moe_permute(x, out.half(), None, rows, None, 8, 2, 1)
    with pytest.raises(ValueError, match=r"\(num_tokens, top_k\) = \(4, 3\), got \(8,\)"):
        moe_unpermute(out, x, rows, None, 4, 3)
    with pytest.raises(ValueError, match=r"moe_unpermute: output must be float16 .* or float32, got bfloat16"):
        moe_unpermute(out.half(), x.bfloat16(), rows, None, 4, 2)
    with pytest.raises(ValueError, match="moe_unpermute: topk_scales must be float32, got float64"):
        moe_unpermute(out, x, rows, torch.ones(4, 2, device=device, dtype=torch.float64), 4, 2)
    if device == "cpu":  # a GPU does not look
        with pytest.raises(ValueError, match=r"row_to_pair must be less than 6 .*, got 6 at row 6"):
            moe_permute(x[:3], out, None, rows, None, 8, 2, 1)
        with pytest.raises(ValueError, match=r"expanded_idx_to_permuted_idx must be less than 7 .*, got 7"):
            moe_unpermute(out[:7], x, rows, None, 4, 2)


def test_numbers_of_rows_and_tokens_that_are_not_there(device):
    """Check that nothing behind the rows is read: the CPU refuses the numbers, CUDA takes them for none."""
    x, rows = torch.randn(3, 64, device=device), torch.full((5, 64), -1.0, device=device)
    pairs = torch.tensor([1, 6, -1, 1 << 30, 4], dtype=torch.int32, device=device)
    where, out = pairs[:4].view(2, 2).contiguous(), torch.empty(2, 64, device=device)
    if device == "cpu":
        with pytest.raises(ArgumentError, match=r"moe_permute: row_to_pair must be less than 6 .*, got 6 at row 1"):
            moe_permute(x, rows, None, pairs, None, 5, 2, 4)
        with pytest.raises(ArgumentError, match=r"moe_unpermute: expanded_idx_to_permuted_idx must be less than 3 "):
            moe_unpermute(x, out, where, None, 2, 2)
        return
    moe_permute(x, rows, None, pairs, None, 5, 2, 4)
    assert torch.equal(rows[[0, 4]], x[[0, 2]]) and bool((rows[1:4] == -1).all())
    moe_unpermute(x, out, where, None, 2, 2)
    assert torch.equal(out, torch.stack((x[1], torch.zeros_like(x[1]))))


def test_a_negative_number_of_rows_to_look_at(device):
    pairs, x = torch.zeros(5, dtype=torch.int32, device=device), torch.ones(3, 8, device=device)
    with pytest.raises(ArgumentError, match="moe_permute: max_num_permuted_tokens must be at least 0, got -1"):
        moe_permute(x, torch.ones(6, 8, device=device), None, pairs, None, -1, 2, 4)
