# SPDX-License-Identifier: Apache-2.0
"""Gated activations: values, layouts, edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, swiglu
from flashinfer.testing import assert_close
from flashinfer.trace.templates.activation import (
    gelu_and_mul_trace,
    gelu_tanh_and_mul_trace,
    silu_and_mul_trace,
    swiglu_trace,
)

from ..tensors import gaps_are_untouched, view_of_wider

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OPS = [
    pytest.param(silu_and_mul, silu_and_mul_trace.reference, id="silu"),
    pytest.param(gelu_and_mul, gelu_and_mul_trace.reference, id="gelu"),
    pytest.param(gelu_tanh_and_mul, gelu_tanh_and_mul_trace.reference, id="gelu_tanh"),
]
on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_any_op = pytest.mark.parametrize("op, reference", OPS)

# Leading shape, half width: no elements, the smallest 16-byte vector, an odd number of 8-byte vectors, one past a block
# of vectors, more rows than a block has, several blocks per row, a long row, no leading dimension.
SHAPES = [
    ((0,), 128),
    ((7,), 0),
    ((1,), 4),
    ((99,), 12),
    ((7,), 1028),
    ((1000,), 64),
    ((33,), 4096),
    ((2, 3, 5), 200),
    ((1,), 65536 + 8),
    ((), 128),
]


def randn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (3 * torch.randn(shape, device=device)).to(dtype)


def test_references_are_the_published_formulas():
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    input = torch.cat([x, torch.full_like(x, 2.0)]).float()
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    assert_close(silu_and_mul_trace.reference(input), (2 * x / (1 + torch.exp(-x))).float())
    assert_close(gelu_and_mul_trace.reference(input), (x * (1 + torch.erf(x / math.sqrt(2)))).float())
    assert_close(gelu_tanh_and_mul_trace.reference(input), (x * (1 + torch.tanh(u))).float())
    assert_close(swiglu_trace.reference(input[1001:], x.float()), (2 / (1 + torch.exp(-x))).float())


@on_any_dtype
@pytest.mark.parametrize("leading, half", SHAPES)
@on_any_op
def test_act_and_mul(device, op, reference, leading, half, dtype):
    x = randn(*leading, 2 * half, dtype=dtype, device=device)
    before = x.clone()
    out = op(x)
    assert out.shape == (*leading, half) and out.is_contiguous()
    assert_close(out, reference(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("batch, seq, half", [(1, 1, 128), (2, 16, 2048), (4, 2, 11008)])
@on_any_op
def test_close_to_torch_in_fp16(device, op, reference, batch, seq, half):
    """Compare with the published test's expression: operators of torch that round to fp16 in between."""
    x = torch.randn(batch, seq, 2 * half, device=device).half()
    gate, up = x.chunk(2, dim=-1)
    name = {"silu_and_mul": "silu"}.get(op.__name__, "gelu")
    options = {"approximate": "tanh"} if op is gelu_tanh_and_mul else {}
    expected = getattr(torch.nn.functional, name)(gate, **options) * up
    torch.testing.assert_close(op(x), expected, rtol=1e-3, atol=1e-3)


@on_any_op
def test_every_bfloat16(device, op, reference):
    """Check all 65536 gates, infinities and NaN included."""
    gate = torch.arange(65536, device=device).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.cat([gate, torch.ones_like(gate)])
    assert_close(op(x), reference(x), equal_nan=True)


@on_any_op
def test_product_is_rounded_once(device, op, reference):
    # exact in double; rounding twice to bfloat16 errs by up to one unit in the last place, rounding once by half a unit
    x = randn(64, 2 * 512, dtype=torch.bfloat16, device=device)
    gate, up = x.double().cpu().chunk(2, dim=-1)
    exact = {
        "silu_and_mul": lambda: torch.nn.functional.silu(gate),
        "gelu_and_mul": lambda: torch.nn.functional.gelu(gate),
        "gelu_tanh_and_mul": lambda: torch.nn.functional.gelu(gate, approximate="tanh"),
    }[op.__name__]() * up
    error = (op(x).double().cpu() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-5).all()


@on_any_dtype
@pytest.mark.parametrize("pad, offset", [(3, 1), (64, 0), (64, 8), (4, 4)])
@pytest.mark.parametrize("half", [64, 1004])
def test_strided_rows(device, half, pad, offset, dtype):
    x = randn(7, 2 * half, dtype=dtype, device=device)
    wide, out = view_of_wider(x, pad, offset), view_of_wider(torch.zeros_like(x[:, :half]), pad, offset)
    assert silu_and_mul(wide, out=out) is out
    assert_close(out, silu_and_mul_trace.reference(x))
    assert gaps_are_untouched(out)


