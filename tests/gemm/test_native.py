# SPDX-License-Identifier: Apache-2.0
"""The general product: element types, strides, scales, groupings and tails, against float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm.launch import BATCHED, CONTIGUOUS, MASKED, PACKED, product

from ..bad_arguments import check_refused
from ..tensors import gaps_are_untouched, view_of_wider
from .references import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    SUM_OF_13_BITS,
    block_scales,
    check,
    dequantized,
    operand,
    poisoned,
)


def gemm(out: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Call the product; errors carry this name, which is the name of the native function."""
    product(out, *args, **kwargs)
    return out


#: Rows of tokens, rows of weights and elements along K that share a scale.
BLOCKS = (1, 128, 128)
PAIRS = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(x).split(".")[1] for x in pair))
@pytest.mark.parametrize("out_dtype", [FP32, FP16, BF16])
def test_dtypes(device, pair, out_dtype):
    a, b = operand(19, 45, dtype=pair[0], device=device), operand(37, 45, dtype=pair[1], device=device)
    check(gemm(poisoned(19, 37, dtype=out_dtype, device=device), a, b), a.double(), b.double())


#: Rows, weights and K: one element, one row and small batches (streamed weights), tails of every tile size, several
#: tiles along each axis, K over several chunks.
SHAPES = [
    (1, 1, 1),
    (1, 300, 700),
    (3, 65, 129),
    (5, 40, 33),
    (16, 129, 260),
    (33, 31, 515),
    (130, 70, 64),
    (450, 520, 40),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [FP32, BF16, E4M3])
