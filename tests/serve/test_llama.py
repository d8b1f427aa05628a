# SPDX-License-Identifier: Apache-2.0
"""The engine of examples/serve against ``transformers``: same weights, same logits, same text."""

from __future__ import annotations

import json
import random

import pytest
import torch

from flashinfer.testing import assert_close

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.engine import Engine, Request
from serve.model import Llama, load_checkpoint

transformers = pytest.importorskip("transformers", reason="the reference is transformers' Llama")
pytest.importorskip("safetensors", reason="checkpoints are safetensors")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "llama3": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "linear, biases, one KV head": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
    "Mistral in its window": {"family": "Mistral", "sliding_window": 150},
    "Mistral beyond its window": {"family": "Mistral", "sliding_window": 40},
    "Qwen2": {"family": "Qwen2", "head_dim": 64, "tie_word_embeddings": True},
    "Qwen3": {"family": "Qwen3"},
    "Mixtral, window": {"family": "Mixtral", "num_local_experts": 5, "sliding_window": 60},
    "Qwen3-MoE": {
        "family": "Qwen3Moe",
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 72,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "Qwen3-MoE, plain weights": {
        "family": "Qwen3Moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 72,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
    },
    "Qwen3-Next": {
        "family": "Qwen3Next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 72,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [2],
    },
}


def reference_model(family="Llama", **options):
    """Return a random model of transformers whose logits differ by more than rounding errors."""
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 256,
            "hidden_size": 192,
            "intermediate_size": 320,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,  # differs from hidden_size / num_attention_heads
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": None,
            **options,
        },
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "embed" in name else parameter.shape[-1] ** -0.5 if parameter.ndim >= 2 else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    return model


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def pair(request, tmp_path_factory):
    """Return transformers' model, and ours read from the checkpoint that transformers wrote."""
    torch.manual_seed(0)
    reference = reference_model(**request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return reference, Llama(*load_checkpoint(folder, "cpu"), torch.float32, "cpu")


@pytest.fixture(scope="module")
def served(pair):
    """Run requests together, greedily; return the logits of each sampled token."""
    _, model = pair
    seen = []
    forward = model.forward
    model.forward = lambda *arguments: seen.append(forward(*arguments)) or seen[-1]
    tokens = random.Random(0)
    requests = [Request(tokens.choices(range(256), k=n), 12) for n in (1, 9, 33, 100)]
    engine = Engine(model, max_prefill_tokens=64)  # the longest prompt takes two steps
    logits = {id(request): [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.is_busy:
        advanced = engine.step()
        for (request, _), row in zip(engine.steps[-1].chunks, seen[-1], strict=True):
            if request in advanced:
                logits[id(request)].append(row)
    return [(request, torch.stack(logits[id(request)])) for request in requests]


def test_logits(pair, served):
    reference, _ = pair
    for request, logits in served:
        with torch.no_grad():
            expected = reference(torch.tensor([request.tokens])).logits[0]
        assert_close(logits, expected[len(request.prompt) - 1 : -1], rtol=1e-4, atol=1e-4)  # three float32 layers


def test_greedy_text(pair, served):
    reference, _ = pair
    for request, _ in served:
        prompt = torch.tensor([request.prompt])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        assert request.tokens == expected[0].tolist()
    assert len({token for request, _ in served for token in request.output}) > 4, "repetitions prove little"


def test_other_architectures_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="model_type is 'mamba', expected 'llama'"):
        load_checkpoint(tmp_path, "cpu")


def test_a_folder_without_weights_is_refused(tmp_path):
    reference_model().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        load_checkpoint(tmp_path, "cpu")


@pytest.fixture
def checkpoint(tmp_path):
    """Write a checkpoint in several shards."""
    reference_model(num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    return tmp_path


def change_json(path, **fields):
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({name: x for name, x in {**found, **fields}.items() if x != "none of it"}))


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"hidden_size": "none of it"}, "config.json: has no hidden_size"),
        ({"intermediate_size": 100}, r"gate_proj.weight has shape \(320, 192\), config.json has \(100, 192\)"),
        ({"num_hidden_layers": 2}, r"has no tensor model.layers.1.input_layernorm.weight, expected one of shape"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*'fp8'.*, expected None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', expected 'default'"),
    ],
    ids=["field", "sizes", "layers", "quantized", "activation", "rope"],
)
def test_configurations_that_do_not_fit(checkpoint, fields, text):
    change_json(checkpoint / "config.json", **fields)
    with pytest.raises(ValueError, match=text):
        load_checkpoint(checkpoint, "cpu")


