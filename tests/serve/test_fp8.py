# SPDX-License-Identifier: Apache-2.0
"""A model with e4m3 weights against a float32 model whose weights are what the codes and scales stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.engine import Engine, Request
from serve.experts import Experts
from serve.linear import SCALE, Fp8Linear, Linear, quantize_blocks, restore_blocks
from serve.model import Llama, LlamaConfig, load_checkpoint, random_weights
from serve.recurrent import Recurrent

safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints are safetensors")

CONFIG = LlamaConfig(num_layers=2, intermediate_size=384)
EXPERTS = Experts(4, 2, 128, True, "mlp", ("gate_proj", "up_proj", "down_proj"))
CONFIGS = {
    "dense": CONFIG,
    "experts": replace(CONFIG, experts=EXPERTS, has_head_norms=True),
    "hybrid": replace(CONFIG, num_layers=1, has_head_norms=True, recurrent=Recurrent(1, 2, 4, frozenset({0}))),
}
NOT_QUANTISED = ("embed_tokens", "lm_head", "mlp.gate.weight", "conv1d", "in_proj_ba", "shared_expert_gate")


def dequantised(weights: dict) -> dict:
    """Return the weights in the form that e4m3 leaves of those that it has: blocks do not reach across projections."""
    kept = {}
    for name, weight in weights.items():
        is_kept = weight.dim() != 2 or any(part in name for part in NOT_QUANTISED)
        kept[name] = weight if is_kept else restore_blocks(*quantize_blocks(weight.bfloat16()))
    return kept


def test_blocks():
    """A block has its largest number exactly, zeros stay zeros, and sizes need not be multiples of 128."""
    weight = torch.randn(200, 130)
    weight[:128, :128] = 0
    weight[150, 129] = 37.0
    codes, scale = quantize_blocks(weight)
    assert codes.shape == weight.shape and scale.shape == (2, 2)
    back = restore_blocks(codes, scale)
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
    expected = rows @ restore_blocks(layer.weight, layer.scale).double().T + (0 if bias is None else bias.double())
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
    """Activations alone are rounded differently: to three bits of mantissa before each product."""
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


def write_codes(folder: Path, weights: dict, **changes) -> None:
    """Write a checkpoint of Qwen3-MoE in the published form: codes, and scales by their names."""
    stored = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or any(part in name for part in NOT_QUANTISED):
            stored[name] = weight.bfloat16()
        else:
            stored[name], stored[name + SCALE] = quantize_blocks(weight)
    safetensors.save_file(stored, folder / "model.safetensors")
    c = CONFIGS["experts"]
    fields = {
        "model_type": "qwen3_moe", "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers, "rms_norm_eps": c.eps,
        "num_attention_heads": c.num_qo_heads, "num_key_value_heads": c.num_kv_heads, "norm_topk_prob": True,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "max_position_embeddings": 2048,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], **changes},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))


def test_checkpoint_of_codes(tmp_path):
    """Codes of a checkpoint are those that the layers have; what it has in 16 bits stays so."""
    config = CONFIGS["experts"]
    weights = {key: weight.bfloat16().float() for key, weight in random_weights(config, "cpu", seed=2).items()}
    write_codes(tmp_path, weights)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.self_attn.o_proj.weight"] = weights["model.layers.0.self_attn.o_proj.weight"].bfloat16()
    del stored["model.layers.0.self_attn.o_proj.weight" + SCALE]
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    loaded = Llama(*load_checkpoint(tmp_path, "cpu"), torch.bfloat16, "cpu")
    own = Llama(config, weights, torch.bfloat16, "cpu", fp8=True)
    assert loaded.num_parameters == own.num_parameters and loaded.fp8
    assert loaded.layers[0].attention.out.weight.dtype is torch.bfloat16
    pairs = [(a.attention.qkv, b.attention.qkv) for a, b in zip(loaded.layers, own.layers, strict=True)]
    for mine, theirs in [*pairs, (loaded.layers[1].attention.out, own.layers[1].attention.out)]:
        assert torch.equal(mine.weight.view(torch.uint8), theirs.weight.view(torch.uint8))
        torch.testing.assert_close(mine.scale, theirs.scale, rtol=1e-6, atol=0)
    for mine, theirs in zip(loaded.layers, own.layers, strict=True):
        assert torch.equal(mine.experts.up_gate.view(torch.uint8), theirs.experts.up_gate.view(torch.uint8))
        assert torch.equal(mine.experts.down.view(torch.uint8), theirs.experts.down.view(torch.uint8))
    text = list(range(30, 60))
    own.layers[0].attention.out = loaded.layers[0].attention.out
    expected = logits_of(own, text)
    error = (logits_of(loaded, text) - expected).norm() / expected.norm()
    assert error < 0.005, "scales differ in their last bit, which changes few roundings to bfloat16"


def test_checkpoints_of_other_codes_are_refused(tmp_path):
    weights = random_weights(CONFIGS["experts"], "cpu")
    for changes in ({"weight_block_size": [64, 128]}, {"weight_block_size": None}, {"activation_scheme": "static"}):
        write_codes(tmp_path, weights, **changes)
        with pytest.raises(ValueError, match=r"quantization_config is .*, expected None, or 'fp8' with weight_block"):
            load_checkpoint(tmp_path, "cpu")
    write_codes(tmp_path, weights)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    stored["model.layers.1.self_attn.q_proj.weight" + SCALE] = torch.ones(2, 1)
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj.weight_scale_inv has shape \(2, 1\), expected \(2, 2\)"):
        load_checkpoint(tmp_path, "cpu")


def test_refused():
    config = replace(CONFIG, experts=replace(EXPERTS, intermediate_size=96))
    with pytest.raises(ValueError, match=r"fp8: hidden size and columns of experts are \(256, 96\)"):
        Llama(config, random_weights(config, "cpu"), torch.bfloat16, "cpu", fp8=True)
    with pytest.raises(ValueError, match=r"fp8: dtype is torch\.float16, expected torch\.bfloat16"):
        Llama(CONFIG, random_weights(CONFIG, "cpu"), torch.float16, "cpu", fp8=True)
