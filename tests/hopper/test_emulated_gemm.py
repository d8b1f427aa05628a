# SPDX-License-Identifier: Apache-2.0
"""The SM90 GEMM kernels on the CPU (tests/emulation): rings, multicasts, block scales, split K and grouping."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .gemm_inputs import BATCHED, CONTIGUOUS, E4M3, MASKED, PACKED, TOLERANCE, dequantized, error

BF16, F32 = torch.bfloat16, torch.float32
OUTPUTS = {F32: 0, torch.float16: 1, BF16: 2, E4M3: 3}
DENSE_BF16, DENSE_FP8, DENSE_BLOCK, WIDE_BLOCK, ODD_BLOCK, FEW_BF16, FEW_BLOCK = 0, 1, 2, 3, 4, 10, 11
GATHER_BLOCK = 5  # WIDE_BLOCK with rows that are gathered
FEWEST_BLOCK = 12  # FEW_BLOCK with tiles of 8 tokens instead of 32
TURN_BF16_8, TURN_BF16, TURN_FP8, TURN_BLOCK_8, TURN_BLOCK = 20, 21, 22, 23, 24  # tiles of 64 weights
QUANTIZING_BLOCK = 25  # TURN_BLOCK_8 of bf16 tokens
TAIL_BLOCK = 6  # tiles of 176 weights: a head of 128, a tail of 48
SPLIT_BLOCK, SPLIT_ODD_BLOCK = 7, 8  # DENSE_BLOCK and ODD_BLOCK whose K is split
SPLIT_K = 2  # what blocks of a cluster share, instead of tokens (0) or weights (1)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_gemm.cpp", tmp_path_factory)


@dataclass
class Options:
    """Options of a product besides its operands."""

    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    bias: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    weight_indices: torch.Tensor | None = None
    weight_factors: torch.Tensor | None = None
    tile_counter: torch.Tensor | None = None
    row_indices: torch.Tensor | None = None  # those of a, times the divisor plus anything below it
    row_divisor: int = 1
    activation: tuple[torch.Tensor | None, ...] = ()  # alpha, beta, limit, factor, bias and quantizer of each group
    result_scales: torch.Tensor | None = None  # scales of activated blocks
    grouping: int = BATCHED
    cluster: int = 1
    share_b: int = 0  # or SPLIT_K
    blocks: int = 2
    weights_first: bool = False


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def batch_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.ndim == 3 else 0


def scale_fields(x: torch.Tensor | None, rows: int) -> list[int]:
    if x is None or x.ndim == 1:
        return [address(x), 0, 0, 0, 1]
    return [address(x), batch_stride(x), x.stride(-2), x.stride(-1), 1 if x.shape[-2] == rows else 128]


def run(library: Library, kernel: int, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **options) -> torch.Tensor:
    """Compute into ``out``."""
    o = Options(**options)
    batch = len(o.groups) - 1 if o.grouping == PACKED else len(b) if b.ndim == 3 else 1
    rows = a.shape[-2] if o.row_indices is None else len(o.row_indices)
    fields = [address(a), address(b), address(out), rows, b.shape[-2], a.shape[-1], batch]
    fields += [len(b) if b.ndim == 3 else 1, a.stride(-2), b.stride(-2), out.stride(-2)]
    fields += [batch_stride(a), batch_stride(b), batch_stride(out), o.grouping, address(o.groups)]
    fields += [*scale_fields(o.scales[0], a.shape[-2]), *scale_fields(o.scales[1], b.shape[-2])]
    fields += [OUTPUTS[out.dtype], address(o.bias), address(o.weight_indices), address(o.weight_factors)]
    fields += [address(o.tile_counter), address(o.row_indices), o.row_divisor, a.dtype is BF16 and b.dtype is E4M3]
    fields += [bool(o.activation), *(address(x) for x in o.activation or (None,) * 6)]
    fields += [address(o.result_scales), 0 if o.result_scales is None else o.result_scales.stride(0)]
    fields += [o.cluster, int(o.share_b), o.blocks, int(o.weights_first)]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("gemm_sm90", kernel, ctypes.addressof(packed)) == 0
    return out


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def block_scales(a: torch.Tensor, b: torch.Tensor, per_row: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Make scales between 0.5 and 2 for rows of ``a`` and blocks (or rows) of ``b``."""
    (*batch, m, k), rows = a.shape, b.shape[-2] if per_row else -(-b.shape[-2] // 128)
    of_a = torch.rand(*batch, -(-k // 128), m).mT * 1.5 + 0.5
    return of_a, torch.rand(*b.shape[:-2], rows, -(-k // 128)) * 1.5 + 0.5


def check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert error(out, a.double() @ b.double().mT) < tolerance


@pytest.mark.parametrize("cluster, share_b", [(1, False), (2, False), (2, True)])
def test_bf16(library, cluster, share_b):
    """Whole and partial tiles; pairs of blocks that multicast one operand."""
    a, b = numbers(200, 200, dtype=BF16), numbers(264, 200, dtype=BF16)
    check(run(library, DENSE_BF16, poisoned(200, 264), a, b, cluster=cluster, share_b=share_b), a, b)


def test_bf16_ring_wraps(library):
    """K is longer than the ring, with another order of threads in each run."""
    a, b = numbers(64, 1024, dtype=BF16), numbers(128, 1024, dtype=BF16)
    for seed in range(3):
        library.seed(seed)
        check(run(library, DENSE_BF16, poisoned(64, 128), a, b, blocks=1), a, b)


def test_fp8_per_tensor(library):
    """Scales of tensors, a bias and fp32 results."""
    a, b, bias = numbers(130, 160, dtype=E4M3), numbers(72, 160, dtype=E4M3), numbers(72, dtype=BF16)
    scales = torch.tensor([0.5]), torch.tensor([1.25])
    out = run(library, DENSE_FP8, poisoned(130, 72, dtype=F32), a, b, scales=scales, bias=bias)
    assert error(out, a.double() @ b.double().mT * 0.625 + bias.double()) < 1e-6


@pytest.mark.parametrize("kernel", [DENSE_BLOCK, WIDE_BLOCK, ODD_BLOCK, TAIL_BLOCK])
@pytest.mark.parametrize("cluster, weights_first", [(1, False), (1, True), (2, False)])
def test_block_scales_through_the_ring(library, kernel, cluster, weights_first):
    """Tiles whose columns all exist, and tiles whose do not; K is longer than the ring of the largest tile."""
    a, b = numbers(130, 640, dtype=E4M3), numbers(392, 640, dtype=E4M3)
    scales = block_scales(a, b)
    options = {"scales": scales, "cluster": cluster, "weights_first": weights_first}
    out = run(library, kernel, poisoned(130, 392), a, b, **options)
    check(out, dequantized(a, scales[0]), dequantized(b, scales[1]))


@pytest.mark.parametrize("kernel", [DENSE_BLOCK, WIDE_BLOCK, TAIL_BLOCK])
@pytest.mark.parametrize("m", [40, 64, 193])
def test_rows_that_are_not_there(library, kernel, m):
    """A warpgroup, or one of its waves of 64 rows, has no rows in the last tile and lets the stages pass."""
    a, b = numbers(m, 1280, dtype=E4M3), numbers(264, 1280, dtype=E4M3)  # more stages than the ring has
    scales = block_scales(a, b)
    out = run(library, kernel, poisoned(m, 264), a, b, scales=scales, blocks=1, weights_first=True)
    check(out, dequantized(a, scales[0]), dequantized(b, scales[1]))


@pytest.mark.parametrize("n", [192, 264, 304, 320, 456])
def test_tiles_that_begin_inside_a_block_of_weights(library, n):
    a, b = numbers(70, 256, dtype=E4M3), numbers(n, 256, dtype=E4M3)
    scales = block_scales(a, b)
    out = run(library, ODD_BLOCK, poisoned(70, n), a, b, scales=scales)
    check(out, dequantized(a, scales[0]), dequantized(b, scales[1]))


@pytest.mark.parametrize("n", [64, 136, 200, 352, 712, 1408])
def test_tiles_with_tails(library, n):
    """Tails that meet two blocks of weights (the third and the sixth of 1408 columns), end early or have no columns."""
    a, b = numbers(70, 256, dtype=E4M3), numbers(n, 256, dtype=E4M3)
    scales = block_scales(a, b)
    out = run(library, TAIL_BLOCK, poisoned(70, n), a, b, scales=scales)
    check(out, dequantized(a, scales[0]), dequantized(b, scales[1]))


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("kernel", [SPLIT_BLOCK, SPLIT_ODD_BLOCK])
@pytest.mark.parametrize("m, n, k", [(70, 136, 640), (200, 520, 512), (1, 8, 1152)])
def test_blocks_that_split_k_of_plain_tiles(library, kernel, split, m, n, k):
    """The last columns of a tile may be those of a block that has none; a warpgroup may have no rows."""
    a, b = numbers(m, k, dtype=E4M3), numbers(n, k, dtype=E4M3)
    scales, bias = block_scales(a, b), numbers(n, dtype=BF16)
    expected = dequantized(a, scales[0]), dequantized(b, scales[1])
    options = {"scales": scales, "cluster": split, "share_b": SPLIT_K, "blocks": 8}
    out = [run(library, kernel, poisoned(m, n), a, b, **options, weights_first=x) for x in (False, True)]
    check(out[0], *expected)
    assert torch.equal(*out)
    biased = run(library, kernel, poisoned(m, n, dtype=torch.float16), a, b, **options, bias=bias)
    assert error(biased, expected[0] @ expected[1].mT + bias.double()) < TOLERANCE


@pytest.mark.parametrize("n", [352, 392])
def test_pairs_of_tiles_with_tails(library, n):
    """Pairs of blocks share tokens or weights; 392 columns are three tiles, of which one has no partner."""
    a, b = numbers(200, 256, dtype=E4M3), numbers(n, 256, dtype=E4M3)
    scales = block_scales(a, b)
    for share_b in (False, True):
        out = run(library, TAIL_BLOCK, poisoned(200, n), a, b, scales=scales, cluster=2, share_b=share_b)
        check(out, dequantized(a, scales[0]), dequantized(b, scales[1]))


def test_results_of_tiles_with_tails(library):
    """Results of fp16, rows of a wider tensor, a bias and factors, which the copy of whole columns does not take."""
    indptr = torch.tensor([0, 20, 20, 150], dtype=torch.int32)
    a, b = numbers(150, 256, dtype=E4M3), numbers(3, 352, 256, dtype=E4M3)
    scales, bias, factors = block_scales(a, b), numbers(352, dtype=BF16), torch.rand(3) + 0.5
    for dtype in (torch.float16, BF16):
        out = poisoned(150, 360, dtype=dtype)
        options = {"groups": indptr, "grouping": PACKED, "bias": bias, "weight_factors": factors}
        run(library, TAIL_BLOCK, out[:, :352], a, b, scales=scales, **options)
        for group in (0, 2):
            rows = slice(int(indptr[group]), int(indptr[group + 1]))
            sums = dequantized(a[rows], scales[0][rows]) @ dequantized(b[group], scales[1][group]).mT
            assert error(out[rows, :352], sums * factors[group] + bias.double()) < TOLERANCE
        assert out[:, 352:].isnan().all()


def test_factors_of_groups(library):
    """Sums are multiplied by the factor of their matrix of weights before they are rounded."""
    indptr = torch.tensor([0, 20, 20, 53, 60], dtype=torch.int32)
    a, b, factors = numbers(60, 64, dtype=BF16), numbers(4, 136, 64, dtype=BF16), torch.rand(4) + 0.5
    for kernel in (DENSE_BF16, FEW_BF16, TURN_BF16):
        options = {"groups": indptr, "grouping": PACKED, "weight_factors": factors}
        out = run(library, kernel, poisoned(60, 136), a, b, **options)
        for group in (0, 2, 3):
            rows = slice(int(indptr[group]), int(indptr[group + 1]))
            assert error(out[rows], a[rows].double() @ b[group].double().mT * factors[group]) < TOLERANCE


@pytest.mark.parametrize("m, cluster", [(5, 1), (16, 3), (33, 2)])
def test_few_tokens(library, m, cluster):
    """Weights on the M side; the blocks of a cluster split K, and exchange sums of several tiles."""
    a, b = numbers(m, 456, dtype=BF16), numbers(264, 456, dtype=BF16)
    check(run(library, FEW_BF16, poisoned(m, 264), a, b, cluster=cluster, blocks=cluster), a, b)


@pytest.mark.parametrize("per_row", [False, True])
def test_few_tokens_with_block_scales(library, per_row):
    """A scale per block or per row of weights; weights of the first stages before the wait for the kernel before."""
    a, b = numbers(30, 512, dtype=E4M3), numbers(136, 512, dtype=E4M3)
    scales = block_scales(a, b, per_row)
    out = run(library, FEW_BLOCK, poisoned(30, 136), a, b, scales=scales, cluster=2, weights_first=True)
    check(out, dequantized(a, scales[0]), dequantized(b, scales[1]))


@pytest.mark.parametrize("kernel", [TURN_BF16_8, TURN_BF16])
@pytest.mark.parametrize("k, blocks", [(64, 1), (72, 1), (448, 2), (2240, 1)])
def test_warpgroups_that_share_k(library, kernel, k, blocks):
    """K blocks that are one, odd, and more than the ring has; tiles that begin at stages of both warpgroups."""
    a, b = numbers(21, k, dtype=BF16), numbers(200, k, dtype=BF16)
    for seed in range(2):
        library.seed(seed)
        check(run(library, kernel, poisoned(21, 200), a, b, blocks=blocks, weights_first=seed == 1), a, b)


@pytest.mark.parametrize("kernel", [TURN_BF16_8, TURN_BF16, TURN_FP8, TURN_BLOCK_8, TURN_BLOCK])
def test_sums_of_warpgroups_do_not_depend_on_the_turn(library, kernel):
    """Tiles of three K blocks begin at either warpgroup, as the number of blocks decides; results are equal."""
    dtype = BF16 if kernel in (TURN_BF16_8, TURN_BF16) else E4M3
    k = 192 if dtype is BF16 else 384
    a, b = numbers(70, k, dtype=dtype), numbers(136, k, dtype=dtype)
    scales = block_scales(a, b) if kernel in (TURN_BLOCK_8, TURN_BLOCK) else (None, None)
    results = [run(library, kernel, poisoned(70, 136), a, b, scales=scales, blocks=blocks) for blocks in (1, 2, 32)]
    check(results[0], dequantized(a, scales[0]), dequantized(b, scales[1]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kernel, m", [(TURN_BF16_8, 19), (TURN_BF16, 33), (TURN_FP8, 70)])
@pytest.mark.parametrize("cluster", [2, 3, 4])
def test_split_of_warpgroups_that_share_k(library, kernel, m, cluster):
    """Both splits of K: blocks of a cluster and the warpgroups of each, also with one K block per block."""
    for k in (64 * cluster, 456):
        dtype = E4M3 if kernel == TURN_FP8 else BF16
        k *= 2 if kernel == TURN_FP8 else 1
        a, b = numbers(m, k, dtype=dtype), numbers(200, k, dtype=dtype)
        check(run(library, kernel, poisoned(m, 200), a, b, cluster=cluster, blocks=cluster), a, b)


@pytest.mark.parametrize("kernel", [TURN_BLOCK_8, TURN_BLOCK])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("k, cluster", [(128, 1), (640, 1), (3328, 1), (640, 2)])
def test_block_scales_of_warpgroups_that_share_k(library, kernel, per_row, k, cluster):
    """A scale of 128 weights, which two tiles share, or of each; two warps copy scales in turn."""
    a, b = numbers(37, k, dtype=E4M3), numbers(264, k, dtype=E4M3)
    scales = block_scales(a, b, per_row)
    options = {"scales": scales, "cluster": cluster, "blocks": 2 * cluster, "weights_first": True}
    check(
        run(library, kernel, poisoned(37, 264), a, b, **options), dequantized(a, scales[0]), dequantized(b, scales[1])
    )


def quantized(library: Library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of the kernel that quantises alone."""
    codes, scales = torch.zeros(x.shape).to(E4M3), torch.zeros(x.shape[1] // 128, x.shape[0])
    operands = (x.data_ptr(), x.stride(0), codes.data_ptr(), scales.data_ptr(), *x.shape)
    assert library.call("quantize_1x128", *operands) == 0
    return codes, scales.mT


def check_quantizing(library: Library, x: torch.Tensor, b: torch.Tensor, cluster: int = 1, **options) -> None:
    """Compare a product that quantises with both kernels, bit by bit."""
    codes, scales = quantized(library, x)
    of_weights = block_scales(codes, b)[1]
    shape = x.shape[0], b.shape[0]
    options["cluster"] = cluster
    expected = run(library, TURN_BLOCK_8, poisoned(*shape), codes, b, scales=(scales, of_weights), **options)
    out = run(library, QUANTIZING_BLOCK, poisoned(*shape), x, b, scales=(None, of_weights), **options)
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("k", [128, 640, 1280])
def test_tokens_that_the_product_quantises(library, m, k):
    """One K block, odd and even numbers of them; the last tile of weights is a whole one of 64, or not."""
    for n, first in ((64, False), (192, True), (136, False)):
        check_quantizing(library, numbers(m, k, dtype=BF16), numbers(n, k, dtype=E4M3), weights_first=first)


@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("k, cluster", [(3456, 1), (6016, 1), (384, 3), (1408, 4), (3200, 2)])
def test_quantised_tokens_through_the_ring(library, m, k, cluster):
    """More K blocks than the ring has, in tiles that begin at stages of either warp; blocks that split K."""
    for seed in range(2):
        library.seed(seed)
        blocks = cluster * (1 + seed)
        check_quantizing(library, numbers(m, k, dtype=BF16), numbers(264, k, dtype=E4M3), cluster, blocks=blocks)


def test_numbers_that_the_product_quantises(library):
    """Zeros, numbers of all sizes, infinities and NaN have the codes of the quantiser; rows lie apart."""
    x = numbers(7, 648, dtype=BF16)[:, :640] * 2.0 ** torch.randint(-20, 20, (7, 1)).to(BF16)
    x[0, 128:256] = 0
    x[1] = 0
    x[2, 5], x[3, 200], x[4, 300], x[5, 0], x[6, 512] = torch.inf, -torch.inf, torch.nan, 3e38, 1e-40
    x[4, 384:512] = torch.nan
    check_quantizing(library, x, numbers(64, 640, dtype=E4M3))


def test_products_that_cannot_quantise_refuse(library):
    """More rows than a tile, rows that are not aligned, scales of rows of weights, and kernels of quantised tokens."""
    x, b, out = numbers(9, 256, dtype=BF16), numbers(64, 256, dtype=E4M3), torch.zeros(9, 64, dtype=BF16)
    of_weights = block_scales(x, b)[1]
    for rows in (x, x.as_strided((4, 256), (257, 1)), x[:1].as_strided((1, 256), (256, 1), 1)):
        with pytest.raises(AssertionError):
            run(library, QUANTIZING_BLOCK, out[: len(rows)], rows, b, scales=(None, of_weights))
    with pytest.raises(AssertionError):
        run(library, QUANTIZING_BLOCK, out[:8], x[:8], b, scales=(None, block_scales(x, b, per_row=True)[1]))
    with pytest.raises(AssertionError):
        run(library, TURN_BLOCK_8, out[:8], x[:8], b, scales=(None, of_weights))
    codes = quantized(library, x[:8])
    with pytest.raises(AssertionError):
        run(library, QUANTIZING_BLOCK, out[:8], codes[0], b, scales=(codes[1], of_weights))


@pytest.mark.parametrize("dtype", [F32, torch.float16])
def test_results_of_warpgroups_that_share_k(library, dtype):
    """Other results than bf16, in rows of a wider tensor, with a bias; columns end inside a tile."""
    a, b, bias = numbers(70, 208, dtype=E4M3), numbers(148, 208, dtype=E4M3), numbers(148, dtype=BF16)
    out = poisoned(70, 160, dtype=dtype)
    run(library, TURN_FP8, out[:, :148], a, b, scales=(torch.tensor([0.5]), torch.tensor([1.25])), bias=bias)
    expected = a.double() @ b.double().mT * 0.625 + bias.double()
    assert error(out[:, :148], expected) < (1e-6 if dtype is F32 else TOLERANCE)
    assert out[:, 148:].isnan().all()


def test_groups_of_warpgroups_that_share_k(library):
    """Packed, masked and contiguous groups, some of them empty."""
    a, b = numbers(60, 192, dtype=BF16), numbers(3, 136, 192, dtype=BF16)
    indptr, weights = torch.tensor([[0, 20, 20, 53, 60], [1, 0, 2, 0, 0]], dtype=torch.int32)
    out = poisoned(60, 136)
    run(library, TURN_BF16, out, a, b, groups=indptr, weight_indices=weights[:4], grouping=PACKED, weights_first=True)
    for group in (0, 2, 3):
        rows = slice(int(indptr[group]), int(indptr[group + 1]))
        check(out[rows], a[rows], b[weights[group]])
    counts = torch.tensor([0, 20, 3], dtype=torch.int32)
    a, out = numbers(3, 24, 192, dtype=BF16), torch.full((3, 24, 136), 7.0).to(BF16)
    run(library, TURN_BF16, out, a, b, groups=counts, grouping=MASKED)
    for group in (1, 2):
        check(out[group, : counts[group]], a[group, : counts[group]], b[group])
    assert all(bool((out[group, count:] == 7).all()) for group, count in enumerate(counts.tolist()))
    owners = torch.tensor([2, -1, 0]).repeat_interleave(128)[:300].int()
    a, out = numbers(300, 192, dtype=BF16), torch.full((300, 136), 7.0).to(BF16)
    run(library, TURN_BF16, out, a, b, groups=owners, grouping=CONTIGUOUS)
    check(out[:128], a[:128], b[2])
    check(out[256:], a[256:], b[0])
    assert bool((out[128:256] == 7).all())


@pytest.mark.parametrize("bad", [3, -1, 1 << 30])
def test_matrices_that_are_not_there(library, bad):
    """Rows whose group names no matrix are left alone, with indices of groups and in the contiguous layout."""
    a, b = numbers(60, 192, dtype=BF16), numbers(3, 136, 192, dtype=BF16)
    indptr, weights = torch.tensor([0, 20, 53, 60]).int(), torch.tensor([1, bad, 2]).int()
    out = torch.full((60, 136), 7.0).to(BF16)
    run(library, TURN_BF16, out, a, b, groups=indptr, weight_indices=weights, grouping=PACKED)
    check(out[:20], a[:20], b[1])
    check(out[53:], a[53:], b[2])
    assert bool((out[20:53] == 7).all())
    owners = torch.tensor([2, bad, 0]).repeat_interleave(128)[:300].int()
    a, out = numbers(300, 192, dtype=BF16), torch.full((300, 136), 7.0).to(BF16)
    run(library, TURN_BF16, out, a, b, groups=owners, grouping=CONTIGUOUS)
    check(out[:128], a[:128], b[2])
    check(out[256:], a[256:], b[0])
    assert bool((out[128:256] == 7).all())


@pytest.mark.parametrize("kernel", [TURN_BF16, TURN_BLOCK])
def test_warpgroups_that_share_k_refuse(library, kernel):
    """Gated activations, which need rows of both warpgroups, and more than four blocks that split K."""
    indptr, dtype = torch.tensor([0, 5], dtype=torch.int32), E4M3 if kernel == TURN_BLOCK else BF16
    a, b = numbers(5, 1024, dtype=dtype), numbers(1, 256, 1024, dtype=dtype)
    scales = block_scales(a, b) if kernel == TURN_BLOCK else (None, None)
    options = {"groups": indptr, "grouping": PACKED, "scales": scales}
    for refused in ({"activation": (None,) * 6}, {"cluster": 5}):
        with pytest.raises(AssertionError):
            run(library, kernel, torch.zeros(5, 256, dtype=BF16), a, b, **options, **refused)


def test_masked_groups(library):
    counts = torch.tensor([0, 130, 3, 128], dtype=torch.int32)
    a, b = numbers(4, 140, 72, dtype=BF16), numbers(4, 136, 72, dtype=BF16)
    out = torch.full((4, 140, 136), 7.0).to(BF16)
    run(library, DENSE_BF16, out, a, b, groups=counts, grouping=MASKED)
    for group, count in enumerate(counts.tolist()):
        if count:
            check(out[group, :count], a[group, :count], b[group])
        assert bool((out[group, count:] == 7).all())


@pytest.mark.parametrize("kernel", [DENSE_BLOCK, TAIL_BLOCK])
def test_contiguous_groups(library, kernel):
    """Blocks of 128 rows; one has no group."""
    rows = torch.tensor([2, -1, 0]).repeat_interleave(128)[:300].int()
    a, b = numbers(300, 128, dtype=E4M3), numbers(3, 136, 128, dtype=E4M3)
    scales, out = block_scales(a, b), torch.full((300, 136), 7.0).to(BF16)
    run(library, kernel, out, a, b, scales=scales, groups=rows, grouping=CONTIGUOUS)
    a, b = dequantized(a, scales[0]), dequantized(b, scales[1])
    for group in (0, 2):
        check(out[rows == group], a[rows == group], b[group])
    assert bool((out[rows < 0] == 7).all())


def test_packed_groups(library):
    """Groups of any number of rows, with weights in any order."""
    indptr = torch.tensor([0, 20, 20, 53, 60], dtype=torch.int32)
    weights = torch.tensor([1, 0, 2, 0], dtype=torch.int32)
    a, b, out = numbers(60, 64, dtype=BF16), numbers(3, 136, 64, dtype=BF16), poisoned(60, 136)
    run(library, FEW_BF16, out, a, b, groups=indptr, weight_indices=weights, grouping=PACKED)
    for group, weight in enumerate(weights.tolist()):
        rows = slice(int(indptr[group]), int(indptr[group + 1]))
        if rows.stop > rows.start:
            check(out[rows], a[rows], b[weight])


@pytest.mark.parametrize("kernel", [DENSE_BF16, DENSE_BLOCK, WIDE_BLOCK, TAIL_BLOCK])
@pytest.mark.parametrize("k, blocks", [(64, 1), (640, 3), (1280, 2)])
def test_tiles_taken_from_a_counter(library, kernel, k, blocks):
    """Blocks take tiles of large, small and empty groups when they are free; results are those of fixed turns."""
    indptr = torch.tensor([0, 20, 20, 320, 327, 455], dtype=torch.int32)
    dtype = BF16 if kernel == DENSE_BF16 else E4M3
    a, b = numbers(455, k, dtype=dtype), numbers(5, 264, k, dtype=dtype)
    scales = (None, None) if kernel == DENSE_BF16 else block_scales(a, b)
    options = {"groups": indptr, "grouping": PACKED, "scales": scales, "blocks": blocks}
    expected = run(library, kernel, poisoned(455, 264), a, b, **options)
    assert not expected.isnan().any()
    for seed in range(2):
        library.seed(seed)
        counter = torch.zeros(1, dtype=torch.int32)
        out = run(library, kernel, poisoned(455, 264), a, b, tile_counter=counter, **options)
        assert torch.equal(out, expected)
        assert int(counter) > 0


def gated(a: torch.Tensor, b: torch.Tensor, alpha, beta, limit, factor, bias, quantizer) -> torch.Tensor:
    """Return the activation of one group in float64, times the quantizer."""
    up, gate = (a.double() @ b.double().mT * factor + bias.double()).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta) * quantizer


@pytest.mark.parametrize("kernel, cluster", [(DENSE_BF16, 1), (FEW_BF16, 1), (FEW_BF16, 2)])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_gated_activation(library, kernel, cluster, dtype):
    """Both halves of the weights in one tile, with constants of each group; the last tile of columns is partial."""
    indptr = torch.tensor([0, 21, 21, 60], dtype=torch.int32)
    a, b = numbers(60, 136, dtype=BF16), (torch.randn(3, 160, 136) / 12).to(BF16)
    constants = [torch.rand(3) + 0.5, torch.rand(3), torch.rand(3) + 0.75, torch.rand(3) + 0.5]
    bias, quantizer = numbers(3, 160, dtype=BF16), torch.rand(3) + 1
    out = torch.full((60, 80), 7.0).to(dtype)
    activation = (*constants, bias, quantizer)
    options = {"groups": indptr, "grouping": PACKED, "activation": activation, "cluster": cluster}
    run(library, kernel, out, a, b, **options, blocks=cluster, weights_first=True)
    for group in (0, 2):
        rows = slice(int(indptr[group]), int(indptr[group + 1]))
        expected = gated(a[rows], b[group], *(x[group] for x in activation))
        assert error(out[rows], expected) < (TOLERANCE if dtype is BF16 else 0.04)


def test_gated_activation_without_constants(library):
    a, b = numbers(9, 64, dtype=BF16), numbers(1, 256, 64, dtype=BF16)
    indptr = torch.tensor([0, 9], dtype=torch.int32)
    out = run(library, FEW_BF16, poisoned(9, 128), a, b, groups=indptr, grouping=PACKED, activation=(None,) * 6)
    assert error(out, gated(a, b[0], 1.0, 0.0, torch.inf, 1.0, torch.zeros(256), 1.0)) < TOLERANCE


@pytest.mark.parametrize("kernel", [WIDE_BLOCK, FEW_BLOCK, FEWEST_BLOCK])
@pytest.mark.parametrize("has_constants", [False, True])
def test_gated_activation_of_blocks(library, has_constants, kernel):
    """Sums and results are rounded to bf16, and results quantised by row and 128 columns; one group has one wave."""
    indptr = torch.tensor([0, 150, 150, 190], dtype=torch.int32)
    a, b = numbers(190, 640, dtype=E4M3), numbers(3, 512, 640, dtype=E4M3)
    scales = block_scales(a, b)
    scales = (scales[0] / 16, scales[1] / 16)
    constants = (torch.rand(3) + 0.5, torch.rand(3), torch.rand(3) * 8 + 1, None, numbers(3, 512, dtype=BF16), None)
    out, found = torch.full((190, 256), 7.0).to(E4M3), torch.full((2, 192), torch.nan)
    options = {"groups": indptr, "grouping": PACKED, "activation": constants if has_constants else (None,) * 6}
    run(library, kernel, out, a, b, scales=scales, result_scales=found, **options)
    for group in (0, 2):
        rows = slice(int(indptr[group]), int(indptr[group + 1]))
        sums = dequantized(a[rows], scales[0][rows]) @ dequantized(b[group], scales[1][group]).mT
        alpha, beta, limit = (x[group] for x in constants[:3]) if has_constants else (1.0, 0.0, torch.inf)
        bias = constants[4][group].double() if has_constants else 0.0
        up, gate = (sums.to(BF16).double() + bias).chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        expected = (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(BF16).double()
        amax = expected.view(-1, 2, 128).abs().amax(dim=-1)
        torch.testing.assert_close(found[:, rows].mT.double(), amax / 448, rtol=2**-7, atol=0)
        values = out[rows].double().view(-1, 2, 128) * found[:, rows].mT.double().unsqueeze(-1)
        step = amax.unsqueeze(-1) / 448  # codes below 2^-6 are 2^-9 apart; others differ by an eighth
        errors = (values - expected.view(-1, 2, 128)).abs()
        assert bool((errors <= 2**-3.9 * expected.view(-1, 2, 128).abs() + 2**-9 * step).all())
    assert found[:, 190:].isnan().all()


@pytest.mark.parametrize("kernel", [FEW_BLOCK, FEWEST_BLOCK])
def test_gated_activation_of_blocks_of_few_tokens(library, kernel):
    """Tiles of few tokens store the bits of tiles of many, and nothing else; groups end inside tiles and with them."""
    indptr = torch.tensor([0, 3, 3, 11, 12, 45, 61], dtype=torch.int32)
    a, b = numbers(64, 1152, dtype=E4M3), numbers(6, 768, 1152, dtype=E4M3)  # more stages than the ring has
    a[5] = 0  # results without a largest one
    scales = block_scales(a, b)
    options = {"groups": indptr, "grouping": PACKED, "activation": (None,) * 6, "scales": (scales[0] / 32, scales[1])}
    results = []
    for seed, tile in enumerate((WIDE_BLOCK, kernel, kernel)):
        library.seed(seed)
        out, found = torch.full((64, 384), 7.0).to(E4M3), torch.full((3, 68), torch.nan)
        run(library, tile, out, a, b, result_scales=found, blocks=1 + seed, **options)
        results.append((out.view(torch.uint8), found))
    for out, found in results:
        assert torch.equal(out, results[0][0]) and torch.equal(found[:, :61], results[0][1][:, :61])
        assert bool((out.view(E4M3)[61:].float() == 7).all()) and bool(found[:, 61:].isnan().all())
    assert bool((results[0][1][:, 5] == 1).all())


def test_gated_blocks_that_are_refused(library):
    """Few tokens: neither blocks that split K, nor scales of single weights, nor half a block of results."""
    indptr, a = torch.tensor([0, 5], dtype=torch.int32), numbers(5, 256, dtype=E4M3)
    for rows, cluster, per_row in ((512, 2, False), (512, 1, True), (384, 1, False)):
        b = numbers(1, rows, 256, dtype=E4M3)
        out, found = torch.zeros(5, rows // 2).to(E4M3), torch.zeros(2, 8)
        options = {"groups": indptr, "grouping": PACKED, "activation": (None,) * 6, "result_scales": found}
        with pytest.raises(AssertionError):
            run(library, FEWEST_BLOCK, out, a, b, scales=block_scales(a, b, per_row), cluster=cluster, **options)


def routed(case: str, top_k: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the number of tokens, the ends of groups, and the pair of each row as a stable sort leaves them."""
    tokens, groups = 170, 5
    experts = torch.randint(0, groups, (tokens, top_k))
    if case == "empty":
        experts = experts.div(2, rounding_mode="floor") * 2  # groups 1 and 3 have no rows
    elif case == "one":
        experts.fill_(3)
    elif case == "ranks":
        experts = torch.where(torch.rand(tokens, top_k) < 0.5, groups, experts)  # half of the pairs are of other ranks
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=groups)[:groups]
    indptr = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    rows = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    rows[: indptr[-1]] = order[: indptr[-1]].int()
    return tokens, indptr, rows


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("case, top_k", [("any", 1), ("empty", 2), ("one", 2), ("ranks", 3)])
def test_gathered_rows(library, is_gated, case, top_k):
    """Rows found by the numbers of pairs give the bits of copied rows; K wraps the ring."""
    tokens, indptr, pairs = routed(case, top_k)
    x, b = numbers(tokens, 640, dtype=E4M3), numbers(5, 512, 640, dtype=E4M3)
    token_of = (pairs.clamp(min=0) // top_k).long()  # rows without a pair are not read
    copied = x.view(torch.uint8)[token_of].view(E4M3)
    scales = block_scales(x, b)
    options: dict = {"groups": indptr, "grouping": PACKED, "blocks": 3}
    if is_gated:
        options["activation"] = (None,) * 6
    results, found = [], []
    for kernel, a, of in ((WIDE_BLOCK, copied, (scales[0][token_of], scales[1])), (GATHER_BLOCK, x, scales)):
        options |= {"tile_counter": torch.zeros(1, dtype=torch.int32), "scales": of}
        if kernel == GATHER_BLOCK:
            options |= {"row_indices": pairs, "row_divisor": top_k}
        found.append(torch.full((2, len(pairs)), 7.0))
        if is_gated:
            options["result_scales"] = found[-1]
        library.seed(len(results))
        out = torch.full((len(pairs), 256 if is_gated else 512), 7.0).to(E4M3 if is_gated else BF16)
        results.append(run(library, kernel, out, a, b, **options).view(torch.uint8))
    assert torch.equal(*results) and torch.equal(*found)
    used = int(indptr[-1])
    assert not (out[:used].float() == 7).all(dim=-1).any()
    assert bool((found[1][:, :used] != 7).all()) == is_gated and bool((out[used:].float() == 7).all())


@pytest.mark.parametrize("kernel", [DENSE_BF16, FEW_BF16])
def test_kernels_that_do_not_gather(library, kernel):
    """Kernels that load tokens through a tensor map refuse numbers of rows."""
    _, indptr, pairs = routed("any", 1)
    a, b = numbers(170, 64, dtype=BF16), numbers(5, 128, 64, dtype=BF16)
    with pytest.raises(AssertionError):
        run(library, kernel, poisoned(170, 128), a, b, groups=indptr, grouping=PACKED, row_indices=pairs)
