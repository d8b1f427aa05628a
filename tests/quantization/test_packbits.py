# SPDX-License-Identifier: Apache-2.0
"""packbits against numpy's, and by segment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer import packbits, segment_packbits
from flashinfer._runtime.errors import ArgumentError
from flashinfer.trace.templates.quantization import packbits_trace, segment_packbits_trace

from ..bad_arguments import pattern
from ..graphs import capture
from .inputs import unaligned

ORDERS = ["big", "little"]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.float32),
    *(torch.int64, torch.float64, torch.complex64, torch.complex128),
]
# Lengths: 0, 1, around a byte, a word, a vector and a block of threads; more than one piece and chunk of a CPU thread.
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 2047, 2048, 2049, 8191, 8193, 300_001]
in_any_order = pytest.mark.parametrize("bitorder", ORDERS)
quick = settings(max_examples=60)


def random_bits(size, device, dtype=torch.bool):
    return (torch.rand(size, device=device) < 0.5).to(dtype)


def of_numpy(x, bitorder):
    return torch.from_numpy(np.packbits(x.to(torch.bool).cpu().numpy(), bitorder=bitorder))


def test_references_are_numpys(device):
    for template, order in zip((packbits_trace.templates[0], packbits_trace.templates[6]), ORDERS, strict=True):
        x = random_bits(77, device)
        assert torch.equal(template.reference(x).cpu(), of_numpy(x, order))


@in_any_order
@pytest.mark.parametrize("size", SIZES)
def test_sizes(device, size, bitorder):
    x = random_bits(size, device)
    packed = packbits(x, bitorder)
    assert packed.dtype == torch.uint8 and packed.device == x.device
    assert torch.equal(packed.cpu(), of_numpy(x, bitorder))


@in_any_order
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(device, dtype, bitorder):
    x = random_bits(1003, device).to(torch.float32).to(dtype)
    assert torch.equal(packbits(x, bitorder).cpu(), of_numpy(x.cpu(), bitorder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_zeros_and_what_is_almost_zero(device, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 2
    x = torch.tensor([0.0, -0.0, tiny, -tiny, torch.nan, torch.inf, -torch.inf, 1.0], dtype=dtype, device=device)
    assert packbits(x).tolist() == [0b00111111]


def test_complex_is_zero_when_both_parts_are(device):
    x = torch.tensor([0, -0.0, 1, 1j, complex(-0.0, -0.0)], dtype=torch.complex64, device=device)
    assert packbits(x, "little").tolist() == [0b01100]


@pytest.mark.parametrize("value", [1, 2, 128, 255])
def test_any_byte_but_zero_is_one(device, value):
    x = torch.zeros(40, dtype=torch.uint8, device=device)
    x[::3] = value
    assert torch.equal(packbits(x).cpu(), of_numpy(x, "big"))
    assert torch.equal(packbits(x.view(torch.bool)).cpu(), of_numpy(x, "big"))  # bool made by a view


@in_any_order
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_layouts(device, dtype, bitorder):
    x = random_bits((33, 5, 7), device, dtype)
    expected = of_numpy(x, bitorder)
    assert torch.equal(packbits(x, bitorder).cpu(), expected)
    assert torch.equal(packbits(unaligned(x), bitorder).cpu(), expected)
    assert torch.equal(packbits(x.transpose(0, 2), bitorder).cpu(), of_numpy(x.transpose(0, 2).contiguous(), bitorder))
    assert torch.equal(packbits(x[::2, 1:], bitorder).cpu(), of_numpy(x[::2, 1:].contiguous(), bitorder))
    assert torch.equal(packbits(x[0, 0, 0], bitorder).cpu(), of_numpy(x[0, 0, :1], bitorder))


@quick
@given(
    size=st.integers(0, 5000), order=st.sampled_from(ORDERS), dtype=st.sampled_from(DTYPES), offset=st.integers(0, 17)
)
def test_property(device, size, order, dtype, offset):
    x = random_bits(size + offset, device).to(torch.float32).to(dtype)[offset:]
    assert torch.equal(packbits(x, order).cpu(), of_numpy(x.cpu(), order))


# Segments -------------------------------------------------------------------------------------------------------------

SEGMENTS = {
    "none": [],
    "one": [100],
    "empty ones": [0, 0, 5, 0, 16, 0],
    "all empty": [0, 0],
    "single elements": [1] * 77,
    "whole bytes": [8, 16, 64, 8],
    "every remainder": list(range(40)),
    "long among short": [3, 70_001, 1, 0, 33, 4099, 16],
    "many": [13] * 1500,
}
INDEX_DTYPES = [torch.int32, torch.int64]


def make_segments(lengths, device, first=0, rest=0, index_dtype=torch.int32):
    indptr = torch.tensor([first, *lengths], device=device).cumsum(0).to(index_dtype)
    return random_bits(first + sum(lengths) + rest, device), indptr


def of_segments(x, indptr, bitorder):
    edges = indptr.tolist()
    parts = [of_numpy(x[a:b], bitorder) for a, b in itertools.pairwise(edges)]
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    return torch.cat([torch.empty(0, dtype=torch.uint8), *parts]), torch.tensor(offsets, dtype=torch.int32)


def check_segments(x, indptr, bitorder):
    packed, offsets = segment_packbits(x, indptr, bitorder)
    expected = of_segments(x, indptr, bitorder)
    assert packed.device == x.device and offsets.device == x.device
    assert packed.dtype == torch.uint8 and offsets.dtype == torch.int32
    assert torch.equal(packed.cpu(), expected[0])
    assert torch.equal(offsets.cpu(), expected[1])


@in_any_order
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(device, name, index_dtype, bitorder):
    check_segments(*make_segments(SEGMENTS[name], device, index_dtype=index_dtype), bitorder)


@in_any_order
def test_segment_references(device, bitorder):
    x, indptr = make_segments([3, 0, 17, 8], device)
    reference = segment_packbits_trace.templates[ORDERS.index(bitorder)].reference
    for actual, expected in zip(reference(x, indptr), of_segments(x, indptr, bitorder), strict=True):
        assert torch.equal(actual.cpu(), expected)


def test_a_part_of_x(device):
    """Check segments that do not begin at 0 or end at the end; uint8 and views are accepted too."""
    x, indptr = make_segments([9, 30, 200], device, first=5, rest=4)
    check_segments(x, indptr, "big")
    check_segments(x.view(torch.uint8) * 3, indptr, "little")
    check_segments(unaligned(x), indptr, "big")
    doubled = x.repeat_interleave(2)
    check_segments(doubled[::2], indptr.repeat_interleave(2)[::2], "big")


@quick
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), max_size=30),
    order=st.sampled_from(ORDERS),
    first=st.integers(0, 20),
    rest=st.integers(0, 40),
)
def test_segment_property(device, lengths, order, first, rest):
    check_segments(*make_segments(lengths, device, first, rest), order)


# Errors ---------------------------------------------------------------------------------------------------------------


def bits(size=16, dtype=torch.bool):
    return lambda device: torch.ones(size, dtype=dtype, device=device)


def edges(*values, dtype=torch.int32):
    return lambda device: torch.tensor(values, dtype=dtype, device=device)


BAD_SEGMENTS = [
    (bits(), edges(0, 16), "middle", "bitorder must be 'big' or 'little', got 'middle'"),
    (bits(dtype=torch.float32), edges(0, 16), "big", "x must be bool or uint8.*, got float32"),
    (bits((4, 4)), edges(0, 16), "big", "x must have 1 dimension.*, got 2"),
    (bits(), edges(0.0, 16.0, dtype=torch.float32), "big", "indptr must be int32 or int64.*, got float32"),
    (bits(), edges([0, 16]), "big", "indptr must have 1 dimension.*, got 2"),
    (bits(), edges(), "big", "indptr must have at least 1 element.*, got 0"),
    (bits(), edges(0, 17), "big", "indptr must rise from 0 to at most 16"),
    (bits(), edges(-1, 16), "big", "indptr must rise"),
    (bits(), edges(0, 9, 5, 16), "big", "indptr must rise"),
]


@pytest.mark.parametrize("x, indptr, bitorder, text", BAD_SEGMENTS, ids=[case[-1] for case in BAD_SEGMENTS])
def test_bad_segments(device, x, indptr, bitorder, text):
    with pytest.raises(ArgumentError, match=pattern(text)) as caught:
        segment_packbits(x(device), indptr(device), bitorder)
    assert str(caught.value).startswith("segment_packbits: ")


def test_bad_order(device):
    with pytest.raises(ValueError, match="packbits: bitorder must be 'big' or 'little', got 'middle'"):
        packbits(torch.ones(3, device=device), "middle")


# torch.compile and graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph(device, backend):
    def model(x, indptr):
        packed, offsets = segment_packbits(x, indptr, "little")
        return packbits(x * 2), packed + 1, offsets

    x, indptr = make_segments([3, 0, 17, 8], device)
    x = x.to(torch.uint8)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(x, indptr), model(x, indptr), strict=True):
        assert torch.equal(actual, expected)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_other_device():
    with pytest.raises(RuntimeError, match=r"segment_packbits: indptr must be on cuda:0.*, got cpu"):
        segment_packbits(torch.ones(8, dtype=torch.bool, device="cuda"), torch.tensor([0, 8]))


@needs_gpu
def test_cuda_graph():
    x = random_bits(100_003, "cuda")
    graph, packed = capture(lambda: packbits(x))
    x.copy_(random_bits(100_003, "cuda"))
    graph.replay()
    assert torch.equal(packed.cpu(), of_numpy(x, "big"))


@needs_gpu
def test_more_elements_than_int32():
    size = 2**31 + 24
    x = torch.zeros(size, dtype=torch.bool, device="cuda")
    x[-24::3] = True
    packed = packbits(x)
    assert packed.numel() == size // 8
    assert packed[:-3].count_nonzero() == 0
    assert packed[-3:].tolist() == of_numpy(x[-24:], "big").tolist()
    edges = torch.tensor([0, 2**31 + 3, size], device="cuda")
    packed, offsets = segment_packbits(x, edges)
    assert offsets.tolist() == [0, 2**28 + 1, 2**28 + 4]
    assert packed[-4:].tolist() == of_segments(x[-24:], torch.tensor([0, 3, 24]), "big")[0].tolist()
