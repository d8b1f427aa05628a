# SPDX-License-Identifier: Apache-2.0
"""Tile order and the rule that picks a tile, on the host. No GPU and no CUDA."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from flashinfer.jit import env
from flashinfer.jit.cpp_ext import find_cxx
from flashinfer.jit.gemm import tiles_of

BATCHED, CONTIGUOUS, MASKED, PACKED = range(4)


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    compiler = find_cxx()
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    source = Path(__file__).with_name("schedule_probe.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, f"-I{env.FLASHINFER_INCLUDE_DIR}", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("m_tiles, n_tiles, raster", [(1, 1, 1), (20, 7, 8), (8, 3, 8), (5, 4, 16), (17, 1, 16)])
def test_every_tile_once(probe, m_tiles, n_tiles, raster):
    count = 2 * m_tiles * n_tiles
    out = (ctypes.c_int * (3 * count))()
    probe.raster_tiles(count, m_tiles, n_tiles, min(raster, m_tiles), out)
    tiles = [tuple(out[3 * t : 3 * t + 3]) for t in range(count)]
    assert sorted(tiles) == [(b, m, n) for b in range(2) for m in range(m_tiles) for n in range(n_tiles)]
    first_band = {m for _, m, _ in tiles[: min(raster, m_tiles) * n_tiles]}
    assert first_band == set(range(min(raster, m_tiles)))


def choose(probe, kind, m, n, k, batch=1, grouping=BATCHED, needs_swapped=False, is_gated=False):
    """Return (swapped, block_m, block_n, cluster, what its blocks share, raster) for an H200."""
    tiles = tiles_of(kind)
    rows = [(t.swapped, t.block_m, t.block_n, t.most_blocks, bool(t.split_entry), t.k_block, t.once) for t in tiles]
    numbers = [float(x) for row in rows for x in row]
    shape = (ctypes.c_int64 * 6)(m, n, k, batch, grouping, 2 if kind == "bf16" else 1)
    out = (ctypes.c_int * 6)()
    is_block = kind == "fp8_block"
    flags = (is_block, needs_swapped, is_gated)
    probe.choose(shape, *flags, (ctypes.c_double * len(numbers))(*numbers), len(tiles), 132, out)
    assert (bool(out[0]), out[1], out[2]) in {(t.swapped, t.block_m, t.block_n) for t in tiles}
    return tuple(out)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block"])
def test_large_products_take_the_largest_tile(probe, kind):
    assert choose(probe, kind, 4096, 7168, 4096)[:4] == (0, 128, 256, 1)


def test_few_tiles_split_k(probe):
    """Check 32 tiles of weights: alone, 100 SMs would idle."""
    swapped, _, _, split, *_ = choose(probe, "bf16", 16, 4096, 14336)
    assert swapped and split > 1


def test_tile_fills_the_last_wave(probe):
    """Check 17 x 16 tiles of 256 x 128: 2.06 waves of 132 would take as long as 3, with a third of the SM time idle."""
    swapped, block_m, block_n, *_ = choose(probe, "fp8_block", 4096, 2112, 7168)
    waves = -(-(-(-4096 // block_m) * -(-2112 // block_n)) // 132)
    assert not swapped
    assert 4096 * 2112 / (waves * 132 * block_m * block_n) > 0.75


def test_2112_columns_are_12_tiles_of_176(probe):
    """Check 2.9 waves of 128 x 176 tiles, which take less than 2.7 waves of 128 x 192: both are three."""
    assert choose(probe, "fp8_block", 4096, 2112, 7168)[:4] == (0, 128, 176, 1)


@pytest.mark.parametrize("groups", [1, 8])
def test_contiguous_groups_do_not_straddle_tiles(probe, groups):
    """Groups begin at multiples of 128 rows; without groups, tiles of 256 rows end this product earliest."""
    assert choose(probe, "fp8_block", 8 * 4096, 128, 7168)[1] == 256
    assert choose(probe, "fp8_block", 8 * 4096, 128, 7168, groups, CONTIGUOUS)[1] == 128


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_few_tokens_are_not_padded_to_64(probe, kind, m):
    swapped, block_m, *_ = choose(probe, kind, m, 7168, 4096)
    assert swapped and block_m <= 16
    swapped, block_m, *_ = choose(probe, kind, m, 4096, 7168, 32, MASKED)
    assert swapped and block_m <= 16


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block"])
@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_tiles_of_weights_are_halved(probe, kind, m):
    """Check 56 tiles of 128 weights: 112 of 64 take more SMs. Of 8192 in 32 groups, each SM has many either way."""
    swapped, _, block_n, cluster, *_ = choose(probe, kind, m, 7168, 4096)
    assert (swapped, block_n, cluster) == (1, 64, 1)
    assert choose(probe, kind, m, 8192, 4096, 32, MASKED)[2] >= 128


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block"])
@pytest.mark.parametrize("n", [256, 1024, 4096])
def test_blocks_that_split_k_of_narrow_tiles(probe, kind, n):
    """Check that at most as many blocks split K as the tile has room for."""
    swapped, block_m, block_n, cluster, *_ = choose(probe, kind, 16, n, 14336)
    most = {(t.block_m, t.block_n): t.most_blocks for t in tiles_of(kind) if t.swapped}
    assert swapped and 1 < cluster <= most[block_m, block_n]


@pytest.mark.parametrize(
    "m, n, k, split", [(256, 1536, 7168, 4), (768, 2112, 7168, 2), (256, 1536, 256, 1), (4096, 7168, 4096, 1)]
)
def test_blocks_that_split_k_of_plain_tiles(probe, m, n, k, split):
    """Few tiles of long sums leave SMs idle; one cluster computes a tile. Of groups, K is not split."""
    swapped, block_m, block_n, cluster, sharing, _ = choose(probe, "fp8_block", m, n, k)
    assert swapped or (cluster, sharing) == (split, 2 if split > 1 else 0)
    assert split == 1 or (not swapped and (block_m, block_n) in {(128, 128), (128, 192)})
    assert choose(probe, "fp8_block", m, n, k, 3, MASKED)[4] == choose(probe, "bf16", m, n, k)[4] == 0


def test_scales_of_single_weight_rows_need_swapped_operands(probe):
    assert choose(probe, "fp8_block", 4096, 7168, 4096, needs_swapped=True)[0]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [2, 8, 128, 1000, 65536])
def test_gated_products_store_64_columns(probe, kind, rows):
    """Half of the columns of a tile are results; tiles of 64 weights do not activate."""
    _, _, block_n, *_ = choose(probe, kind, rows, 1536, 2048, 128, PACKED, is_gated=True)
    assert block_n % 128 == 0


def test_gated_blocks_have_128_ups_and_gates(probe):
    assert choose(probe, "fp8_block", 65536, 1536, 2048, 128, PACKED, is_gated=True)[:3] == (0, 128, 256)


@pytest.mark.parametrize("rows, most", [(1, 8), (128, 8), (512, 16), (1024, 32), (2048, 32)])
def test_gated_blocks_of_few_tokens(probe, rows, most):
    """Layers with few pairs per expert take a swapped tile that quantises, whose K is not split."""
    swapped, block_m, _, cluster, *_ = choose(probe, "fp8_block", rows, 1536, 2048, 128, PACKED, is_gated=True)
    assert swapped and block_m <= most and cluster == 1


@pytest.mark.parametrize("kind", ["bf16", "fp8_block"])
@pytest.mark.parametrize("mean", [8, 16, 24])
def test_tiles_hold_the_rows_of_most_experts(probe, kind, mean):
    """Half of the experts have more rows than the mean; a second tile would read their weights again."""
    _, block_m, *_ = choose(probe, kind, mean * 64, 4096, 4096, 64, PACKED)
    assert block_m >= 1.3 * mean
    assert choose(probe, kind, mean, 4096, 4096, 64, MASKED)[1] < 4 * mean


@pytest.mark.parametrize("rows", [1, 1 << 20, 1 << 30])
def test_any_number_of_packed_rows(probe, rows):
    for experts in (1, 1000):
        assert choose(probe, "fp8_block", rows, 4096, 4096, experts, PACKED)[1] >= 8


#: Pairs, rows of fc1, hidden size and experts of layers whose copies of tokens would take long, and of those that
#: tests/fused_moe sends through the gathering kernels.
GATHERED = [
    (32768, 512, 7168, 256),
    (65536, 768, 2048, 128),
    (1300, 512, 256, 3),
]


@pytest.mark.parametrize("rows, n, k, experts", GATHERED)
def test_layers_of_many_tokens_choose_a_tile_that_gathers(probe, rows, n, k, experts):
    chosen = choose(probe, "fp8_block", rows, n, k, experts, PACKED, is_gated=True)[:3]
    assert chosen in {(t.swapped, t.block_m, t.block_n) for t in tiles_of("fp8_block") if t.gather_entry}