def test_shapes(device, shape, dtype):
    m, n, k = shape
    a, b = operand(m, k, dtype=dtype, device=device), operand(n, k, dtype=dtype, device=device)
    check(gemm(poisoned(m, n, dtype=BF16, device=device), a, b), a.double(), b.double())


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with the last two axes swapped in memory."""
    return x.mT.contiguous().mT


def every_second(x: torch.Tensor) -> torch.Tensor:
    """Return the same values in every second row and column of a larger buffer."""
    wide = torch.zeros(*x.shape[:-2], 2 * x.shape[-2], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2, ::2] = x
    return wide[..., ::2, ::2]


LAYOUTS = [torch.Tensor.contiguous, transposed, view_of_wider, every_second]


@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 35])
def test_strides(device, rows, layout_a, layout_b):
    a, b = operand(2, rows, 51, dtype=BF16, device=device), operand(2, 67, 51, dtype=BF16, device=device)
    out = gemm(poisoned(2, rows, 67, dtype=BF16, device=device), layout_a(a), layout_b(b))
    check(out, a.double(), b.double())


@pytest.mark.parametrize("layout", [transposed, view_of_wider, every_second])
def test_strides_of_the_result(device, layout):
    a, b = operand(35, 51, dtype=FP16, device=device), operand(67, 51, dtype=FP16, device=device)
    out = layout(torch.zeros(35, 67, dtype=FP32, device=device))
    check(gemm(out, a, b), a.double(), b.double())
    if layout is view_of_wider:
        assert gaps_are_untouched(out)


def test_expanded_operands(device):
    """Strides of zero, as ``expand`` makes them, are read like others."""
    a, b = operand(1, 5, 33, dtype=BF16, device=device), operand(3, 40, 33, dtype=BF16, device=device)
    out = gemm(poisoned(3, 5, 40, dtype=BF16, device=device), a.expand(3, 5, 33), b)
    check(out, a.double().expand(3, 5, 33), b.double())


GRANULARITIES = [(1, 128, 128), (128, 128, 128), (1, 1, 128), (4, 16, 32)]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("shape", [(1, 200, 300), (35, 200, 640), (140, 100, 200)], ids=str)
def test_block_scales(device, shape, granularity):
    m, n, k = shape
    a, b = operand(2, m, k, dtype=E4M3, device=device), operand(2, n, k, dtype=E4M3, device=device)
    gm, gn, gk = granularity
    a_scale, b_scale = transposed(block_scales(a, gm, gk)), block_scales(b, gn, gk)  # as quantisers write them
    out = poisoned(2, m, n, dtype=BF16, device=device)
    gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, granularity=granularity)
    sums = SUM_OF_13_BITS if device == "cuda" and granularity in ((1, 128, 128), (1, 1, 128)) else 1e-6
    check(out, dequantized(a, a_scale, gm, gk), dequantized(b, b_scale, gn, gk), sum_error=sums)


def test_two_level_sums_are_as_exact_as_float32_sums(device):
    """The contract: the error is at most 1.1 times that of exact products summed in float32."""
    a, b = operand(32, 4096, dtype=E4M3, device=device), operand(64, 4096, dtype=E4M3, device=device)
    a_scale, b_scale = block_scales(a, 1, 128), block_scales(b, 128, 128)
    out = gemm(poisoned(32, 64, dtype=FP32, device=device), a, b, a_scale=a_scale, b_scale=b_scale, granularity=BLOCKS)
    x, y = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    in_order = torch.zeros(32, 64, device=device)
    for k in range(4096):
        in_order += (x[:, None, k] * y[None, :, k]).float()
    exact = x @ y.mT
    assert (out.double() - exact).norm() <= 1.1 * (in_order.double() - exact).norm()


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (BF16, BF16)], ids=str)
def test_tensor_scales(device, dtypes):
    """Scales of one element, of any rank; one or both."""
    a, b = operand(17, 96, dtype=dtypes[0], device=device), operand(40, 96, dtype=dtypes[1], device=device)
    a_scale, b_scale = torch.tensor(0.7, device=device), torch.tensor([1.9], device=device)
    out = gemm(poisoned(17, 40, dtype=FP16, device=device), a, b, a_scale=a_scale, b_scale=b_scale)
    check(out, dequantized(a, a_scale), dequantized(b, b_scale))
    check(gemm(out, a, b, b_scale=b_scale), dequantized(a), dequantized(b, b_scale))


def test_tensor_scale_with_block_scales(device):
    a, b = operand(17, 256, dtype=E4M3, device=device), operand(40, 256, dtype=E4M3, device=device)
    a_scale, b_scale = torch.tensor([0.7], device=device), block_scales(b, 16, 128)
    out = poisoned(17, 40, dtype=BF16, device=device)
    gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, granularity=(1, 16, 128))
    check(out, dequantized(a, a_scale), dequantized(b, b_scale, 16, 128))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("rows", [2, 20])
def test_bias(device, rows, dtype):
    a, b = operand(rows, 48, dtype=BF16, device=device), operand(50, 48, dtype=BF16, device=device)
    bias = operand(50, dtype=dtype, device=device)
    out = gemm(poisoned(rows, 50, dtype=BF16, device=device), a, b, bias=bias)
    check(out, a.double(), b.double(), bias.double())


@pytest.mark.parametrize("rows", [2, 20])
def test_alpha_beta_bias(device, rows):
    a, b = operand(rows, 48, dtype=FP16, device=device), operand(50, 48, dtype=FP16, device=device)
    before, bias = operand(rows, 50, dtype=FP16, device=device), operand(50, dtype=FP16, device=device)
    out = gemm(before.clone(), a, b, bias=bias, alpha=-0.5, beta=2.0)
    check(out, -0.5 * a.double(), b.double(), bias.double() + 2.0 * before.double())


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (0, 0, 0)], ids=str)
def test_nothing_to_compute(device, shape):
    m, n, k = shape
    a, b = operand(m, k, dtype=BF16, device=device), operand(n, k, dtype=BF16, device=device)
    assert gemm(poisoned(m, n, dtype=BF16, device=device), a, b).shape == (m, n)


def test_empty_sum(device):
    """K of zero leaves bias and the former result."""
    a, b = operand(3, 0, dtype=BF16, device=device), operand(5, 0, dtype=BF16, device=device)
    bias = operand(5, dtype=BF16, device=device)
    assert gemm(poisoned(3, 5, dtype=BF16, device=device), a, b).eq(0).all()
    assert gemm(poisoned(3, 5, dtype=BF16, device=device), a, b, bias=bias).eq(bias).all()
    assert gemm(torch.ones(3, 5, dtype=BF16, device=device), a, b, beta=0.5).eq(0.5).all()


def int32(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_contiguous(device):
    """Rows in blocks of 128 that share a group; one block is padding, one group is empty."""
    order = [2, 0, -1, 2]
    a, b = operand(512, 256, dtype=E4M3, device=device), operand(3, 100, 256, dtype=E4M3, device=device)
    a_scale, b_scale = block_scales(a, 1, 128), block_scales(b, 128, 128)
    groups = int32(order, device).repeat_interleave(128)
    out = torch.full((512, 100), 7.0, dtype=BF16, device=device)
    gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, groups=groups, grouping=CONTIGUOUS, granularity=BLOCKS)
    tokens, weights = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    for i, group in enumerate(order):
        rows = slice(128 * i, 128 * i + 128)
        if group >= 0:
            check(out[rows], tokens[rows], weights[group])
        else:
            assert out[rows].eq(7).all()


def test_masked(device):
    counts = [0, 5, 40, 1]
    a, b = operand(4, 40, 256, dtype=E4M3, device=device), operand(4, 100, 256, dtype=E4M3, device=device)
    a_scale, b_scale = block_scales(a, 1, 128), block_scales(b, 128, 128)
    out = torch.full((4, 40, 100), 7.0, dtype=BF16, device=device)
    groups = int32(counts, device)
    gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, groups=groups, grouping=MASKED, expected_m=8, granularity=BLOCKS)
    tokens, weights = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    for i, count in enumerate(counts):
        check(out[i, :count], tokens[i, :count], weights[i])
        assert out[i, count:].eq(7).all()


PACKED_CASES = [
    ((E4M3, BF16), None),
    ((BF16, BF16), None),
    ((BF16, FP32), [1, 0, 1, 2, 2]),
    ((E4M3, BF16), [4, 4, 0, 1, 3]),
]


@pytest.mark.parametrize("dtypes, indices", PACKED_CASES, ids=str)
def test_packed(device, dtypes, indices):
    """Rows before the first and after the last group are not written; groups may be empty and share weights."""
    bounds = [2, 2, 5, 38, 38, 44]
    a, b = operand(50, 256, dtype=dtypes[0], device=device), operand(5, 90, 256, dtype=dtypes[0], device=device)
    scales = (block_scales(a, 1, 128), block_scales(b, 128, 128)) if dtypes[0] == E4M3 else (None, None)
    out = torch.full((50, 90), 7.0, dtype=dtypes[1], device=device)
    chosen = None if indices is None else int32(indices, device)
    gemm(
        out,
        a,
        b,
        a_scale=scales[0],
        b_scale=scales[1],
        granularity=None if scales[1] is None else BLOCKS,
        groups=int32(bounds, device),
        grouping=PACKED,
        weight_indices=chosen,
    )
    tokens, weights = dequantized(a, scales[0], 1, 128), dequantized(b, scales[1], 128, 128)
    for i in range(5):
        rows = slice(bounds[i], bounds[i + 1])
        check(out[rows], tokens[rows], weights[i if indices is None else indices[i]])
    assert out[:2].eq(7).all() and out[44:].eq(7).all()


def test_packed_scales_of_row_blocks(device):
    """Blocks of rows are counted over all of ``a``, not within a group."""
    a, b = operand(64, 128, dtype=E4M3, device=device), operand(2, 32, 128, dtype=E4M3, device=device)
    a_scale, b_scale = block_scales(a, 16, 64), block_scales(b, 8, 64)
    out = poisoned(64, 32, dtype=BF16, device=device)
    groups = int32([0, 20, 64], device)
    gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, groups=groups, grouping=PACKED, granularity=(16, 8, 64))
    tokens, weights = dequantized(a, a_scale, 16, 64), dequantized(b, b_scale, 8, 64)
    check(out[:20], tokens[:20], weights[0])
    check(out[20:], tokens[20:], weights[1])


@pytest.mark.parametrize("rows", [1, 40])
def test_repeatable_whatever_the_threads(rows):
    """The order of additions does not depend on how tiles are shared out."""
    a, b = operand(rows, 1030, dtype=BF16, device="cpu"), operand(700, 1030, dtype=BF16, device="cpu")
    first = gemm(poisoned(rows, 700, dtype=FP32, device="cpu"), a, b)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert gemm(poisoned(rows, 700, dtype=FP32, device="cpu"), a, b).equal(first)
    finally:
        torch.set_num_threads(threads)


GOOD = {"out": ((4, 6), BF16), "a": ((4, 8), BF16), "b": ((6, 8), BF16)}

BAD = [
    ({"a": ((4, 8), torch.float64)}, "a must be .*, got float64"),
    ({"b": ((6, 8), FP16)}, "b must be bfloat16 (the dtype of a).*, got float16"),
    ({"a": ((4, 8), E4M3)}, "b must be float8_e4m3fn (the dtype of a).*, got bfloat16"),
    ({"out": ((4, 6), E4M3)}, "out must be .*, got float8_e4m3fn"),
    ({"b": ((6, 9), BF16)}, "b.shape[1] must be 8 (a.shape[-1]).*, got 9"),
    ({"out": ((5, 6), BF16)}, "out.shape[0] must be 4 (a.shape[-2]).*, got 5"),
    ({"out": ((4, 7), BF16)}, "out.shape[1] must be 6 (b.shape[-2]).*, got 7"),
    ({"out": ((1, 4, 6), BF16)}, "out must have 2 dimensions.*, got 3"),
    ({"b": ((1, 6, 8), BF16)}, "b must have 2 dimensions.*, got 3"),
    ({"bias": ((5,), BF16)}, "bias.shape[0] must be 6 (b.shape[-2]).*, got 5"),
    ({"a_scale": ((2,), FP32)}, "a_scale must have 2 dimensions.*, got 1"),
    ({"a_scale": ((4, 2), FP32)}, "a_scale.shape[1] must be 1 (blocks of K).*, got 2"),
    ({"b_scale": ((2, 1), FP32)}, "b_scale.shape[0] must be 1 (blocks of rows).*, got 2"),
    ({"b_scale": ((1,), BF16)}, "b_scale must be .*, got bfloat16"),
    ({"grouping": 4}, "grouping must be in 0 .. 3, got 4"),
    ({"granularity": (1, 0, 128)}, "granularity must be positive, got (1, 0, 128)"),
    ({"groups": ((4,), torch.int32)}, "groups must be None for a batched product"),
    ({"weight_indices": ((4,), torch.int32)}, "weight_indices must be None unless grouping is 3"),
    ({"grouping": PACKED, "b": ((2, 6, 8), BF16)}, "groups must be given for grouped products, got None"),
    (
        {"grouping": PACKED, "b": ((2, 6, 8), BF16), "groups": ((2,), torch.int32)},
        "groups must have 3 elements.*, got 2",
    ),
    ({"grouping": PACKED, "b": ((2, 6, 8), BF16), "groups": ((3,), torch.int64)}, "groups must be .*, got int64"),
    ({"grouping": MASKED, "b": ((2, 6, 8), BF16)}, "a must have 3 dimensions.*, got 2"),
]


@pytest.mark.parametrize("changes, text", BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(device, changes, text):
    from ..bad_arguments import make_arguments

    arguments = make_arguments({**GOOD, "grouping": BATCHED}, device)
    arguments.update({k: v if k == "granularity" else make_arguments({k: v}, device)[k] for k, v in changes.items()})
    check_refused(gemm, text, arguments.pop("out"), arguments.pop("a"), arguments.pop("b"), **arguments)


BAD_VALUES = [
    (CONTIGUOUS, (4, 8), [0, 0, 2, 1], "groups[2] must be in -1 .. 1, got 2"),
    (CONTIGUOUS, (4, 8), [0, -2, 1, 1], "groups[1] must be in -1 .. 1, got -2"),
    (MASKED, (2, 4, 8), [4, 5], "groups[1] must be in 0 .. 4, got 5"),
    (PACKED, (4, 8), [0, 3, 2], "groups[2] must be in 3 .. 4, got 2"),
    (PACKED, (4, 8), [0, 3, 5], "groups[2] must be in 3 .. 4, got 5"),
]


@pytest.mark.parametrize("grouping, shape, values, text", BAD_VALUES)
def test_group_values_are_checked_on_the_cpu(grouping, shape, values, text):
    a, b = torch.ones(shape, dtype=BF16), torch.ones(2, 6, 8, dtype=BF16)
    out = torch.ones(*shape[:-1], 6, dtype=BF16)
    check_refused(gemm, text, out, a, b, groups=int32(values, "cpu"), grouping=grouping)


def test_weight_indices_are_checked_on_the_cpu():
    a, b, out = torch.ones(4, 8, dtype=BF16), torch.ones(2, 6, 8, dtype=BF16), torch.ones(4, 6, dtype=BF16)
    groups, indices = int32([0, 2, 4], "cpu"), int32([0, 2], "cpu")
    text = "weight_indices[1] must be in 0 .. 1, got 2"
    check_refused(gemm, text, out, a, b, groups=groups, grouping=PACKED, weight_indices=indices)


def test_results_do_not_share_memory(device):
    a, b = torch.ones(4, 8, dtype=BF16, device=device), torch.ones(6, 8, dtype=BF16, device=device)
    out = torch.ones(1, 6, dtype=BF16, device=device).expand(4, 6)
    check_refused(gemm, "out.stride(0) must not be 0", out, a, b)
