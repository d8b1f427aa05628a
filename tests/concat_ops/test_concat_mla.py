# SPDX-License-Identifier: Apache-2.0
"""concat_mla_k: copies the bits of both parts, whatever their strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.concat_ops import concat_mla_k, get_concat_mla_module
from flashinfer.trace.templates.concat_ops import concat_mla_k_trace

from ..bad_arguments import pattern
from ..graphs import capture

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [BF16, FP16, torch.float8_e4m3fn, torch.float8_e5m2]
on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return every bit pattern, NaNs included: a copy must preserve all of them."""
    *leading, last = shape
    return torch.randint(0, 256, (*leading, last * dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)


def parts(tokens: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return bits(tokens, 128, 128, dtype=dtype, device=device), bits(tokens, 1, 64, dtype=dtype, device=device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def expected(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    k = torch.empty(*nope.shape[:2], 192, dtype=nope.dtype, device=nope.device)
    assert concat_mla_k_trace.reference(k, nope.contiguous(), rope.contiguous()) is k
    return k


def test_reference_copies_element_by_element():
    nope, rope = parts(2, BF16, "cpu")
    out = expected(nope, rope)
    for t, h in ((0, 0), (1, 77)):
        assert same_bits(out[t, h, :128], nope[t, h]) and same_bits(out[t, h, 128:], rope[t, 0])


@on_any_dtype
@pytest.mark.parametrize("tokens", [0, 1, 7, 257])
def test_contiguous(device, tokens, dtype):
    nope, rope = parts(tokens, dtype, device)
    k = bits(tokens, 128, 192, dtype=dtype, device=device)
    assert concat_mla_k(k, nope, rope) is None
    assert same_bits(k, expected(nope, rope))


@on_any_dtype
def test_slices_of_a_projection(device, dtype):
    """Check the strides of a model: k_nope beside v, k_rope beside the latent vector."""
    packed, latent = bits(33, 128, 256, dtype=dtype, device=device), bits(33, 576, dtype=dtype, device=device)
    nope, rope = packed[..., :128], latent[:, 512:].unsqueeze(1)
    k = torch.empty(33, 128, 192, dtype=dtype, device=device)
    concat_mla_k(k, nope, rope)
    assert same_bits(k, expected(nope, rope))


@settings(max_examples=30)
@given(data=st.data())
def test_any_layout(device, data):
    """Check that padding, offset, order of dimensions and dtype do not change the bits or write into gaps."""
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    tokens = data.draw(st.integers(0, 9), label="tokens")

    def draw(name, heads, width):
        pad = data.draw(st.sampled_from([0, 1, 8, 16, 64]), label=f"{name} pad")
        offset = data.draw(st.sampled_from([0, pad]), label=f"{name} offset")
        swapped = data.draw(st.booleans(), label=f"{name} heads before tokens")
        leading = (heads, tokens) if swapped else (tokens, heads)
        wide = bits(*leading, width + pad, dtype=dtype, device=device)
        view = wide[..., offset : offset + width]
        return wide, view.transpose(0, 1) if swapped else view

    (buffer, k), (_, nope), (_, rope) = draw("k", 128, 192), draw("nope", 128, 128), draw("rope", 1, 64)
    before, mine = buffer.clone(), torch.zeros(buffer.shape, dtype=torch.bool, device=device)
    mine.as_strided(k.shape, k.stride(), k.storage_offset()).fill_(True)
    concat_mla_k(k, nope, rope)
    assert same_bits(k, expected(nope, rope))
    integer = torch.int16 if dtype.itemsize == 2 else torch.int8
    assert torch.equal(buffer.view(integer)[~mine], before.view(integer)[~mine])


def test_names():
    assert flashinfer.concat_mla_k is concat_mla_k
    from flashinfer.dsv3_ops import concat_mla_k as published

    assert published is concat_mla_k


def test_module(device):
    assert hasattr(get_concat_mla_module(device), "concat_mla_k")


def test_backend(device):
    nope, rope = parts(3, BF16, device)
    k = torch.empty(3, 128, 192, dtype=BF16, device=device)
    concat_mla_k(k, nope, rope, backend="default")
    assert same_bits(k, expected(nope, rope))
    with pytest.raises(BackendSupportedError, match="does not support backend 'fast'; usable here: default"):
        concat_mla_k(k, nope, rope, backend="fast")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(device, backend):
    def model(nope, rope):
        k = torch.zeros(nope.shape[0], 128, 192, dtype=nope.dtype, device=nope.device)
        concat_mla_k(k, nope * 2, rope)
        return k + 1

    nope, rope = (torch.randn(3, h, d, device=device).to(BF16) for h, d in ((128, 128), (1, 64)))
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(nope, rope), model(nope, rope))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_capture():
    nope, rope = (torch.randn(7, h, d, device="cuda").to(BF16) for h, d in ((128, 128), (1, 64)))
    k = torch.empty(7, 128, 192, dtype=BF16, device="cuda")
    graph, _ = capture(lambda: concat_mla_k(k, nope, rope))
    nope.normal_()
    rope.normal_()
    graph.replay()
    assert same_bits(k, expected(nope, rope))


GOOD = {"k": ((4, 128, 192), BF16), "k_nope": ((4, 128, 128), BF16), "k_rope": ((4, 1, 64), BF16)}
BAD = [
    ("k", ((4, 64, 192), BF16), "k.shape[1] must be 128 (the only size there is a kernel for).*, got 64"),
    ("k", ((4, 128, 256), BF16), "k.shape[2] must be 192.*, got 256"),
    ("k", ((4, 128 * 192), BF16), "k must have 3 dimensions.*, got 2"),
    ("k", ((4, 128, 192), torch.float32), "k must be bfloat16 or float16.*, got float32"),
    ("k", ((4, 128, 192), FP16), "k_nope must be float16 (the dtype of k).*, got bfloat16"),
    ("k", lambda t: t.repeat(1, 1, 2)[..., ::2], "k.stride(-1) must be 1.*, got 2"),
    ("k", lambda t: t[:1].expand(t.shape), "k.stride(0) must not be 0"),
    ("k_nope", ((3, 128, 128), BF16), "k_nope.shape[0] must be 4 (k.shape[0]).*, got 3"),
    ("k_nope", ((4, 64, 128), BF16), "k_nope.shape[1] must be 128.*, got 64"),
    ("k_nope", ((4, 128, 64), BF16), "k_nope.shape[2] must be 128.*, got 64"),
    ("k_nope", ((4, 128, 128), FP16), "k_nope must be bfloat16 (the dtype of k).*, got float16"),
    ("k_nope", lambda t: t.repeat(1, 1, 2)[..., ::2], "k_nope.stride(-1) must be 1.*, got 2"),
    ("k_rope", ((4, 2, 64), BF16), "k_rope.shape[1] must be 1.*, got 2"),
    ("k_rope", ((4, 1, 128), BF16), "k_rope.shape[2] must be 64.*, got 128"),
    ("k_rope", ((4, 64), BF16), "k_rope must have 3 dimensions.*, got 2"),
    ("k_rope", ((4, 1, 64), torch.float8_e4m3fn), "k_rope must be bfloat16.*, got float8_e4m3fn"),
]


@pytest.mark.parametrize("argument, bad, text", BAD, ids=[text for *_, text in BAD])
def test_bad_argument(device, argument, bad, text):
    arguments = {name: torch.ones(shape, device=device).to(dtype) for name, (shape, dtype) in GOOD.items()}
    good = arguments[argument]
    arguments[argument] = bad(good) if callable(bad) else torch.ones(bad[0], device=device).to(bad[1])
    with pytest.raises(RuntimeError, match=pattern(text)) as caught:
        concat_mla_k(**arguments)
    assert isinstance(caught.value, ArgumentError) and str(caught.value).startswith("concat_mla_k: ")