def test_damaged_files(checkpoint):
    shards = sorted(checkpoint.glob("*.safetensors"))
    contents = shards[1].read_bytes()
    shards[1].write_bytes(contents[: len(contents) // 2])
    with pytest.raises(ValueError, match=f"{shards[1].name}: cannot be read"):
        load_checkpoint(checkpoint, "cpu")
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"{shards[1].name}: cannot be read"):
        load_checkpoint(checkpoint, "cpu")
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        load_checkpoint(checkpoint, "cpu")


def test_weights_that_are_no_part_of_the_checkpoint(checkpoint):
    """Check that files of another format beside the checkpoint, as in some repositories, are ignored."""
    (checkpoint / "consolidated.safetensors").write_bytes(b"of no use")
    load_checkpoint(checkpoint, "cpu")


def test_what_ends_an_answer(checkpoint):
    """Check stop tokens: chat models have more of them than config.json lists."""
    change_json(checkpoint / "config.json", eos_token_id=3)
    assert load_checkpoint(checkpoint, "cpu")[0].eos_tokens == (3,)
    change_json(checkpoint / "generation_config.json", eos_token_id=[3, 5])
    assert load_checkpoint(checkpoint, "cpu")[0].eos_tokens == (3, 5)


def test_a_last_matrix_that_is_tied_and_stored(checkpoint):
    """Check that a stored lm_head is used though it is declared tied, as in transformers; without either it
    is missing.
    """
    change_json(checkpoint / "config.json", tie_word_embeddings=True)
    model = Llama(*load_checkpoint(checkpoint, "cpu"), torch.float32, "cpu")
    expected = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(model.head, expected.lm_head.weight) and not torch.equal(model.head, model.embedding)
    assert model.num_parameters == expected.num_parameters()

    tied = reference_model(num_hidden_layers=1, tie_word_embeddings=True)
    tied.save_pretrained(checkpoint / "tied")
    model = Llama(*load_checkpoint(checkpoint / "tied", "cpu"), torch.float32, "cpu")
    assert model.head is model.embedding and model.num_parameters == tied.num_parameters()
    change_json(checkpoint / "tied" / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"has no tensor lm_head\.weight"):
        load_checkpoint(checkpoint / "tied", "cpu")


def test_windows(tmp_path):
    """Check that a window is one of all layers, which does not bound the length, or of some, which does."""
    reference_model("Mistral", sliding_window=100).save_pretrained(tmp_path)
    config = load_checkpoint(tmp_path, "cpu")[0]
    assert (config.max_length, config.window) == (512, 100)
    change_json(tmp_path / "config.json", sliding_window=None)
    config = load_checkpoint(tmp_path, "cpu")[0]
    assert (config.max_length, config.window) == (512, None)
    change_json(tmp_path / "config.json", model_type="qwen2", use_sliding_window=True, sliding_window=100)
    config = load_checkpoint(tmp_path, "cpu")[0]
    assert (config.max_length, config.window) == (100, None)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_experts_in_bfloat16(device, family, tmp_path):
    """Check experts by the fused layer, which has no float32, against those of transformers in bfloat16."""
    torch.manual_seed(0)
    options = {"num_experts": 6, "moe_intermediate_size": 96} if family == "Qwen3Moe" else {"num_local_experts": 6}
    reference = reference_model(family, num_hidden_layers=1, num_experts_per_tok=2, **options)
    reference.save_pretrained(tmp_path)
    model = Llama(*load_checkpoint(tmp_path, device), torch.bfloat16, device)
    x = torch.randn(9, 192, device=device).bfloat16()
    with torch.no_grad():
        expected = reference.to(device).model.layers[0].mlp(x.float().unsqueeze(0))
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert model.layers[0].experts is not None
    out = model.layers[0].mlp(x).float()
    assert (out - expected[0]).norm() / expected.norm() < 0.01  # rounded weights and hidden values
