# SPDX-License-Identifier: Apache-2.0
"""The engine of examples/serve.py against ``transformers``: same weights, same logits, same text."""

from __future__ import annotations

import random

import pytest
import torch

from flashinfer.testing import assert_close

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve import Engine, Request
from serve_model import Llama, load_checkpoint

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
}


def reference_model(**options):
    """A random Llama of transformers whose logits differ by more than rounding can hide."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 192,
            "intermediate_size": 320,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,  # not hidden_size / num_attention_heads
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": None,
            **options,
        },
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "embed" in name else parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    return model


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def pair(request, tmp_path_factory):
    """transformers' model, and ours read from the checkpoint it wrote."""
    torch.manual_seed(0)
    reference = reference_model(**request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return reference, Llama(*load_checkpoint(folder, "cpu"), torch.float32, "cpu")


@pytest.fixture(scope="module")
def served(pair):
    """Requests run together, greedy, and for each the logits that its tokens were taken from."""
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
        assert_close(logits, expected[len(request.prompt) - 1 : -1], rtol=1e-4, atol=1e-4)  # three layers of float32


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
