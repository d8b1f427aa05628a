# SPDX-License-Identifier: Apache-2.0
"""A model with e4m3 weights against a float32 model whose weights are what the codes and scales stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.engine import Engine, Request
from serve.experts import Experts
from serve.linear import Fp8Linear, Linear, quantize_blocks
from serve.model import Llama, LlamaConfig, random_weights
from serve.recurrent import Recurrent

CONFIG = LlamaConfig(num_layers=2, intermediate_size=384)
EXPERTS = Experts(4, 2, 128, True, "mlp", ("gate_proj", "up_proj", "down_proj"))
CONFIGS = {
    "dense": CONFIG,
    "experts": replace(CONFIG, experts=EXPERTS, has_head_norms=True),
    "hybrid": replace(CONFIG, num_layers=1, has_head_norms=True, recurrent=Recurrent(1, 2, 4, frozenset({0}))),
}
NOT_QUANTISED = ("embed_tokens", "lm_head", "mlp.gate.weight", "conv1d", "in_proj_ba", "shared_expert_gate")


def restored(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    n, k = codes.shape
    return codes.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def dequantised(weights: dict) -> dict:
    """Return the weights in the form that e4m3 leaves of those that it has: blocks do not reach across projections."""
    kept = {}
    for name, weight in weights.items():
        is_kept = weight.dim() != 2 or any(part in name for part in NOT_QUANTISED)
        kept[name] = weight if is_kept else restored(*quantize_blocks(weight.bfloat16()))
    return kept


def test_blocks():
    """A block has its largest number exactly, zeros stay zeros, and sizes need not be multiples of 128."""
    weight = torch.randn(200, 130)
    weight[:128, :128] = 0
    weight[150, 129] = 37.0
    codes, scale = quantize_blocks(weight)
    assert codes.shape == weight.shape and scale.shape == (2, 2)
    back = restored(codes, scale)
    assert not back[:128, :128].any() and back[150, 129] == pytest.approx(37.0)
    assert ((back - weight).abs() <= weight.abs() / 16 + scale.max() / 512).all(), "four bits of mantissa"


@pytest.mark.parametrize("has_bias", [False, True])
def test_projection(device, has_bias):
    """Codes of inputs and weights multiply exactly; the result is rounded to bfloat16."""
    weight, x = torch.randn(192, 256, device=device), torch.randn(9, 256, device=device).bfloat16()
    bias = torch.randn(192, device=device).bfloat16() if has_bias else None
    layer = Fp8Linear(weight.bfloat16(), bias)
    assert layer.weight.dtype is torch.float8_e4m3fn
    largest = x.float().view(9, 2, 128).abs().amax(2, keepdim=True)
    codes = (x.float().view(9, 2, 128) * (448.0 / largest)).to(torch.float8_e4m3fn)
    rows = (codes.double() * (largest / 448.0).double()).view(9, 256)
    expected = rows @ restored(layer.weight, layer.scale).double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=2**-7, atol=2**-6)


def test_sizes_without_a_kernel_stay_in_sixteen_bits():
    weight = torch.randn(96, 128).bfloat16()
    layer, x = Fp8Linear(weight), torch.randn(3, 128).bfloat16()
    assert layer.weight is weight and torch.equal(layer(x), Linear(weight)(x))


def logits_of(model: Llama, text: list[int], steps: int = 4) -> torch.Tensor:
    """Return the logits after all but the last tokens of a text, and after each of these."""
    seen, forward = [], model.forward
    model.forward = lambda *arguments: seen.append(forward(*arguments)) or seen[-1]
    engine = Engine(model, use_cuda_graphs=False, run_ahead=False)
    request = Request(text[:-steps], steps + 1)
    engine.submit(request)
    for token in [*text[-steps:], 0]:
        engine.step()
        request.tokens[-1] = token
    return torch.cat(seen).cpu()


@pytest.mark.parametrize("name", CONFIGS)
def test_model(device, name):
    """What differs is the rounding of activations: three bits of mantissa before each product."""
    config = CONFIGS[name]
    weights = {key: weight.bfloat16().float() for key, weight in random_weights(config, "cpu", seed=2).items()}
    model = Llama(config, weights, torch.bfloat16, device, fp8=True)
    layer = model.layers[0]
    quantised = layer.dense.down.weight if layer.experts is None else layer.experts.down
    assert quantised.dtype is torch.float8_e4m3fn
    text = torch.randint(0, 256, (44,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = logits_of(Llama(config, dequantised(weights), torch.float32, "cpu"), text)
    error = (logits_of(model, text) - expected).norm() / expected.norm()
    assert error < 0.08, error


def test_refused():
    config = replace(CONFIG, experts=replace(EXPERTS, intermediate_size=96))
    with pytest.raises(ValueError, match=r"fp8: hidden size and columns of experts are \(256, 96\)"):
        Llama(config, random_weights(config, "cpu"), torch.bfloat16, "cpu", fp8=True)
    with pytest.raises(ValueError, match=r"fp8: dtype is torch\.float16, expected torch\.bfloat16"):
        Llama(CONFIG, random_weights(CONFIG, "cpu"), torch.float16, "cpu", fp8=True)
