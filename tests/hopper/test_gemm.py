# SPDX-License-Identifier: Apache-2.0
"""The SM90 GEMM kernels against float64: every tile, tails, batches, scales of tensors and blocks. Needs SM90."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashinfer.gemm import fp8_blockscale_gemm_sm90
from flashinfer.gemm.blockscale import quantize_rows
from flashinfer.jit.gemm import get_gemm_sm90_module, get_quantize_1x128_module, tiles_of

from .devices import needs_hopper
from .gemm_inputs import TOLERANCE, block_scales, dequantized, error, gemm, operands, poisoned

pytestmark = needs_hopper

TILES = [(kind, i) for kind in ("bf16", "fp16", "fp8", "fp8_block") for i in range(len(tiles_of(kind)))]
IDS = [f"{kind}-{tiles_of(kind)[i].unit}" for kind, i in TILES]


def check(kind, m, n, k, batch=(), dtype=torch.bfloat16, per_row=False, **options):
    a, b = operands(kind, (*batch, m, k), (*batch, n, k))
    scales = block_scales(a, b, per_row) if kind == "fp8_block" else (None, None)
    out = gemm(kind, a, b, poisoned(*batch, m, n, dtype=dtype), scales=scales, **options)
    expected = dequantized(a, scales[0]) @ dequantized(b, scales[1]).mT
    assert error(out, expected) < TOLERANCE
    return out


@pytest.mark.parametrize("kind, tile", TILES, ids=IDS)
@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (300, 712, 1040), (520, 1088, 64)])
def test_tiles_and_tails(kind, tile, m, n, k):
    """Check one row; rows, columns and K that end inside a tile; K shorter than a stage of 8 bits."""
    check(kind, m, n, k, tile=tile)


@pytest.mark.parametrize("n", [64, 136, 176, 1408, 2112])
def test_tiles_of_176_weights(n):
    """Check tails of columns that meet two blocks of weights, end early or are empty; other results than bf16."""
    tile = [t.unit for t in tiles_of("fp8_block")].index("tile_128x176")
    check("fp8_block", 300, n, 1152, tile=tile)
    check("fp8_block", 130, n, 256, (2,), dtype=torch.float16, tile=tile, blocks=5)


@pytest.mark.parametrize("kind, tile", TILES, ids=IDS)
def test_many_tiles_of_few_blocks(kind, tile):
    """Check few blocks with many tiles each, so that rings and buffers wrap: two batches of 1024 x 1024 on 8 blocks."""
    check(kind, 1024, 1024, 512, (2,), tile=tile, blocks=8)


PLAIN = [(kind, tile) for kind, tile in TILES if not tiles_of(kind)[tile].swapped]


@pytest.mark.parametrize("kind, tile", PLAIN)
@pytest.mark.parametrize("share_b", [False, True])
@pytest.mark.parametrize("m, n", [(1024, 1024), (300, 712)])
def test_pairs_of_blocks(kind, tile, share_b, m, n):
    """Check multicast of either operand in block pairs, also with an odd number of tiles."""
    check(kind, m, n, 1024, tile=tile, cluster=2, share_b=share_b)


SPLIT_K = 2  # what the blocks of a cluster share, instead of tokens (0) or weights (1)
SPLITTING = [i for i, t in enumerate(tiles_of("fp8_block")) if t.split_entry]


@pytest.mark.parametrize("tile", SPLITTING)
@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("m, n, k", [(1, 8, 512), (300, 712, 1024), (256, 1536, 7168), (1024, 200, 640)])
def test_blocks_that_split_k_of_plain_tiles(tile, split, m, n, k):
    check("fp8_block", m, n, k, tile=tile, cluster=split, share_b=SPLIT_K)
    check("fp8_block", m, n, k, tile=tile, cluster=split, share_b=SPLIT_K, pdl=True, weights_first=True)


SWAPPED = [(kind, tile) for kind, tile in TILES if tiles_of(kind)[tile].swapped]


@pytest.mark.parametrize("kind, tile", SWAPPED)
@pytest.mark.parametrize("split", [2, 3, 4, 7, 8])
def test_blocks_that_split_k(kind, tile, split):
    """Check clusters that exchange partial sums: tokens of several tiles, K that does not divide, several turns."""
    if split > tiles_of(kind)[tile].most_blocks:
        pytest.skip("the receive buffer has room for four blocks")
    check(kind, 77, 712, 1936, tile=tile, cluster=split)
    check(kind, 300, 1024, 2048, tile=tile, cluster=split, blocks=3 * split)


@pytest.mark.parametrize("kind, tile", SWAPPED)
def test_results_do_not_depend_on_the_blocks(kind, tile):
    """Check tiles of odd numbers of K blocks, which begin at other stages where a block has other tiles before."""
    a, b = operands(kind, (70, 1440), (712, 1440))
    scales = block_scales(a, b) if kind == "fp8_block" else (None, None)
    first = gemm(kind, a, b, poisoned(70, 712), scales=scales, tile=tile)
    for blocks in (1, 2, 5):
        assert torch.equal(gemm(kind, a, b, poisoned(70, 712), scales=scales, tile=tile, blocks=blocks), first)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block"])
@pytest.mark.parametrize("m", [1, 5, 16, 33, 64, 128, 1000])
def test_chosen_tile(kind, m):
    check(kind, m, 2112, 1536)
    check(kind, m, 256, 512, (3,), dtype=torch.float16)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block"])
def test_no_rows(kind):
    a, b = operands(kind, (0, 256), (128, 256))
    scales = block_scales(a, b) if kind == "fp8_block" else (None, None)
    assert gemm(kind, a, b, poisoned(0, 128), scales=scales).shape == (0, 128)


def test_strides():
    """Check operands and results that are rows of a wider tensor."""
    a, b = operands("bf16", (200, 512), (256, 512))
    out = poisoned(200, 512)
    gemm("bf16", a[:, 128:384], b[:, :256], out[:, 128:384])
    assert error(out[:, 128:384], a[:, 128:384].double() @ b[:, :256].double().T) < TOLERANCE
    assert out[:, :128].isnan().all() and out[:, 384:].isnan().all()


@pytest.mark.parametrize("m", [7, 300])
def test_scales_of_tensors(m):
    """Check tensor scales, which stay on the device."""
    a, b = operands("fp8", (m, 512), (256, 512))
    scales = (torch.tensor([0.5], device="cuda"), torch.tensor(3.0, device="cuda"))
    out = gemm("fp8", a, b, poisoned(m, 256, dtype=torch.float16), scales=scales)
    assert error(out, a.double() @ b.double().T * 1.5) < TOLERANCE


@pytest.mark.parametrize("m", [7, 300])
def test_two_level_sums(m):
    """Check that block-scaled sums have at most 1.1 times the error of fp32 sums of exact products, before rounding."""
    a, b = operands("fp8_block", (m, 7168), (256, 7168))
    scales = block_scales(a, b)
    out = gemm("fp8_block", a, b, poisoned(m, 256), scales=scales)
    wide = (dequantized(a, scales[0]), dequantized(b, scales[1]))
    exact = wide[0] @ wide[1].T
    single = (wide[0].float().double() @ wide[1].float().double().T).float().bfloat16()
    assert error(out, exact) < 1.1 * error(single, exact)


@pytest.mark.parametrize("kind", ["bf16", "fp8_block"])
def test_repeated_calls_are_equal(kind):
    for m in (3, 40, 500):
        a, b = operands(kind, (m, 4096), (1024, 4096))
        scales = block_scales(a, b) if kind == "fp8_block" else (None, None)
        first = gemm(kind, a, b, poisoned(m, 1024), scales=scales)
        for _ in range(20):
            assert torch.equal(gemm(kind, a, b, poisoned(m, 1024), scales=scales), first)


def test_dependent_launches():
    """Check PDL: a product that starts before the kernel that writes its operand has ended still sees all of it."""
    a, b = operands("bf16", (256, 1024), (1024, 1024))
    b = b / 32
    expected = gemm("bf16", gemm("bf16", a, b, poisoned(256, 1024)), b, poisoned(256, 1024))
    middle, out = poisoned(256, 1024), poisoned(256, 1024)
    for _ in range(20):
        middle.fill_(torch.nan)
        gemm("bf16", a, b, middle, pdl=True)
        gemm("bf16", middle, b, out, pdl=True)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("m", [1, 30, 200])
def test_scales_of_single_weight_rows(m):
    check("fp8_block", m, 264, 1024, per_row=True)
    for tile in (tile for kind, tile in SWAPPED if kind == "fp8_block"):
        check("fp8_block", m, 264, 1152, per_row=True, tile=tile)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("m", [5, 300])
def test_bias_and_wide_results(kind, m):
    """Check fp32 results of bf16, the bias in fp32 before rounding, and rows whose last chunk of 8 columns is cut."""
    n = 523
    a, b = operands(kind, (m, 512), (n, 512))
    bias = torch.randn(n, device="cuda").bfloat16()
    expected = a.double() @ b.double().T + bias.double()
    for dtype in (torch.bfloat16, torch.float16, *([torch.float32] if kind == "bf16" else [])):
        for tile in range(len(tiles_of(kind))):
            out = poisoned(m, 528, dtype=dtype)
            gemm(kind, a, b, out[:, :n], bias=bias, tile=tile)
            assert error(out[:, :n], expected) < (1e-5 if dtype == torch.float32 else TOLERANCE)
            assert out[:, n:].isnan().all()


@pytest.mark.parametrize("m", [1, 40])
def test_weights_before_the_dependency(m):
    """Check a product whose tokens are written by the kernel before it while its weights are already being read."""
    module = get_quantize_1x128_module()
    x = torch.randn(m, 4096, device="cuda").bfloat16()
    codes = torch.zeros(m, 4096, device="cuda").to(torch.float8_e4m3fn)
    padded = torch.zeros(32, -(-m // 4) * 4, device="cuda")
    b = operands("fp8_block", (1024, 4096))[0]
    scales = (padded[:, :m].T, block_scales(b[:1], b)[1])
    module.quantize_1x128(codes, padded[:, :m], x, False)
    expected = gemm("fp8_block", codes, b, poisoned(m, 1024), scales=scales)
    for _ in range(50):
        codes.view(torch.uint8).fill_(127), padded.fill_(torch.nan)
        module.quantize_1x128(codes, padded[:, :m], x, True)
        out = gemm("fp8_block", codes, b, poisoned(m, 1024), scales=scales, pdl=True, weights_first=True)
        assert torch.equal(out, expected)
    for tile in (tile for kind, tile in SWAPPED if kind == "fp8_block"):
        expected = gemm("fp8_block", codes, b, poisoned(m, 1024), scales=scales, tile=tile)
        codes.view(torch.uint8).fill_(127), padded.fill_(torch.nan)
        module.quantize_1x128(codes, padded[:, :m], x, True)
        out = gemm("fp8_block", codes, b, poisoned(m, 1024), scales=scales, pdl=True, weights_first=True, tile=tile)
        assert torch.equal(out, expected)


def quantizing(x: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, pdl: bool) -> tuple[torch.Tensor, bool]:
    """Quantise and multiply. Returns the product, and whether the codes passed through memory."""
    (m, k), n = x.shape, b.shape[0]
    workspace = torch.full((m * k + -(-m // 4) * 4 * (k // 128) * 4,), 77, dtype=torch.uint8, device="cuda")
    out = poisoned(m, n)
    assert get_gemm_sm90_module("fp8_block").gemm_sm90_blockscale(out, x, b, None, scale, workspace, pdl)
    return out, bool((workspace != 77).any())


@pytest.mark.parametrize("m", range(1, 10))
@pytest.mark.parametrize("n, k", [(64, 128), (136, 384), (320, 3456), (7168, 4096), (24576, 1536)])
def test_products_that_quantise(m, n, k):
    """Check that few rows take one launch, with the bits of the quantiser and of a product that splits K alike."""
    x, b = torch.randn(m, k, device="cuda").bfloat16(), operands("fp8_block", (n, k))[0]
    x[m // 2, :128] = 0
    x[m - 1] *= 2.0**60
    scale = block_scales(b[:1], b)[1]
    codes, scales = quantize_rows(x)
    tile = [t.unit for t in tiles_of("fp8_block")].index("swapped_8x64")
    is_one_launch = m <= (0 if n == 24576 else 4 if n == 7168 else 8)  # blocks must have few stages
    splits = [{"tile": tile, "cluster": c} for c in range(1, min(4, k // 128) + 1)] if is_one_launch else [{}]
    expected = [gemm("fp8_block", codes, b, poisoned(m, n), scales=(scales.T, scale), **split) for split in splits]
    for pdl in (False, True):
        out, has_codes = quantizing(x, b, scale, pdl)
        assert has_codes != is_one_launch
        assert any(torch.equal(out, y) for y in expected)


@pytest.mark.parametrize("m", [1, 8])
def test_chains_of_products_that_quantise(m):
    """Check tokens that the kernel before writes after it has let this one begin."""
    x, b = torch.randn(m, 1024, device="cuda").bfloat16(), operands("fp8_block", (1024, 1024))[0]
    scale = block_scales(b[:1], b)[1] / 32
    rows = [x, *(poisoned(m, 1024) for _ in range(30))]
    results = []
    for synchronises in (True, False):
        for tokens, out in itertools.pairwise(rows):
            fp8_blockscale_gemm_sm90(tokens, b, None, scale, out)
            if synchronises:
                torch.cuda.synchronize()
        results.append(rows[-1].clone())
        for out in rows[1:]:
            out.fill_(torch.nan)
    assert results[0].isfinite().all() and torch.equal(*results)
