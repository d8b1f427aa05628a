# SPDX-License-Identifier: Apache-2.0
"""Block-sparse patterns of equal blocks against attention with the same pattern as a mask."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.sparse import convert_bsr_mask_layout

from ..attention.inputs import offsets
from ..attention.reference import Attention
from ..attention.wrappers import close, workspace
from ..bad_arguments import pattern
from .inputs import DIM, HEADS, KV_HEADS, pattern_of, tensors


@pytest.mark.parametrize("R", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("C", [1, 16, 20])
def test_pattern(device, R, C):
    M, N = 95, 120 if C == 20 else 128
    indptr, indices, dense = pattern_of(M, N, R, C, 0.4)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr.to(device), indices.to(device), M, N, R, C, HEADS, KV_HEADS, DIM)
    q, k, v = tensors(M, N, device)
    expected = Attention(mask=dense)(q, k, v)
    close(wrapper.run(q, k, v, return_lse=True), expected)
    out, lse = torch.empty_like(q), torch.full((M, HEADS), torch.nan, device=device)
    assert wrapper.run(q, k, v, out=out, lse=lse) is out
    assert (out[:R] == 0).all()
    close((out, lse), expected)


@pytest.mark.parametrize("R, C", [(16, 16), (7, 4)])
def test_masks_inside_blocks(device, R, C):
    M, N = 40, 64
    indptr, indices, dense = pattern_of(M, N, R, C, 0.5)
    mask = torch.rand(len(indices), R, C) < 0.5
    for row, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        for i in range(begin, end):
            keys = slice(int(indices[i]) * C, int(indices[i] + 1) * C)
            rows = slice(row * R, min((row + 1) * R, M))
            dense[rows, keys] = mask[i][: rows.stop - rows.start]
    q, k, v = tensors(M, N, device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sizes = (M, N, R, C, HEADS, KV_HEADS, DIM)
    wrapper.plan(indptr.to(device), indices.to(device), *sizes, mask=mask.to(device), sm_scale=0.3)
    close(wrapper.run(q, k, v, return_lse=True), Attention(mask=dense, sm_scale=0.3)(q, k, v))
    if M % R == 0:
        flat = convert_bsr_mask_layout(mask, indptr)
        per_row = (indptr[1:] - indptr[:-1]).long() * R * C
        packed, _ = flashinfer.segment_packbits(flat, torch.tensor(offsets(per_row.tolist())), bitorder="little")
        wrapper.plan(indptr, indices, *sizes, packed_mask=packed.to(device), sm_scale=0.3)
        close(wrapper.run(q, k, v, return_lse=True), Attention(mask=dense, sm_scale=0.3)(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_blocks_of_fewer_keys(device, causal, is_masked):
    """Check blocks whose last keys are padding: the result is that of a mask without them."""
    M, N, R, C = 42, 64, 16, 8
    indptr, indices, dense = pattern_of(M, N, R, C, 0.6)
    lens = torch.randint(0, C + 1, (N // C,))
    exists = (torch.arange(C) < lens[:, None]).flatten()
    mask = torch.rand(len(indices), R, C) < 0.7 if is_masked else None
    seen = torch.zeros_like(dense)
    for row, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        queries = min(R, M - row * R)
        for i in range(begin, end):
            at = (i - begin) * C + torch.arange(C)  # among the keys of this row of blocks
            block = torch.ones(queries, C, dtype=torch.bool) if mask is None else mask[i, :queries]
            if causal and mask is None:
                block = at <= ((end - begin) * C - queries + torch.arange(queries))[:, None]
            seen[row * R : row * R + queries, int(indices[i]) * C : (int(indices[i]) + 1) * C] = block
    q, k, v = tensors(M, N, device)
    k[~exists.to(device)] = torch.nan
    v[~exists.to(device)] = 0
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sizes = (M, N, R, C, HEADS, KV_HEADS, DIM)
    given = None if mask is None else mask.to(device)
    causes = causal and mask is None
    wrapper.plan(indptr, indices, *sizes, mask=given, causal=causes, kv_block_lens=lens.int().to(device))
    k0 = k.nan_to_num(0)
    close(wrapper.run(q, k, v, return_lse=True), Attention(mask=seen & exists)(q, k0, v))


def test_lists_of_blocks(device):
    """Check a pattern given as lists of equal length with counts."""
    M, N, R, C = 40, 64, 8, 16
    indptr, indices, dense = pattern_of(M, N, R, C, 0.5)
    counts = indptr[1:] - indptr[:-1]
    lists = torch.full((len(counts), N // C), 99, dtype=torch.int32)
    for row, count in enumerate(counts.tolist()):
        lists[row, :count] = indices[indptr[row] : indptr[row] + count]
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sizes = (M, N, R, C, HEADS, KV_HEADS, DIM)
    wrapper.plan(None, None, *sizes, q2k_indices=lists.to(device), q2k_num=counts.int().to(device))
    q, k, v = tensors(M, N, device)
    close(wrapper.run(q, k, v, return_lse=True), Attention(mask=dense)(q, k, v))


def test_convert_bsr_mask_layout(device):
    indptr, R, C = torch.tensor([0, 2, 2, 5]), 3, 4
    mask = torch.rand(5, R, C, device=device) < 0.5
    rows = [mask[a:b].transpose(0, 1).reshape(-1) for a, b in ((0, 2), (2, 2), (2, 5))]
    assert torch.equal(convert_bsr_mask_layout(mask, indptr), torch.cat(rows))


def test_causal_and_legacy_names(device):
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.begin_forward(indptr, indices, 32, 32, 16, 16, HEADS, KV_HEADS, DIM, causal=True)
    q, k, v = tensors(32, 32, device)
    close(wrapper.run(q, k, v, return_lse=True), Attention(causal=True)(q, k, v))
    out = wrapper.forward(q, k, v, sm_scale=0.5)
    torch.testing.assert_close(out.float(), Attention(causal=True, sm_scale=0.5)(q, k, v)[0], rtol=1e-3, atol=1e-3)
    wrapper.end_forward()


PLAN = {"indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([0, 1]), "M": 32, "N": 32, "R": 16, "C": 16}
LISTS = {"indptr": None, "indices": None, "q2k_indices": torch.tensor([[0], [1]]), "q2k_num": torch.tensor([1, 1])}
SM100_ONLY = ["kv_splits", "use_clc", "q_scale", "k_scale", "v_scale"]
BAD = [
    ({"block_mask": torch.ones(1)}, "block_mask must be None.*, got a value"),
    *(({name: 1}, f"{name} must be None.*only backends for SM100.*, got a value") for name in SM100_ONLY),
    ({"q2k_num": torch.ones(2)}, "indptr and indices must be None with q2k_indices.*, got both"),
    ({"kv_block_lens": torch.tensor([16, 17])}, "kv_block_lens must be 2 numbers (N / C) from 0 to 16.*, got [16, 17]"),
    ({"kv_block_lens": torch.tensor([16])}, "kv_block_lens must be 2 numbers.*, got [16]"),
    (
        {"kv_block_lens": torch.tensor([8, 16]), "packed_mask": torch.ones(64, dtype=torch.uint8)},
        "packed_mask must be None with kv_block_lens.*, got both",
    ),
    (
        {"kv_block_lens": torch.tensor([8, 16]), "mask": torch.ones(2, 16, 8, dtype=torch.bool)},
        "mask must have shape (2, 16, 16).*, got (2, 16, 8)",
    ),
    (LISTS | {"q2k_num": None}, "q2k_indices and q2k_num must be given together.*, got one of them"),
    (
        LISTS | {"q2k_indices": torch.zeros(3, 1, dtype=torch.int32)},
        "q2k_indices must have shape (2, most).*, got (3, 1)",
    ),
    (LISTS | {"q2k_num": torch.tensor([1, 2])}, "q2k_num must be 2 numbers from 0 to 1.*, got [1, 2]"),
    ({"indptr": None}, "indptr or indices must be tensors, got None"),
    ({"indices": torch.tensor([0, 2])}, "indices out of bound"),
    ({"indices": torch.tensor(0)}, "indices must have 1 dimension.*, got 0"),
    ({"indptr": torch.tensor([0, 1000, 2]), "mask": torch.ones(2, 16, 16)}, "indptr must not decrease"),
    ({"N": 31}, "must divide the 31 keys"),
    ({"M": 33}, "indptr must have 4 elements (ceil(M / R) + 1).*, got 3"),
    ({"mask": torch.ones(2, 8, 16)}, "mask must have shape (2, 16, C).*, got (2, 8, 16)"),
]


@pytest.mark.parametrize("change, text", BAD, ids=[text for _, text in BAD])
def test_bad_plan(device, change, text):
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    with pytest.raises(ValueError, match=pattern(text)):
        wrapper.plan(**(PLAN | change), num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)


@pytest.mark.parametrize("offsets", [[0, 1000, 2], [0, 1, 3], [1, 2, 2]])
def test_bad_offsets_of_a_mask(offsets):
    with pytest.raises(ArgumentError, match="convert_bsr_mask_layout: indptr "):
        convert_bsr_mask_layout(torch.ones(2, 4, 4, dtype=torch.bool), torch.tensor(offsets))


def test_bad_run(device):
    q, k, v = tensors(32, 32, device)
    with pytest.raises(ArgumentError, match=r"vsa_sm100.*needs a Blackwell GPU"):
        flashinfer.BlockSparseAttentionWrapper(workspace(device), backend="vsa_sm100")
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    for call in (wrapper.run, wrapper.forward):
        with pytest.raises(ArgumentError, match=r"plan\(\) must be called before run"):
            call(q, k, v)
    wrapper.plan(**PLAN, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    with pytest.raises(
        ArgumentError, match=pattern("k must have shape (32, num_kv_heads, head_dim).*, got (31, 2, 64)")
    ):
        wrapper.run(q, k[:31], v)


def test_lists_are_no_tensors(device):
    indptr, indices, _ = pattern_of(4, 8, 2, 2, 1.0)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr, indices, 4, 8, 2, 2, HEADS, KV_HEADS, DIM)
    given = dict(zip("qkv", tensors(4, 8, device), strict=True))
    for name, x in given.items():
        with pytest.raises(
            TypeError, match=rf"BlockSparseAttentionWrapper\.run: {name} must be a tensor.*, got a list"
        ):
            wrapper.run(**{**given, name: x.tolist()})
