# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels for four-bit weights on the CPU (tests/emulation): decoding, ring, split K, gated activation."""

from __future__ import annotations

import ctypes
from typing import Optional

import pytest
import torch

from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm, interleave_moe_weights_for_sm90_mixed_gemm
from flashinfer.jit.gemm import W4_TILES

from ..emulation.build import Library, compile_emulated
from ..fused_moe.layers import decode_e2m1, decode_int4

BF16, F32 = torch.bfloat16, torch.float32
OUTPUTS = {F32: 0, torch.float16: 1, BF16: 2}
E2M1, SHIFTED, INT4 = range(3)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_w4.cpp", tmp_path_factory)


class Weights:
    """Random weights of one type: codes and scales as the kernel takes them, and their values."""

    def __init__(self, type: int, experts: int, n: int, k: int, exponents: tuple[int, int] = (118, 124)) -> None:
        codes = torch.randint(0, 256, (experts, n, k // 2)).to(torch.uint8)
        self.type, self.n, self.k, self.experts = type, n, k, experts
        group = 128 if type == INT4 else 32
        if type == INT4:
            raw = (torch.rand(experts, n, k // group) / 8).to(BF16)
            scale = raw.double()
        else:
            low, high = exponents if type == E2M1 else (1, 12)
            raw = torch.randint(low, high + 1, (experts, n, k // group)).to(torch.uint8)
            scale = torch.exp2(raw.double() - (127 if type == E2M1 else 6))
        decoded = decode_int4(codes) if type == INT4 else decode_e2m1(codes)
        self.values = decoded.double() * scale.repeat_interleave(group, dim=-1)
        self.codes = interleave_moe_weights_for_sm90_mixed_gemm(codes, ("fp4", "fp4_fp8", "int4")[type])
        self.scales = interleave_moe_scales_for_sm90_mixed_gemm(raw, group)


def address(x: Optional[torch.Tensor]) -> int:
    return 0 if x is None else x.data_ptr()


def run(
    library: Library,
    weights: Weights,
    tokens: int,
    counts: list[int],
    *,
    out: torch.dtype = F32,
    gate: Optional[list[Optional[torch.Tensor]]] = None,
    factors: Optional[torch.Tensor] = None,
    row_scales: Optional[torch.Tensor] = None,
    cluster: int = 1,
    blocks: int = 2,
    weights_first: bool = False,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply ``counts`` tokens of each expert, then one row that belongs to none; return tokens and results.

    ``wide``: with tiles of 256 weights instead of 128.
    """
    rows = sum(counts)
    a = torch.randn(rows + 1, weights.k)
    a[rows] = torch.nan
    a = a.to(torch.float8_e4m3fn if weights.type == SHIFTED else BF16)
    groups = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    d = torch.full((rows + 1, weights.n // 2 if gate else weights.n), torch.nan, dtype=out)
    fields = [address(x) for x in (a, weights.codes, d, weights.scales, groups)]
    fields += [rows + 1, weights.n, weights.k, weights.experts, OUTPUTS[out], gate is not None, address(factors)]
    fields += [address(x) for x in gate or [None] * 4] + [address(row_scales), cluster, blocks, weights_first]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("gemm_w4", weights.type, tokens, 256 if wide else 128, ctypes.addressof(packed)) == 0
    assert d[rows].isnan().all()
    return a[:rows], d[:rows]


def products(weights: Weights, a: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = a.double().split(counts)
    return torch.cat([x @ w.T for x, w in zip(parts, weights.values, strict=True)])


def close(out: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    """Compare with an error relative to the root mean square."""
    assert (out.double() - expected).abs().max() <= error * expected.square().mean().sqrt()


@pytest.mark.parametrize(
    "tokens, counts, cluster, weights_first",
    [
        (8, [1], 1, False),
        (8, [3, 0, 8, 1], 2, True),
        (8, [0, 9, 2], 3, False),  # two tiles of tokens
        (16, [9, 0, 16, 30], 4, True),
        (32, [17, 0, 33], 2, False),
        (32, [1, 32], 3, False),
        (64, [17, 0, 65], 2, True),  # the first tile of wgmma
        (160, [150, 170, 3], 1, True),
    ],
)
def test_mxfp4(library, tokens, counts, cluster, weights_first):
    weights = Weights(E2M1, len(counts), 256, 384 if tokens != 16 else 1152)
    options = {"cluster": cluster, "blocks": 2 * cluster, "weights_first": weights_first}
    a, d = run(library, weights, tokens, counts, **options)
    close(d, products(weights, a, counts), 1e-5)


@pytest.mark.parametrize(
    "tokens, counts, n, blocks",
    [(16, [1, 0, 30], 256, 1), (16, [3], 384, 2), (48, [48, 3, 50], 640, 3), (128, [120, 130], 384, 2)],
)
@pytest.mark.parametrize("weights_first", [False, True])
def test_wide_tiles(library, tokens, counts, n, blocks, weights_first):
    """The last tile of 256 weights may have 128."""
    weights = Weights(E2M1, len(counts), n, 640)
    a, d = run(library, weights, tokens, counts, blocks=blocks, weights_first=weights_first, wide=True)
    close(d, products(weights, a, counts), 1e-5)


@pytest.mark.parametrize("tokens, wide", [(8, False), (64, False), (16, True), (128, True)])
def test_every_code_and_scale(library, tokens, wide):
    """Scales far below and above 1, and one that is no number."""
    weights = Weights(E2M1, 1, 128, 128, exponents=(60, 190))
    a, d = run(library, weights, tokens, [5], wide=wide)
    expected = products(weights, a, [5])
    assert ((d.double() - expected).abs() <= 1e-5 * (a.double().abs() @ weights.values[0].abs().T)).all()
    weights.scales[0, 0, 0, 3, 0] = 255  # row 3
    _, d = run(library, weights, tokens, [5], wide=wide)
    assert d.isnan().any(dim=0).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    "type, tokens, wide",
    [(SHIFTED, 8, False), (SHIFTED, 16, False), (SHIFTED, 64, False), (SHIFTED, 32, True), (SHIFTED, 128, True)]
    + [(INT4, 16, False), (INT4, 64, False), (INT4, 64, True)],
)
def test_other_codes(library, type, tokens, wide):
    """Shifted codes multiply e4m3 tokens. The int4 code times its scale is rounded to bf16."""
    weights = Weights(type, 2, 128, 256)
    factors = torch.rand(2) + 0.5
    a, d = run(library, weights, tokens, [7, 20], factors=factors, blocks=1, wide=wide)
    expected = products(weights, a, [7, 20]) * factors.double().repeat_interleave(torch.tensor([7, 20])).view(-1, 1)
    close(d, expected, 1e-5 if type == SHIFTED else 2e-2)
    a, rounded = run(library, weights, tokens, [7, 20], factors=factors, out=torch.float16, wide=wide)
    assert rounded.isfinite().all()


@pytest.mark.parametrize("tokens, wide, cluster", [(8, False, 3), (16, False, 1), (64, False, 2), (128, True, 1)])
def test_scales_of_rows(library, tokens, wide, cluster):
    """Every code with every offset of the exponent is an e4m3; scales of tokens, one of which is no number."""
    weights, counts = Weights(SHIFTED, 2, 256, 640), [tokens + 3, 5]
    assert weights.values.unique().numel() == 59  # 0, 2^-6 to 2^8, 1.5 times 2^-5 to 2^8
    scales, factors = torch.rand(sum(counts) + 1) + 0.5, torch.rand(2) + 0.5
    scales[2] = torch.nan
    options = {"cluster": cluster, "blocks": 2 * cluster, "wide": wide, "factors": factors, "row_scales": scales}
    a, d = run(library, weights, tokens, counts, **options)
    factor = scales[: sum(counts)] * factors.repeat_interleave(torch.tensor(counts))
    expected = products(weights, a, counts) * factor.double().view(-1, 1)
    assert bool(d[2].isnan().all())
    keep = [i for i in range(sum(counts)) if i != 2]
    close(d[keep], expected[keep], 1e-5)


def test_order_of_threads(library):
    """Two warps fill the ring many times over, in any order of theirs and of the warps that read it."""
    weights = Weights(E2M1, 2, 256, 2944)
    for seed in range(4):
        library.seed(seed)
        a, d = run(library, weights, 8, [2, 1], blocks=1, weights_first=seed % 2 == 1)
        close(d, products(weights, a, [2, 1]), 1e-5)


def test_other_tokens_do_not_matter(library):
    """The result of a token is the same bits alone and among others: every sum has one order."""
    weights = Weights(E2M1, 2, 256, 640)
    torch.manual_seed(0)
    a, alone = run(library, weights, 16, [1, 16], blocks=1)
    torch.manual_seed(0)
    b, together = run(library, weights, 16, [1, 16], blocks=2)
    assert torch.equal(a, b) and torch.equal(alone, together)


@pytest.mark.parametrize(
    "tokens, counts, cluster, n, wide",
    [(8, [2, 7], 2, 256, False), (32, [20, 3], 1, 256, False), (160, [100, 31], 1, 256, False)]
    + [(16, [20, 3], 1, 512, True), (48, [40, 9], 1, 384, True), (128, [100, 31], 1, 256, True)],
)
def test_gated(library, tokens, counts, cluster, n, wide):
    """The activation of GPT-OSS, with biases and constants of each expert. The last tile of 384 rows has 128."""
    weights = Weights(E2M1, 2, n, 256)
    alpha, beta, limit = torch.tensor([1.702, 1.0]), torch.tensor([1.0, 0.5]), torch.tensor([7.0, 3.0])
    bias = torch.randn(2, n).to(BF16)
    gates = [alpha, beta, limit, bias]
    a, d = run(library, weights, tokens, counts, out=BF16, gate=gates, cluster=cluster, wide=wide)
    expert = torch.arange(2).repeat_interleave(torch.tensor(counts))
    up, gate = (products(weights, a, counts) + bias.double()[expert]).chunk(2, dim=1)
    of = lambda x: x.double()[expert].view(-1, 1)  # noqa: E731
    gate = gate.minimum(of(limit))
    up = up.minimum(of(limit)).maximum(-of(limit)) + of(beta)
    expected = gate * torch.sigmoid(of(alpha) * gate) * up
    torch.testing.assert_close(d.double(), expected, rtol=2**-8, atol=1e-4)


def choose(
    library: Library,
    rows: int,
    groups: int,
    n: int,
    k: int,
    is_gated: bool,
    tile: int = -1,
    cluster: int = 1,
    is_e4m3: bool = False,
) -> tuple[int, int, int]:
    """Return tokens, weights and split of the rule, or of a tile that was measured."""
    numbers = [float(x) for t in W4_TILES for x in t]
    tiles = (ctypes.c_double * len(numbers))(*numbers)
    count = len(W4_TILES)
    arguments = (rows, groups, n, k, is_gated, tile, cluster, is_e4m3)
    number = library.call("choose_w4", ctypes.addressof(tiles), count, *arguments)
    weights, tokens = divmod(number // 16, 1000)
    return tokens, weights, number % 16


@pytest.mark.parametrize(
    "rows, groups, chosen",
    [(4, 128, (8, 128)), (256, 128, (8, 128)), (1024, 128, (16, 256)), (4096, 128, (48, 256)), (8192, 128, (80, 256))]
    + [(16384, 128, (160, 128)), (10**5, 8, (128, 256))],
)
def test_choice(library, rows, groups, chosen):
    """The tile takes all rows of most experts; those of GPT-OSS as measured. Few tiles are split over K."""
    *tile, split = choose(library, rows, groups, 5888, 2944, True)
    assert tuple(tile) == chosen and (split > 1) == (rows <= 4)


@pytest.mark.parametrize(
    "rows, groups, chosen",
    [(4, 128, (8, 128)), (1024, 128, (16, 256)), (2048, 128, (32, 256)), (8192, 128, (80, 256))]
    + [(16384, 128, (160, 128)), (65536, 128, (128, 256))],
)
def test_choice_for_e4m3(library, rows, groups, chosen):
    """Decoding takes a smaller share of the time, so that small tiles of 256 weights are chosen earlier."""
    assert choose(library, rows, groups, 5888, 2944, True, is_e4m3=True)[:2] == chosen


@pytest.mark.parametrize(
    "rows, n, chosen", [(1, 512, 8), (16, 512, 8), (16, 8192, 8), (17, 16384, 32), (48, 16384, 64)]
)
def test_choice_for_one_expert(library, rows, n, chosen):
    """The number of its rows is known; tiles of 256 weights, or of more tokens, would leave SMs idle."""
    *tile, split = choose(library, rows, 1, n, 7168, False)
    assert tile == [chosen, 128] and (split > 1) == (n == 512)


def test_measured_tiles(library):
    """Numbers, sizes and splits of tiles are those of jit/gemm/core.py. The rule chooses where K cannot be split so."""
    shape = (16, 1, 512, 768, False)
    by_rule = choose(library, *shape)
    for i, tile in enumerate(W4_TILES):
        for split in (1, tile.most_blocks, min(6, tile.most_blocks)):
            expected = (tile.tokens, tile.weights, split) if split <= 6 else by_rule  # 768 is six times 128
            assert choose(library, *shape, i, split) == expected
        assert choose(library, *shape, i, tile.most_blocks + 1) == by_rule
        assert choose(library, *shape, i, 0) == by_rule
