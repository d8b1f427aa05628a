# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels before the products of a layer of experts, on the CPU (tests/emulation): tables and rows."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashinfer.trace.templates.gemm_blocks import to_e4m3_blocks
from flashinfer.trace.templates.shared import to_fp8

from ..emulation.build import Library, compile_emulated
from .layers import BF16, E4M3, by_rows

ELEMENTS = {BF16: 2, E4M3: 3}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_stages.cpp", tmp_path_factory)


@pytest.mark.parametrize("tokens, experts", [(1, 5), (9, 40), (100, 40)], ids=["one", "several", "many"])
@pytest.mark.parametrize("is_block", [False, True], ids=["copied", "quantised"])
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("columns", [272, 384], ids=["part", "whole"])  # the last block of 128 columns
def test_sort_and_permute(library, columns, launches, is_block, tokens, experts):
    """Experts 2 to ``experts`` + 1 are local; a slot without one has no row."""
    top_k, pairs = 3, tokens * 3
    ids = torch.randint(0, experts + 4, (tokens, top_k), dtype=torch.int32)
    x = torch.randn(tokens, columns).to(BF16)
    offsets, pair_to_row, row_to_pair = (torch.full((n,), -7, dtype=torch.int32) for n in (experts + 1, pairs, pairs))
    out = torch.zeros(pairs, columns, dtype=torch.uint8 if is_block else BF16)
    scales = torch.zeros(-(-columns // 128), pairs) if is_block else None
    fields = [t.data_ptr() for t in (ids, offsets, pair_to_row, row_to_pair)] + [tokens, top_k, 2, experts]
    fields += [x.data_ptr(), ELEMENTS[BF16], columns, out.data_ptr(), ELEMENTS[E4M3 if is_block else BF16]]
    fields += [0 if scales is None else scales.data_ptr()]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("sort_and_permute", launches, ctypes.addressof(packed)) == 0

    local = ids.flatten().long() - 2
    order = [pair for e in range(experts) for pair in torch.where(local == e)[0].tolist()]
    assert row_to_pair.tolist() == order + [-1] * (pairs - len(order))
    assert pair_to_row.tolist() == [order.index(pair) if pair in order else -1 for pair in range(pairs)]
    assert offsets.tolist() == [int(((local >= 0) & (local < e)).sum()) for e in range(experts + 1)]
    rows = x[torch.tensor(order, dtype=torch.long) // top_k]
    if scales is None:
        assert torch.equal(out[: len(order)], rows)
        return
    padded = torch.nn.functional.pad(rows.float(), (0, -columns % 128))
    codes, expected = to_e4m3_blocks(padded, 1)
    assert torch.equal(out[: len(order)], codes[:, :columns].view(torch.uint8))
    assert torch.equal(scales[:, : len(order)].mT, expected)


def test_tokens_quantised_once(library):
    """Row t of the operand is token t, with the codes and scales that its copies would have; others are left alone."""
    tokens, top_k, experts, columns = 13, 3, 7, 384
    ids, x = torch.randint(0, experts, (tokens, top_k), dtype=torch.int32), torch.randn(tokens, columns).to(BF16)
    x[4, 128:256] = 0
    pairs = tokens * top_k
    tables = [torch.full((n,), -7, dtype=torch.int32) for n in (experts + 1, pairs, pairs)]
    out, scales = torch.full((pairs, columns), 77, dtype=torch.uint8), torch.full((columns // 128, pairs), torch.nan)
    fields = [t.data_ptr() for t in (ids, *tables)] + [tokens, top_k, 0, experts]
    fields += [x.data_ptr(), ELEMENTS[BF16], columns, out.data_ptr(), ELEMENTS[E4M3], scales.data_ptr()]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("sort_and_permute", 4, ctypes.addressof(packed)) == 0
    codes, expected = to_e4m3_blocks(x.float(), 1)
    assert torch.equal(out[:tokens], codes.view(torch.uint8)) and bool((out[tokens:] == 77).all())
    assert torch.equal(scales[:, :tokens].mT, expected) and bool(scales[:, tokens:].isnan().all())


@pytest.mark.parametrize("launches", [2, 3], ids=["launches", "cluster"])
def test_sort_by_several_blocks(library, launches):
    """Blocks tell each other their counts between two launches, or at the barrier of their cluster."""
    tokens, top_k, experts, columns = 850, 5, 40, 8
    ids = torch.randint(0, experts + 4, (tokens, top_k), dtype=torch.int32)
    x, out = torch.randn(tokens, columns).to(BF16), torch.zeros(tokens * top_k, columns, dtype=BF16)
    offsets, pair_to_row, row_to_pair = (
        torch.full((n,), -7, dtype=torch.int32) for n in (experts + 1, ids.numel(), ids.numel())
    )
    fields = [t.data_ptr() for t in (ids, offsets, pair_to_row, row_to_pair)] + [tokens, top_k, 2, experts]
    fields += [x.data_ptr(), ELEMENTS[BF16], columns, out.data_ptr(), ELEMENTS[BF16], 0]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("sort_and_permute", launches, ctypes.addressof(packed)) == 0
    local = ids.flatten().long() - 2
    is_local = (local >= 0) & (local < experts)
    order = torch.where(is_local, local, experts).argsort(stable=True)[: int(is_local.sum())]
    assert torch.equal(row_to_pair[: len(order)].long(), order) and bool((row_to_pair[len(order) :] == -1).all())
    expected = torch.full_like(pair_to_row, -1)
    expected[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(pair_to_row, expected)
    assert offsets.tolist() == [int((local[is_local] < e).sum()) for e in range(experts + 1)]
    assert torch.equal(out[: len(order)], x[order // top_k])


@pytest.mark.parametrize("launches, element", [(5, E4M3), (2, BF16)], ids=["rows", "wide"])
def test_codes_of_rows(library, launches, element):
    """e4m3 codes with a scale per row, the operands of MXFP4 weights; e4m3 numbers stored as bf16, for int4 weights."""
    tokens, columns = 5, 272
    ids, x = torch.arange(tokens, dtype=torch.int32).view(tokens, 1), torch.randn(tokens, columns).to(BF16)
    x[2] = 0
    tables, scales = [torch.zeros(n, dtype=torch.int32) for n in (tokens + 1, tokens, tokens)], torch.ones(tokens)
    out = torch.full((tokens, columns), 77, dtype=torch.float32).to(element)
    fields = [t.data_ptr() for t in (ids, *tables)] + [tokens, 1, 0, tokens]
    fields += [x.data_ptr(), ELEMENTS[BF16], columns, out.data_ptr(), ELEMENTS[element], scales.data_ptr()]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("sort_and_permute", launches, ctypes.addressof(packed)) == 0
    expected = by_rows(x) if element == E4M3 else to_fp8(x.float(), E4M3).float()
    torch.testing.assert_close(out.float() * scales.view(-1, 1), expected, rtol=1e-6, atol=0)
