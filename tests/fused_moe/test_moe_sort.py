# SPDX-License-Identifier: Apache-2.0
"""moe_sort: rows of each expert, gaps, tables of tiles, experts of other ranks."""

from __future__ import annotations

import pytest
import torch

from flashinfer.fused_moe import moe_sort
from flashinfer.fused_moe.cute_dsl import moe_utils
from flashinfer.fused_moe.utils import make_random_topk_ids
from flashinfer.jit.fused_moe.routing import get_moe_sort_module
from flashinfer.trace.templates.fused_moe_sort import moe_sort_trace

# Tokens, slots, experts, tile: nothing; one token; fewer pairs than experts; one block of 1024 threads; a thread with
# several pairs; several blocks; more experts than a block has threads.
SHAPES = [
    (0, 2, 8, 4),
    (1, 8, 128, 16),
    (3, 2, 8, 128),
    (128, 8, 256, 8),
    (200, 8, 64, 16),
    (1200, 8, 96, 128),
    (700, 10, 640, 1),
]


def sort_rows(ids: torch.Tensor, first: int, experts: int, align: int = 1) -> dict[str, torch.Tensor]:
    """Call the module as the fused kernel does: packed rows or rows with gaps, no tables of tiles."""
    module = get_moe_sort_module(ids.device.type)
    rows = (ids.numel() + min(ids.numel(), experts) * (align - 1)) // align * align
    sizes = {"offsets": experts + 1, "pair_to_row": ids.numel(), "row_to_pair": rows, "counts": experts}
    sizes["workspace"] = module.moe_sort_workspace_ints(ids.numel(), experts)
    t = {name: torch.full((size,), -7, dtype=torch.int32, device=ids.device) for name, size in sizes.items()}
    outputs = (t["offsets"], t["pair_to_row"], t["row_to_pair"], t["counts"], *(None,) * 5, t["workspace"])
    module.moe_sort(*outputs, ids, first, experts, align, 0, False)
    return t


@pytest.mark.parametrize("tokens, top_k, experts, tile", SHAPES)
def test_tiles(device, tokens, top_k, experts, tile):
    ids = make_random_topk_ids(experts, tokens, top_k, torch.device(device))
    actual = moe_sort(ids, None, experts, top_k, tile_tokens_dim=tile)
    expected = moe_sort_trace.reference(ids, experts, tile_tokens_dim=tile)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.int32 and torch.equal(one, other)


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("tokens, top_k, experts", [(5, 2, 4), (100, 8, 256), (900, 6, 160)])
def test_rows(device, tokens, top_k, experts, align):
    """Check the order against a stable sort of torch, for the middle half of the experts."""
    first, local = experts // 4, experts // 2
    ids = make_random_topk_ids(experts, tokens, top_k, torch.device(device))
    t = sort_rows(ids, first, local, align)
    flat = ids.flatten().long() - first
    is_local = (flat >= 0) & (flat < local)
    counts = torch.bincount(flat[is_local], minlength=local)
    padded = (counts + align - 1) // align * align
    assert torch.equal(t["counts"].long(), counts)
    assert torch.equal(t["offsets"].long().diff(), padded) and t["offsets"][0] == 0
    assert torch.equal(t["pair_to_row"] >= 0, is_local)
    order = torch.where(is_local, flat, local).sort(stable=True).indices[: int(counts.sum())]
    rows = t["pair_to_row"][order].long()
    assert bool((rows.diff() > 0).all())
    assert torch.equal(torch.bucketize(rows, t["offsets"][1:].long(), right=True), flat[order])
    found = torch.full_like(t["row_to_pair"], -1)
    found[rows] = order.int()
    assert torch.equal(t["row_to_pair"], found)


@pytest.mark.parametrize("tokens", [6, 3000])
def test_one_expert_takes_all(device, tokens):
    ids = torch.full((tokens, 2), 3, dtype=torch.int32, device=device)
    t = sort_rows(ids, 0, 8)
    assert torch.equal(t["pair_to_row"], torch.arange(2 * tokens, dtype=torch.int32, device=device))
    assert t["offsets"].tolist() == [0] * 4 + [2 * tokens] * 5


def test_numbers_that_are_no_experts(device):
    """Check numbers that no rank has, the extremes included: their pairs have no row."""
    ids = torch.tensor([[-1, 2**31 - 1], [0, -(2**31)], [4, 1]], dtype=torch.int32, device=device)
    t = sort_rows(ids, 1, 3)
    assert t["pair_to_row"].tolist() == [-1, -1, -1, -1, -1, 0]
    assert t["row_to_pair"].tolist() == [5, -1, -1, -1, -1, -1]
    assert t["offsets"].tolist() == [0, 1, 1, 1]


def test_buffers(device):
    """Check that results are written to the buffers; what is longer than the shortest table stays."""
    ids = torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32, device=device)
    tiles = torch.full((20,), 9, dtype=torch.int32, device=device)
    result = moe_sort(ids, None, 2, 2, tile_tokens_dim=4, out_tile_idx_to_expert_idx=tiles)
    assert result[0] is tiles and tiles.tolist() == [0, 1, -1] + [9] * 17
    assert result[1][:2].tolist() == [2, 8] and result[4].tolist() == [8] and result[5].tolist() == [2]


def test_sizes_of_tables():
    assert moe_utils.get_max_num_tiles(1, 8, 256, 128) == 8
    assert moe_utils.get_max_num_tiles(1000, 8, 256, 128) == (8000 + 127 * 256) // 128
    assert moe_utils.get_max_num_permuted_tokens(1000, 8, 256, 128) == (8000 + 127 * 256) // 128 * 128
    assert moe_utils.moe_sort is moe_sort


def test_errors(device):
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"top_k = 3\), got \(4, 2\)"):
        moe_sort(ids, None, 8, 3)
    with pytest.raises(ValueError, match=r"moe_sort: experts must be int32.*, got int64"):
        moe_sort(ids.long(), None, 8, 2)
    with pytest.raises(ValueError, match="num_experts = 8 experts and one row, got 6, 4 and 128"):
        moe_sort(ids, None, 8, 2, local_expert_offset=6, num_local_experts=4)
    with pytest.raises(ValueError, match="num_experts must be from 1 to 1024, got 2000"):
        moe_sort(ids, None, 2000, 2)
    with pytest.raises(ValueError, match="tile_expert must have at least 8 elements, got 3"):
        moe_sort(ids, None, 8, 2, out_tile_idx_to_expert_idx=ids[0, :1].repeat(3))
