# SPDX-License-Identifier: Apache-2.0
"""Grouped products of the SM90 GEMM kernels: contiguous, masked and packed rows, empty groups. Needs SM90."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashinfer.jit.gemm import tiles_of

from .devices import needs_hopper
from .gemm_inputs import (
    CONTIGUOUS,
    MASKED,
    PACKED,
    TOLERANCE,
    block_scales,
    dequantized,
    error,
    gemm,
    operands,
    poisoned,
)

pytestmark = needs_hopper

KINDS = ["bf16", "fp16", "fp8", "fp8_block"]
N, K = 328, 640
#: More than 32 groups, because the schedule reads 32 at a time. Some are empty, end inside a tile, or have two tiles.
COUNTS = [0, 5, 128, 1, 0, 0, 200, 64, 300] + [3] * 40 + [0]


def scales_of(kind, a, b):
    return block_scales(a, b) if kind == "fp8_block" else (None, None)


def tile_options(kind):
    """Yield the default choice and every tile; tiles with tokens on the M side also in block pairs."""
    yield {}
    for i, tile in enumerate(tiles_of(kind)):
        yield {"tile": i}
        if not tile.swapped:
            yield {"tile": i, "cluster": 2}


ALL = [(kind, options) for kind in KINDS for options in tile_options(kind)]


@pytest.mark.parametrize("kind, options", ALL)
def test_packed(kind, options):
    """Check packed groups that end anywhere: tiles compute rows of the next group and must not write them."""
    indptr = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32)
    a, b = operands(kind, (sum(COUNTS), K), (len(COUNTS), N, K))
    scales = scales_of(kind, a, b[0])
    if kind == "fp8_block":
        scales = (scales[0], block_scales(b[:, :1], b)[1])
    out = gemm(kind, a, b, poisoned(sum(COUNTS), N), scales=scales, groups=indptr.cuda(), grouping=PACKED, **options)
    wide = dequantized(a, scales[0]), dequantized(b, scales[1])
    for g, (begin, end) in enumerate(itertools.pairwise(indptr.tolist())):
        if end > begin:
            assert error(out[begin:end], wide[0][begin:end] @ wide[1][g].T) < TOLERANCE


@pytest.mark.parametrize("kind, options", ALL)
def test_masked(kind, options):
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    a, b = operands(kind, (len(COUNTS), 300, K), (len(COUNTS), N, K))
    scales = scales_of(kind, a, b)
    options = {"expected_m": 20, **options}
    out = gemm(
        kind, a, b, poisoned(len(COUNTS), 300, N), scales=scales, groups=counts.cuda(), grouping=MASKED, **options
    )
    wide = dequantized(a, scales[0]), dequantized(b, scales[1])
    for g, count in enumerate(COUNTS):
        if count:
            assert error(out[g, :count], wide[0][g, :count] @ wide[1][g].T) < TOLERANCE


@pytest.mark.parametrize("kind, options", ALL)
def test_contiguous(kind, options):
    """Check segments of multiples of 128 rows; blocks with index -1 are skipped."""
    blocks = [2, 2, 0, -1, 5, 5, 5, -1]
    if options and tiles_of(kind)[options["tile"]].block_m > 128:
        pytest.skip("a tile of 256 rows would have two groups")
    groups = torch.tensor(blocks, dtype=torch.int32).repeat_interleave(128)
    a, b = operands(kind, (len(groups), K), (6, N, K))
    scales = scales_of(kind, a, b[0])
    if kind == "fp8_block":
        scales = (scales[0], block_scales(b[:, :1], b)[1])
    out = gemm(
        kind, a, b, poisoned(len(groups), N), scales=scales, groups=groups.cuda(), grouping=CONTIGUOUS, **options
    )
    wide = dequantized(a, scales[0]), dequantized(b, scales[1])
    for i, g in enumerate(blocks):
        rows = slice(128 * i, 128 * i + 128)
        if g >= 0:
            assert error(out[rows], wide[0][rows] @ wide[1][g].T) < TOLERANCE
        else:
            assert out[rows].isnan().all()


def test_all_groups_empty():
    a, b = operands("bf16", (2, 64, 128), (2, 128, 128))
    none = torch.zeros(2, dtype=torch.int32, device="cuda")
    for tile in range(len(tiles_of("bf16"))):
        gemm("bf16", a, b, poisoned(2, 64, 128), groups=none, grouping=MASKED, expected_m=1, tile=tile)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_weight_indices(kind):
    """Check groups that choose their matrix: in another order, twice, and not at all."""
    counts, indices = [7, 0, 130, 64], [2, 0, 0, 2]
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32).cuda()
    a, b = operands(kind, (sum(counts), K), (3, N, K))
    chosen = torch.tensor(indices, dtype=torch.int32).cuda()
    expected = torch.cat([x.double() @ b[i].double().T for x, i in zip(a.split(counts), indices, strict=True)])
    for tile in range(-1, len(tiles_of(kind))):
        out = poisoned(sum(counts), N)
        gemm(kind, a, b, out, groups=indptr, weight_indices=chosen, grouping=PACKED, tile=tile)
        assert error(out, expected) < TOLERANCE
