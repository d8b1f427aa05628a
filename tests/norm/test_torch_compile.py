# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) of the norm family: one graph, the same numbers as eager calls."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..graphs import capture

ROWS, HIDDEN = 7, 128


def make_tensors(device):
    x, residual, weight = (
        torch.randn(s, device=device).bfloat16() for s in ((ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN,))
    )
    gain, beta = torch.randn(2, HIDDEN, device=device)
    return {"x": x, "residual": residual, "weight": weight, "gain": gain, "beta": beta}


@pytest.fixture
def tensors(device):
    return make_tensors(device)


def allocating(x, residual, weight, gain, beta):
    y = flashinfer.rmsnorm(x, weight)
    return y + flashinfer.gemma_rmsnorm(x * 2, weight, eps=1e-5, enable_pdl=False)


def in_place(x, residual, weight, gain, beta):
    x, residual = x + 1, residual * 2
    flashinfer.fused_add_rmsnorm(x, residual, weight)
    flashinfer.gemma_fused_add_rmsnorm(x, residual, weight, 1e-5)
    return x * residual


def writes_to_arguments(x, residual, weight, gain, beta):
    flashinfer.fused_add_rmsnorm(x, residual, weight)
    return flashinfer.rmsnorm(x, weight, out=x)


def functional(x, residual, weight, gain, beta):
    return flashinfer.layernorm(x - 1, gain, beta) * 2


def quantised(x, residual, weight, gain, beta):
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.full((1,), 0.5, device=x.device)
    flashinfer.rmsnorm_quant(out, x, weight, scale)
    other = torch.empty_like(out)
    flashinfer.layernorm_quant(other, x, gain, beta, scale)
    flashinfer.fused_add_rmsnorm_quant(out, x, residual, weight, scale)
    return out.float() + other.float()


MODELS = [allocating, in_place, writes_to_arguments, functional, quantised]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_same_numbers(tensors, model, backend):
    eager, compiled = ({name: t.clone() for name, t in tensors.items()} for _ in range(2))
    expected = model(**eager)
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(**compiled), expected)
    for name in tensors:  # exactly the arguments that are written to
        assert torch.equal(compiled[name], eager[name]), name


@pytest.mark.filterwarnings("ignore:.*a float scale is deprecated")
def test_scale_as_a_number(tensors):
    def model(x, weight):
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        flashinfer.rmsnorm_quant(out, x, weight, 0.5)
        return out.float()

    x, weight = tensors["x"], tensors["weight"]
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x, weight), model(x, weight))


def test_symbolic_batch(tensors, device):
    compiled = torch.compile(flashinfer.rmsnorm, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 5, 64):
        x = torch.randn(rows, HIDDEN, device=device).bfloat16()
        assert torch.equal(compiled(x, tensors["weight"]), flashinfer.rmsnorm(x, tensors["weight"]))


def test_diffusion_layernorm(device):
    def model(x, residual, table):
        gate, scale, shift = table[:, :, 0], table[:, :, 1], table[:, :, 2]
        residual, y = flashinfer.fused_dit_gate_residual_layernorm_scale_shift(x, residual, gate, scale, shift)
        return residual * y

    x, residual = torch.randn(2, 1, 5, 3072, device=device).bfloat16()
    table = torch.randn(1, 5, 6, 3072, device=device).bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, residual, table), model(x, residual, table))


def test_ops_have_their_published_names():
    for name in (
        *("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "layernorm", "layernorm_quant"),
        *("fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "fused_add_rmsnorm_quant"),
    ):
        schema = getattr(torch.ops.flashinfer, name).default._schema
        assert schema.is_mutable == (name != "layernorm")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_cuda_graph_replays_on_new_values():
    tensors = make_tensors("cuda")
    x, weight, out = tensors["x"], tensors["weight"], torch.empty_like(tensors["x"])
    graph, _ = capture(lambda: flashinfer.rmsnorm(x, weight, out=out))
    x.normal_()
    graph.replay()
    assert torch.equal(out, flashinfer.rmsnorm(x, weight))


@needs_gpu
def test_cuda_graph_of_a_compiled_model():
    tensors = make_tensors("cuda")
    compiled = torch.compile(allocating, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # warm-up, capture, replay
        # inductor fuses the arithmetic around the norms and rounds once where eager rounds twice
        torch.testing.assert_close(compiled(**tensors).clone(), allocating(**tensors), rtol=2e-2, atol=2e-2)