@on_any_dtype
@on_any_op
def test_out_may_be_the_gate(device, op, reference, dtype):
    x = randn(99, 2 * 512, dtype=dtype, device=device)
    expected = torch.cat([reference(x), x[:, 512:]], dim=-1)
    op(x, out=x[:, :512])
    assert_close(x, expected)


@pytest.mark.parametrize("enable_pdl", [None, False, True])
@on_any_op
def test_enable_pdl_changes_nothing(device, op, reference, enable_pdl):
    x = randn(99, 2 * 512, dtype=torch.float16, device=device)
    assert torch.equal(op(x, enable_pdl=enable_pdl), op(x))


@on_any_dtype
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (7, 13, 17), (0, 5), (5, 0), (33, 4096), (100_003,)])
def test_swiglu(device, shape, dtype):
    x, gate = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    out = swiglu(x, gate)
    assert out.shape == x.shape and out.dtype == dtype
    assert_close(out, swiglu_trace.reference(x, gate))
    assert swiglu(x, gate, out=x) is x
    assert torch.equal(x, out)


def test_swiglu_is_silu_and_mul_turned_round(device):
    x = randn(7, 2 * 64, dtype=torch.float32, device=device)
    gate, up = x.chunk(2, dim=-1)
    assert_close(swiglu(gate, gate) * up, silu_and_mul(x))


@settings(max_examples=40)
@given(data=st.data())
def test_swiglu_any_layout(device, data):
    """Check that shape, padding, order of dimensions and dtype do not change the values."""
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    shape = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), label="shape")
    order = data.draw(st.permutations(range(len(shape))), label="order")

    def draw(name):
        pad = data.draw(st.integers(0, 20), label=f"{name} pad")
        view = view_of_wider(randn(*shape, dtype=dtype, device=device), pad, data.draw(st.integers(0, pad)))
        step = data.draw(st.sampled_from([1, 1, 2]), label=f"{name} step")
        return view[..., ::step].permute(order)

    x, gate = draw("x"), draw("gate")
    smallest = [min(sizes) for sizes in zip(x.shape, gate.shape, strict=True)]
    index = tuple(slice(0, size) for size in smallest)
    x, gate = x[index], gate[index]
    expected = swiglu_trace.reference(x, gate)
    assert_close(swiglu(x, gate), expected)
    out = view_of_wider(torch.zeros(smallest, device=device).to(dtype), 5, 2)
    if len(smallest) <= 2:
        assert swiglu(x, gate, out=out) is out
        assert_close(out, expected)
        assert gaps_are_untouched(out)


@settings(max_examples=40)
@given(data=st.data())
def test_act_and_mul_any_layout(device, data):
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    half = data.draw(st.integers(0, 300), label="half") * (8 // dtype.itemsize)
    leading = data.draw(st.lists(st.integers(0, 6), max_size=3), label="leading")
    op, reference = data.draw(st.sampled_from([p.values for p in OPS]), label="op")
    x = randn(*leading, 2 * half, dtype=dtype, device=device)
    pad = data.draw(st.integers(0, 20), label="pad")
    offset = data.draw(st.integers(0, pad), label="offset")
    assert_close(op(view_of_wider(x, pad, offset)), reference(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(device, backend):
    def model(x):
        y = silu_and_mul(x) + gelu_and_mul(x * 2, enable_pdl=False) - gelu_tanh_and_mul(x)
        out = torch.empty_like(y)
        silu_and_mul(x, out=out)
        return swiglu(y, out) * out

    x = randn(7, 2 * 64, dtype=torch.bfloat16, device=device)
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(x), model(x))


def test_symbolic_batch(device):
    compiled = torch.compile(silu_and_mul, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 5, 64):
        x = randn(rows, 2 * 64, dtype=torch.bfloat16, device=device)
        assert torch.equal(compiled(x), silu_and_mul(x))


def test_ops_have_their_published_names():
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu"):
        assert getattr(torch.ops.flashinfer, name).default._schema.is_mutable
        assert getattr(flashinfer, name) is getattr(flashinfer.activation, name)


def test_modules_by_activation(device):
    specs = [flashinfer.activation.gen_act_and_mul_module(name, device) for name in ("silu", "gelu", "gelu_tanh")]
    flashinfer.jit.build_jit_specs(specs, verbose=False)
    assert flashinfer.jit.gen_act_and_mul_module("silu").name == "activation"
    assert hasattr(flashinfer.activation.get_act_and_mul_module("gelu_tanh", device), "gelu_tanh_and_mul")
    assert hasattr(flashinfer.activation.get_act_and_mul_module(act_func_name="gelu", backend=device), "gelu_and_mul")
