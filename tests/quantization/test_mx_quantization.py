# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and FP4 blocks and the layouts of their scales, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer import (
    SfLayout,
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp8_dequantize_host,
    mxfp8_quantize,
    nvfp4_block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
    utils,
)
from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.trace.templates import quantization as templates
from flashinfer.trace.templates.quantization_blocks import padded_scales

from ..bad_arguments import check_refused
from .inputs import LAYOUTS, random_bytes, same_bits, unaligned

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# No elements; one block; a padded tile; one row and column past a tile; several tiles in both directions.
SHAPES = [(0, 64), (1, 32), (7, 96), (128, 128), (129, 160), (300, 4096)]
quick = settings(max_examples=40)
in_any_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)


def usable(layout, device):
    if layout == SfLayout.layout_8x4 and device == "cpu":
        pytest.skip("CUDA only")


def swizzled(row, col, rows, cols, layout):
    """Return the offset of a scale, as the contract defines it."""
    p = -(-cols // 4) * 4
    if layout == SfLayout.layout_128x4:
        return (row // 128) * 128 * p + (col // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4
    if layout == SfLayout.layout_8x4:
        return (row // 8) * p * 8 + (col // 4) * 32 + (row % 8) * 4 + col % 4
    return row * cols + col


# MXFP8 ----------------------------------------------------------------------------------------------------------------


def scale_byte(amax):
    """Return the scale byte of a block by scalar arithmetic."""
    t = np.float32(np.float32(amax) / np.float32(448))
    bits = int(t.view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    if mantissa != 0 and not (exponent == 0 and mantissa <= 0x400000):
        exponent += 1
    return min(exponent, 254)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows, cols", SHAPES)
@in_any_layout
def test_mxfp8(device, rows, cols, layout, dtype):
    usable(layout, device)
    x = (torch.randn(rows, cols, device=device) * torch.logspace(-6, 3, cols, device=device)).to(dtype)
    out, scales = mxfp8_quantize(x, sf_swizzle_layout=layout)
    expected = templates.mxfp8_quantize_layout_trace.reference(x, sf_swizzle_layout=layout)
    assert out.shape == x.shape and scales.ndim == 1
    assert same_bits(out, expected[0]) and same_bits(scales, expected[1])


def test_mxfp8_scales_number_by_number(device):
    amax = [
        0.0,
        1e-45,
        448 * 2**-127,
        448 * 1.01 * 2**-127,
        448 * 2.0**-126,
        1e-30,
        1.0,
        447.9,
        448.0,
        448.1,
        1e30,
        3e38,
    ]
    x = torch.zeros(len(amax), 32, device=device)
    x[:, 5] = torch.tensor(amax)
    out, scales = mxfp8_quantize(x, is_sf_swizzled_layout=False)
    assert scales.tolist() == [scale_byte(value) for value in amax]
    values = x.cpu().double() * 2.0 ** (127 - scales.cpu().double()).unsqueeze(1)
    values[scales.cpu() == 0] = 0
    assert same_bits(out, values.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_mxfp8_saturates(device):
    x = torch.ones(1, 64, device=device)
    x[0, 3], x[0, 40] = torch.inf, -torch.inf
    out, scales = mxfp8_quantize(x, is_sf_swizzled_layout=False)
    values = out.view(torch.float8_e4m3fn).float()
    assert scales.tolist() == [254, 254] and values[0, 3] == 448 and values[0, 40] == -448
    assert values.isfinite().all()


@pytest.mark.parametrize("shape, alignment", [((3, 40), 32), ((2, 3, 96), 64), ((70,), 128), ((0, 5), 32)], ids=str)
@pytest.mark.parametrize("swizzled", [True, False])
def test_mxfp8_pads_rows_and_takes_any_rank(device, shape, alignment, swizzled):
    x = torch.randn(*shape, device=device)
    out, scales = mxfp8_quantize(x, swizzled, alignment)
    padded = -(-shape[-1] // alignment) * alignment
    zeros = torch.nn.functional.pad(x, (0, padded - shape[-1])).reshape(-1, padded)
    expected = templates.mxfp8_quantize_layout_trace.reference(zeros, swizzled)
    assert out.shape == (*shape[:-1], padded) and not out[..., shape[-1] :].any()
    assert same_bits(out.reshape(-1, padded), expected[0]) and same_bits(scales, expected[1])


def test_mxfp8_inputs(device):
    x = torch.randn(40, 128, device=device)
    out, scales = mxfp8_quantize(x)
    for other in (unaligned(x), torch.cat([x, x], dim=1)[:, :128], x.t().contiguous().t()):
        assert same_bits(mxfp8_quantize(other)[0], out) and same_bits(mxfp8_quantize(other)[1], scales)
    linear = mxfp8_quantize(x, is_sf_swizzled_layout=False, alignment=64, enable_pdl=False)[1]
    assert same_bits(linear, mxfp8_quantize(x, True, sf_swizzle_layout=SfLayout.layout_linear)[1])
    assert same_bits(padded_scales(linear.view(40, 4), 0), scales)


@in_any_layout
def test_mxfp8_round_trip(device, layout):
    usable(layout, device)
    x = torch.randn(130, 192, device=device)
    back = mxfp8_dequantize_host(*mxfp8_quantize(x, sf_swizzle_layout=layout), sf_swizzle_layout=layout)
    assert back.device.type == "cpu" and back.dtype == torch.float32
    torch.testing.assert_close(back, x.cpu(), rtol=2**-4, atol=2**-8)


@in_any_layout
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_mxfp8_dequantize(device, rows, cols, layout):
    data = random_bytes(rows, cols, device=device)
    scales = padded_scales(random_bytes(rows, cols // 32, device=device, low=1, high=256), layout)
    actual = mxfp8_dequantize_host(data, scales, sf_swizzle_layout=layout)
    expected = templates.mxfp8_dequantize_host_trace.reference(data.cpu(), scales.cpu(), sf_swizzle_layout=layout)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@quick
@given(
    rows=st.integers(0, 140), blocks=st.integers(1, 9), layout=st.sampled_from([0, 2]), dtype=st.sampled_from(FLOATS)
)
def test_mxfp8_property(device, rows, blocks, layout, dtype):
    x = torch.randn(rows, 32 * blocks, device=device).to(dtype)
    expected = templates.mxfp8_quantize_layout_trace.reference(x, sf_swizzle_layout=layout)
    for actual, value in zip(mxfp8_quantize(x, sf_swizzle_layout=layout), expected, strict=True):
        assert same_bits(actual, value)


# FP4 ------------------------------------------------------------------------------------------------------------------


@in_any_layout
@pytest.mark.parametrize("ufp8_type", [0, 1])
@pytest.mark.parametrize("vec", [16, 32])
@pytest.mark.parametrize("has_global", [False, True])
def test_e2m1(device, layout, ufp8_type, vec, has_global):
    rows, cols = 37, 192
    data = random_bytes(rows, cols // 2, device=device)
    scales = random_bytes(rows, cols // vec, device=device, high=127)
    factor = torch.tensor([0.3], device=device) if has_global else None
    flags = (layout != SfLayout.layout_linear, layout == SfLayout.layout_8x4)
    arguments = (data, padded_scales(scales, layout), factor, vec, ufp8_type, *flags)
    actual = e2m1_and_ufp8sf_scale_to_float(*arguments)
    expected = templates.e2m1_and_ufp8sf_scale_to_float_trace.reference(
        *(a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)
    )
    assert actual.device.type == "cpu" and same_bits(actual, expected)


def test_e2m1_number_by_number(device):
    """Check -6 times 2^3 times 0.5 in the second row of a column block, high nibble of its last byte."""
    data, scales = (
        torch.zeros(2, 16, dtype=torch.uint8, device=device),
        torch.zeros(512, dtype=torch.uint8, device=device),
    )
    data[1, 15] = 0xF1
    scales[swizzled(1, 0, 2, 1, SfLayout.layout_128x4)] = 130
    out = e2m1_and_ufp8sf_scale_to_float(data, scales, torch.tensor([0.5]), 32, 0)
    assert out[1, 31] == -24 and out[1, 30] == 2 and out.count_nonzero() == 2


@in_any_layout
def test_mxfp4_dequantize(device, layout):
    data, scales = random_bytes(130, 64, device=device), random_bytes(130, 4, device=device, low=100, high=140)
    stored = padded_scales(scales, layout)
    expected = templates.mxfp4_dequantize_trace.reference(data.cpu(), stored.cpu(), layout)
    assert same_bits(mxfp4_dequantize(data, stored, layout), expected)
    assert same_bits(mxfp4_dequantize_host(data, scales), expected)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 128), (2, 0, 64), (0, 64)])
@pytest.mark.parametrize("group_size", [2, 6, 16, 32, 64])
def test_mxfp4_dequantize_host(device, shape, group_size):
    shape = (*shape[:-1], shape[-1] // 64 * 3 * 64)  # divisible by 6
    data = random_bytes(*shape[:-1], shape[-1] // 2, device=device)
    scales = random_bytes(*shape[:-1], shape[-1] // group_size, device=device, high=255)
    expected = templates.mxfp4_dequantize_host_trace.reference(data.cpu(), scales.cpu(), group_size)
    assert same_bits(mxfp4_dequantize_host(data, scales, group_size), expected)


# Layouts --------------------------------------------------------------------------------------------------------------


@in_any_layout
def test_reference_layout(layout):
    rows, cols = 140, 6
    scales = torch.arange(rows * cols).view(rows, cols) + 1
    stored = padded_scales(scales, layout)
    for row in (0, 1, 31, 32, 127, 128, 139):
        for col in range(cols):
            assert stored[swizzled(row, col, rows, cols, layout)] == scales[row, col]
    assert stored.count_nonzero() == rows * cols
    assert stored.numel() == {0: 256 * 8, 1: 144 * 8, 2: rows * cols}[layout]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 4), (4, 0), (1, 1), (128, 4), (129, 5), (300, 64), (3, 200, 13), (0, 8, 8), (2, 1, 40)]
)
def test_interleave(device, shape, dtype):
    scales = random_bytes(*shape, device=device).to(dtype)
    out = block_scale_interleave(scales)
    assert out.dtype == dtype and out.ndim == 1
    assert same_bits(out, templates.block_scale_interleave_trace.reference(scales))


def test_interleave_of_views(device):
    scales = random_bytes(130, 24, device=device)
    expected = block_scale_interleave(scales)
    assert same_bits(block_scale_interleave(unaligned(scales)), expected)
    assert same_bits(block_scale_interleave(torch.cat([scales, scales], dim=1)[:, :24]), expected)
    assert nvfp4_block_scale_interleave is block_scale_interleave


@quick
@given(rows=st.integers(0, 300), cols=st.integers(0, 40), batch=st.integers(0, 3), dtype=st.sampled_from([0, 1]))
def test_interleave_property(device, rows, cols, batch, dtype):
    shape = (rows, cols) if batch == 0 else (batch, rows, cols)
    scales = random_bytes(*shape, device=device).to((torch.uint8, torch.bfloat16)[dtype])
    assert same_bits(block_scale_interleave(scales), templates.block_scale_interleave_trace.reference(scales))


@pytest.mark.parametrize("tile, block", [(64, 16), (128, 32), (256, 32), (16, 16)])
def test_shuffle(device, tile, block):
    x = torch.arange(256 * 3, device=device).view(256, 3)
    out = shuffle_matrix_a(x, tile)
    assert torch.equal(out, templates.shuffle_matrix_a_trace.reference(x, tile))
    moved = (out[:block, 0] // 3).tolist()
    assert moved[:9] == ([0, 2, 4, 6, 8, 10, 12, 14, 1] if block == 16 else [0, 4, 8, 12, 16, 20, 24, 28, 1])
    scales = random_bytes(256, 5, device=device)
    assert same_bits(shuffle_matrix_sf_a(scales, tile), templates.shuffle_matrix_sf_a_trace.reference(scales, tile))


@pytest.mark.parametrize("tile, block", [(64, 16), (128, 32)])
def test_rows_of_shuffles(device, tile, block):
    """Check the row indices for callers that gather the rows themselves."""
    x = random_bytes(256, 4, device=device)
    assert utils.get_shuffle_block_size(tile) == block
    rows = utils.get_shuffle_matrix_a_row_indices(x, tile)
    assert torch.equal(x[rows], shuffle_matrix_a(x, tile))
    of_scales = utils.get_shuffle_matrix_sf_a_row_indices(x, tile, num_elts_per_sf=32)
    assert same_bits(block_scale_interleave(x[of_scales]), shuffle_matrix_sf_a(x, tile))
    check_refused(utils.get_shuffle_matrix_a_row_indices, "input_tensor must have 2 dimensions", x[:8], tile)
    check_refused(
        utils.get_shuffle_matrix_sf_a_row_indices,
        "input_tensor.shape[0] must be a multiple of 128, got 64",
        x[:64],
        tile,
    )


# Errors ---------------------------------------------------------------------------------------------------------------


def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def f32(*shape):
    return torch.zeros(shape)


BAD = [
    (mxfp8_quantize, (f32(4, 96), True, 48), {}, "alignment must be a multiple of 32, got 48"),
    (mxfp8_quantize, (f32(),), {}, "input must have at least 1 dimension, got 0"),
    (mxfp8_quantize, (f32(4, 32).int(),), {}, "input must be float16 or bfloat16 or float32.*, got int32"),
    (mxfp8_quantize, (f32(4, 32),), {"sf_swizzle_layout": 3}, "the layout must be an SfLayout, got 3"),
    (mxfp8_dequantize_host, (u8(4, 40), u8(512)), {}, "rows of input must have a multiple of 32 elements.*, got 40"),
    (mxfp8_dequantize_host, (u8(4, 64), u8(511)), {}, "scale_tensor must have 512 elements.*, got 511"),
    (mxfp8_dequantize_host, (f32(4, 64), u8(512)), {}, "input must be uint8.*, got float32"),
    (mxfp8_dequantize_host, (u8(64), u8(512)), {}, "input must have 2 dimensions.*, got 1"),
    (e2m1_and_ufp8sf_scale_to_float, (u8(4, 12), u8(512)), {}, "rows of e2m1_tensor must have"),
    (e2m1_and_ufp8sf_scale_to_float, (u8(4, 16), u8(512)), {"sf_vec_size": 0}, "must have a multiple of 0"),
    (e2m1_and_ufp8sf_scale_to_float, (u8(4, 16), u8(512)), {"ufp8_type": 2}, "ufp8_type must be 0 (ue8m0) or 1"),
    (
        e2m1_and_ufp8sf_scale_to_float,
        (u8(4, 16), u8(512), f32(2)),
        {},
        "global_scale_tensor must have 1 element.*, got 2",
    ),
    (e2m1_and_ufp8sf_scale_to_float, (u8(16), u8(512)), {}, "e2m1_tensor must have 2 dimensions, got 1"),
    (e2m1_and_ufp8sf_scale_to_float, (u8(4, 16), u8(511)), {}, "ufp8_scale_tensor must have 512 elements.*, got 511"),
    (e2m1_and_ufp8sf_scale_to_float, (u8(4, 16), u8(512), 1.0), {}, "global_scale_tensor must be a float32"),
    (mxfp4_dequantize, (u8(4, 16), u8(511)), {}, "a_sf must have 512 elements.*, got 511"),
    (mxfp4_dequantize_host, (u8(), u8(4, 2)), {}, "weight must have at least 1 dimension, got 0"),
    (mxfp4_dequantize, (u8(16), u8(512)), {}, "a_fp4 must have 2 dimensions, got 1"),
    (mxfp4_dequantize, (u8(4, 16), u8(512), 7), {}, "the layout must be an SfLayout, got 7"),
    (mxfp4_dequantize_host, (u8(4, 16), u8(4, 2)), {}, "scale must have 4 elements.*, got 8"),
    (
        mxfp4_dequantize_host,
        (u8(4, 15), u8(4, 2)),
        {"group_size": 3},
        "rows of weight must have a multiple of 3 elements.*, got 30",
    ),
    (block_scale_interleave, (u8(16),), {}, "unswizzled_sf must have 2 or 3 dimensions, got 1"),
    (block_scale_interleave, (f32(4, 4),), {}, "unswizzled_sf must be uint8 or bfloat16.*, got float32"),
    (shuffle_matrix_a, (f32(40, 4), 64), {}, "must have 2 dimensions and rows in blocks of 16"),
    (shuffle_matrix_a, (f32(48, 4), 128), {}, "must have 2 dimensions and rows in blocks of 32"),
    (shuffle_matrix_sf_a, (u8(), 128), {}, "input_tensor must have 2 dimensions"),
    (shuffle_matrix_sf_a, (u8(96, 4), 128), {}, "input_tensor.shape[0] must be a multiple of 128, got 96"),
    (shuffle_matrix_sf_a, (u8(128, 4), 128, 8), {}, "num_elts_per_sf must be 16 or 32, got 8"),
]


@pytest.mark.parametrize("op, args, kwargs, text", BAD, ids=[f"{op.__name__}-{text}" for op, *_, text in BAD])
def test_bad_argument(device, op, args, kwargs, text):
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    check_refused(op, text, *moved, **kwargs)


def test_what_the_cpu_does_not_have():
    with pytest.raises(ValueError, match="sf_swizzle_layout must be layout_128x4 or layout_linear"):
        mxfp8_quantize(f32(4, 32), sf_swizzle_layout=SfLayout.layout_8x4)
    with pytest.raises(BackendSupportedError, match="backend must be 'cuda'"):
        mxfp8_quantize(f32(4, 32), backend="cute-dsl")


# torch.compile and graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph(device, backend):
    def model(x):
        out, scales = mxfp8_quantize(x * 2, is_sf_swizzled_layout=False)
        return out, scales, block_scale_interleave(scales.view(x.shape[0], -1)), shuffle_matrix_a(x, 64)

    def host_model(data, scales):
        return mxfp4_dequantize_host(data, scales) * 2

    x = torch.randn(48, 128, device=device)
    for actual, expected in zip(torch.compile(model, fullgraph=True, backend=backend)(x), model(x), strict=True):
        assert torch.equal(actual, expected)
    data, scales = random_bytes(4, 32, device="cpu"), random_bytes(4, 2, device="cpu", low=100, high=140)
    assert torch.equal(
        torch.compile(host_model, fullgraph=True, backend=backend)(data, scales), host_model(data, scales)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graph():
    x = torch.randn(48, 128, device="cuda")
    mxfp8_quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, scales = mxfp8_quantize(x)
        swizzled_again = block_scale_interleave(scales.view(128, 4))
    x.normal_()
    graph.replay()
    expected = mxfp8_quantize(x)
    assert same_bits(out, expected[0]) and same_bits(scales, expected[1])
    assert same_bits(swizzled_again, block_scale_interleave(scales.view(128, 4)))
