# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of NVFP4 caches to 16 bits, flat and paged, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer import nvfp4_kv_dequantize, nvfp4_kv_dequantize_paged
from flashinfer._runtime.errors import ArgumentError
from flashinfer.trace.templates.quantization import nvfp4_kv_dequantize_paged_trace, nvfp4_kv_dequantize_trace

from ..bad_arguments import pattern
from ..graphs import capture
from .inputs import e4m3_scales, random_bytes, same_bits, unaligned

HALVES = [torch.float16, torch.bfloat16]
to_any_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
quick = settings(max_examples=40)
UNTOUCHED = 7.0


def matrix(rows, cols, device):
    scale = torch.rand(1, device=device) + 0.1
    return random_bytes(rows, cols // 2, device=device), e4m3_scales(rows, cols // 16, device=device), scale


def test_every_code_and_scale(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    scales = torch.arange(256, dtype=torch.uint8, device=device)  # includes NaN and negative scales
    data = codes.repeat_interleave(8).view(256, 8)
    out = nvfp4_kv_dequantize(data, scales.view(256, 1), torch.ones(1, device=device), torch.float16)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    values = table[torch.stack([codes.cpu() & 15, codes.cpu() >> 4], dim=1).long()]
    expected = values * scales.cpu().view(torch.float8_e4m3fn).float().unsqueeze(1)
    torch.testing.assert_close(out[:, :2].cpu(), expected.half(), rtol=0, atol=0, equal_nan=True)
    assert same_bits(out[:, 0::2][:, :1].expand(-1, 8).contiguous(), out[:, 0::2].contiguous())


@to_any_half
@pytest.mark.parametrize("rows, cols", [(0, 16), (3, 0), (1, 16), (7, 48), (99, 128), (5, 4096), (1000, 576)])
def test_matrix(device, rows, cols, dtype):
    data, scales, scale = matrix(rows, cols, device)
    out = nvfp4_kv_dequantize(data, scales, scale, dtype)
    assert out.shape == (rows, cols)
    assert same_bits(out, nvfp4_kv_dequantize_trace.reference(data, scales, scale, dtype))


def test_layouts_of_the_inputs(device):
    data, scales, scale = matrix(33, 64, device)
    expected = nvfp4_kv_dequantize(data, scales, scale)
    assert expected.dtype == torch.bfloat16
    assert same_bits(nvfp4_kv_dequantize(unaligned(data), scales.view(torch.uint8), scale[0]), expected)
    wide = torch.cat([data, data], dim=1)
    assert same_bits(nvfp4_kv_dequantize(wide[:, :32], scales, scale), expected)


# Paged ----------------------------------------------------------------------------------------------------------------


def paged(
    device, lens, heads=2, dims=(64, 64), page_size=16, layout="NHD", form="tuple", dtype=torch.bfloat16, room=None
):
    """Return the arguments of a call: pages of the requests in random order, outputs filled with a marker value."""
    room = max(lens, default=0) if room is None else room
    columns = -(-room // page_size) + 1
    pages = max(1, len(lens) * columns)
    order = (page_size, heads) if layout == "NHD" else (heads, page_size)

    def cache(make, divisor):
        if form == "stacked":
            return make(pages, 2, *order, dims[0] // divisor, device=device)
        return tuple(make(pages, *order, dim // divisor, device=device) for dim in dims)

    table = torch.randperm(pages, device=device)[: len(lens) * columns].view(len(lens), columns)
    out = [torch.full((len(lens), room, heads, d), UNTOUCHED, dtype=dtype, device=device) for d in dims]
    return {
        "paged_kv_cache": cache(random_bytes, 2),
        "kv_cache_sf": cache(e4m3_scales, 16),
        "block_tables": table.int(),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "k_scale": torch.rand(1, device=device) + 0.1,
        "v_scale": torch.rand((), device=device) + 0.1,
        "output_k": out[0],
        "output_v": out[1],
        "kv_layout": layout,
    }


def expected_of(arguments):
    halves = {"paged_kv_cache": ("paged_k_cache", "paged_v_cache"), "kv_cache_sf": ("k_scales", "v_scales")}
    flat = {name: value for name, value in arguments.items() if name not in ("kv_layout", *halves)}
    if isinstance(arguments["paged_kv_cache"], tuple):
        for name, parts in halves.items():
            flat |= dict(zip(parts, arguments[name], strict=True))
    else:
        flat |= {name: arguments[name] for name in halves}
    return nvfp4_kv_dequantize_paged_trace(**arguments).reference(**flat)


def check(arguments):
    expected = expected_of(arguments)
    assert nvfp4_kv_dequantize_paged(**arguments) is None
    for name, value in zip(("output_k", "output_v"), expected, strict=True):
        assert same_bits(arguments[name], value), name


@to_any_half
@pytest.mark.parametrize("form", ["tuple", "stacked"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged(device, layout, form, dtype):
    check(paged(device, [1, 0, 33, 16, 50], layout=layout, form=form, dtype=dtype))


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (16, 48), (576, 512), (1040, 16)])
def test_head_dims(device, dims):
    check(paged(device, [5, 17], dims=dims, heads=3))


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_page_sizes(device, page_size):
    check(paged(device, [1, 64, 37], page_size=page_size))


def test_tokens_beyond_the_length_stay(device):
    arguments = paged(device, [3, 0], room=20)
    nvfp4_kv_dequantize_paged(**arguments)
    for name in ("output_k", "output_v"):
        assert (arguments[name][0, 3:] == UNTOUCHED).all() and (arguments[name][1] == UNTOUCHED).all()


def test_lengths_past_the_room_are_cut(device):
    arguments = paged(device, [30, 5], room=20)
    check(arguments)


def test_int64_tables_and_wide_ones(device):
    arguments = paged(device, [20, 31])
    expected = expected_of(arguments)
    wide = torch.cat([arguments["block_tables"]] * 2, dim=1).long()
    arguments["block_tables"] = wide[:, : wide.shape[1] // 2]
    nvfp4_kv_dequantize_paged(**arguments)
    assert same_bits(arguments["output_k"], expected[0]) and same_bits(arguments["output_v"], expected[1])


@pytest.mark.parametrize("pad", [1, 8, 64])
def test_strides(device, pad):
    """Check caches, scales and outputs as parts of larger buffers; odd gaps prevent alignment."""

    def spread(t):
        wide = torch.zeros((*t.shape[:-1], t.shape[-1] + pad), dtype=torch.uint8, device=device)
        wide = wide if t.element_size() == 1 else wide.to(t.dtype)
        view = (wide.view(t.dtype) if t.element_size() == 1 else wide)[..., pad:]
        view.copy_(t)
        return view

    arguments = paged(device, [20, 31], dims=(64, 32))
    for name in ("paged_kv_cache", "kv_cache_sf"):
        arguments[name] = tuple(spread(t) for t in arguments[name])
    for name in ("output_k", "output_v"):
        arguments[name] = spread(arguments[name])
    expected = expected_of(arguments)
    nvfp4_kv_dequantize_paged(**arguments)
    assert same_bits(arguments["output_k"].contiguous(), expected[0])
    assert same_bits(arguments["output_v"].contiguous(), expected[1])


@pytest.mark.parametrize("lens, heads, room", [([], 2, 4), ([3], 0, 4), ([0, 0], 2, 0)])
def test_empty_outputs(device, lens, heads, room):
    check(paged(device, lens, heads=heads, room=room))


@quick
@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    heads=st.integers(1, 4),
    dims=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    page_size=st.integers(1, 33),
    layout=st.sampled_from(["NHD", "HND"]),
    dtype=st.sampled_from(HALVES),
)
def test_property(device, lens, heads, dims, page_size, layout, dtype):
    check(paged(device, lens, heads, tuple(16 * d for d in dims), page_size, layout, dtype=dtype))


# Errors ---------------------------------------------------------------------------------------------------------------

BAD_MATRIX = [
    ({"fp4_data": ((4, 12), torch.uint8)}, "must be a multiple of 16.*, so K = 24"),
    ({"fp4_data": ((64,), torch.uint8)}, "fp4_data must have 2 dimensions, got 1"),
    ({"fp4_data": ((4, 32), torch.float32)}, "fp4_data must be uint8.*, got float32"),
    ({"block_scales": ((4, 5), torch.uint8)}, "block_scales.shape[1] must be 4.*, got 5"),
    ({"block_scales": ((3, 4), torch.uint8)}, "block_scales.shape[0] must be 4.*, got 3"),
    ({"block_scales": ((4, 4), torch.float32)}, "block_scales must be float8_e4m3fn or uint8.*, got float32"),
    ({"global_scale": ((2,), torch.float32)}, "global_scale must have 1 element.*, got 2"),
    ({"global_scale": ((1,), torch.float64)}, "global_scale must be float32.*, got float64"),
    ({"output_dtype": torch.float32}, "output_dtype must be torch.bfloat16 or torch.float16, got torch.float32"),
]


@pytest.mark.parametrize("change, text", BAD_MATRIX, ids=[text for _, text in BAD_MATRIX])
def test_bad_matrix(device, change, text):
    arguments = dict(zip(("fp4_data", "block_scales", "global_scale"), matrix(4, 64, device), strict=True))
    for name, value in change.items():
        arguments[name] = torch.ones(value[0], dtype=value[1], device=device) if isinstance(value, tuple) else value
    with pytest.raises(ArgumentError, match=pattern(text)) as caught:
        nvfp4_kv_dequantize(**arguments)
    assert str(caught.value).startswith("nvfp4_kv_dequantize: ")


def halves(change):
    return lambda pair: tuple(change(t) for t in pair)


BAD_PAGED = [
    ("kv_layout", lambda _: "NDH", "kv_layout must be 'NHD' or 'HND', got 'NDH'"),
    ("k_scale", lambda t: t.repeat(2), "k_scale and v_scale must be scalar tensors"),
    ("v_scale", lambda t: 0.5, "k_scale and v_scale must be scalar tensors"),
    ("k_scale", lambda t: t.double(), "k_scale must be float32.*, got float64"),
    ("paged_kv_cache", halves(lambda t: t.float()), "k_cache must be uint8.*, got float32"),
    ("paged_kv_cache", lambda pair: pair[0], "paged_kv_cache must have shape"),
    ("paged_kv_cache", lambda pair: pair[:1], "paged_kv_cache must be a tensor or a tuple of two, got tuple"),
    ("paged_kv_cache", halves(lambda t: t[0]), "k_cache must have 4 dimensions.*, got 3"),
    ("paged_kv_cache", halves(lambda t: t.repeat(1, 1, 1, 2)[..., ::2]), "k_cache.stride(-1) must be 1.*, got 2"),
    ("kv_cache_sf", halves(lambda t: t.float()), "k_cache_sf must be float8_e4m3fn or uint8.*, got float32"),
    ("kv_cache_sf", halves(lambda t: t[..., :2]), "k_cache_sf.shape[3] must be 4.*, got 2"),
    ("kv_cache_sf", halves(lambda t: t[:1]), "k_cache_sf.shape[0] must be"),
    ("block_tables", lambda t: t.float(), "block_tables must be int32 or int64.*, got float32"),
    ("block_tables", lambda t: t[0], "block_tables must have 2 dimensions.*, got 1"),
    ("block_tables", lambda t: t[:1], "block_tables.shape[0] must be 2.*, got 1"),
    ("block_tables", lambda t: t[:, :1], "block_tables column count insufficient"),
    ("seq_lens", lambda t: t.long(), "seq_lens must be int32.*, got int64"),
    ("seq_lens", lambda t: t[:1], "seq_lens.shape[0] must be 2.*, got 1"),
    ("output_k", lambda t: t.float(), "output_k must be float16 or bfloat16.*, got float32"),
    ("output_v", lambda t: t.half(), "output_v must be bfloat16.*, got float16"),
    ("output_v", lambda t: t[:, :5], "output_v.shape[1] must be 31.*, got 5"),
    ("output_v", lambda t: t[..., :32], "output_v.shape[3] must be 64.*, got 32"),
    ("output_v", lambda t: t[:1].expand(t.shape), "output_v.stride(0) must not be 0"),
]


@pytest.mark.parametrize("name, change, text", BAD_PAGED, ids=[f"{name}-{text}" for name, _, text in BAD_PAGED])
def test_bad_paged(device, name, change, text):
    arguments = paged(device, [20, 31])
    arguments[name] = change(arguments[name])
    with pytest.raises(ArgumentError, match=pattern(text)) as caught:
        nvfp4_kv_dequantize_paged(**arguments)
    assert str(caught.value).startswith("nvfp4_kv_dequantize_paged: ")


@pytest.mark.parametrize("page", [-1, 10**6])
def test_pages_of_no_cache(device, page):
    """Check pages outside of the cache: a CPU call is rejected; a GPU skips their tokens only."""
    arguments = paged(device, [20, 31])
    whole = {**arguments, **{name: arguments[name].clone() for name in ("output_k", "output_v")}}
    nvfp4_kv_dequantize_paged(**whole)
    arguments["block_tables"] = arguments["block_tables"].clone()
    arguments["block_tables"][1, 1] = page
    if device == "cpu":
        with pytest.raises(ArgumentError, match=rf"block_tables\[1, 1\] must be a page of the cache.*, got {page}"):
            nvfp4_kv_dequantize_paged(**arguments)
        return
    nvfp4_kv_dequantize_paged(**arguments)
    for name in ("output_k", "output_v"):
        whole[name][1, 16:] = UNTOUCHED
        assert torch.equal(arguments[name], whole[name])


# torch.compile and graphs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph(device, backend):
    data, scales, scale = matrix(8, 64, device)
    arguments = paged(device, [20, 31])

    def model(scale, **arguments):
        nvfp4_kv_dequantize_paged(**arguments)
        return nvfp4_kv_dequantize(data, scales, scale * 2).float() + 1

    expected_paged = expected_of(arguments)
    expected = nvfp4_kv_dequantize(data, scales, scale * 2).float() + 1
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(scale, **arguments), expected)
    assert same_bits(arguments["output_k"], expected_paged[0]) and same_bits(arguments["output_v"], expected_paged[1])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_cuda_graph():
    arguments = paged("cuda", [20, 31])
    graph, _ = capture(lambda: nvfp4_kv_dequantize_paged(**arguments))
    arguments["seq_lens"].copy_(torch.tensor([31, 4]))
    arguments["k_scale"].mul_(2)
    arguments["output_k"].fill_(UNTOUCHED)
    arguments["output_v"].fill_(UNTOUCHED)
    expected = expected_of(arguments)
    graph.replay()
    assert same_bits(arguments["output_k"], expected[0]) and same_bits(arguments["output_v"], expected[1])


@needs_gpu
def test_more_elements_than_int32():
    data, scales, scale = matrix(2**17 + 1, 2**14, "cuda")
    out = nvfp4_kv_dequantize(data, scales, scale)
    assert same_bits(out[-2:], nvfp4_kv_dequantize_trace.reference(data[-2:], scales[-2:], scale))
