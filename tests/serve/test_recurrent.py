# SPDX-License-Identifier: Apache-2.0
"""A hybrid model in the engine: states follow their requests, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .engines import FakeGraph, make_requests, run

from serve.engine import Engine, Request  # isort: skip
from serve.experts import Experts  # isort: skip
from serve.model import Llama, LlamaConfig, load_checkpoint, random_weights  # isort: skip
from serve.parallel import TensorParallel  # isort: skip
from serve.recurrent import Recurrent  # isort: skip

EXPERTS = Experts(4, 2, 64, True, "mlp", ("gate_proj", "up_proj", "down_proj"), frozenset({1}), shared_size=32)
HYBRID = LlamaConfig(
    hidden_size=128,
    num_layers=3,
    has_head_norms=True,
    experts=EXPERTS,
    recurrent=Recurrent(num_key_heads=1, num_value_heads=2, num_taps=4, layers=frozenset({0, 2})),
)


def model_of(config=HYBRID):
    return Llama(config, random_weights(config, "cpu"), torch.float32, "cpu")


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def alone(model):
    """Return what each request generates in a new engine of its own."""
    outputs = [run(Engine(model), [request])[0] for request in make_requests()]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_tokens": 5},  # a part of a prompt goes on from the state that the part before left
        {"max_batch_size": 1},  # every request gets the slot of the one before
        {"max_batch_size": 2, "run_ahead": True},
    ],
    ids=str,
)
def test_output_does_not_depend_on_the_batch(model, alone, options):
    engine = Engine(model, **options)
    assert run(engine, make_requests()) == alone
    assert sorted(engine.free_slots) == list(range(engine.max_batch_size)), "all slots are free again"


def test_padding_of_graphs(model, alone, monkeypatch):
    """Rows without a request are in no slot, and the slots of others do not change by them."""
    monkeypatch.setattr("serve.engine.capture", lambda step, pool: ((graph := FakeGraph(step)), graph.result))
    engine = Engine(model, max_batch_size=6, use_cuda_graphs=True)
    assert not engine.states.matrices.any() and not engine.states.windows[:, :-1].any()
    assert run(engine, make_requests()) == alone
    assert run(engine, make_requests()[2:]) == alone[2:]


def test_a_token_that_ends_a_request_frees_its_slot(alone):
    model = model_of(replace(HYBRID, eos_tokens=(alone[-1][3],)))
    engine = Engine(model, max_batch_size=1, run_ahead=True)
    expected = [output[: output.index(alone[-1][3]) + 1] if alone[-1][3] in output else output for output in alone]
    assert run(engine, make_requests()) == expected
    assert engine.free_slots == [0]


def test_sixteen_bits(device):
    """Logits of a prompt and of steps after it in bfloat16, through the kernels of both forms, against float32."""
    config = replace(HYBRID, experts=None)
    weights = random_weights(config, "cpu")
    tokens, logits = list(range(40, 110)), {}
    for dtype, place in ((torch.float32, "cpu"), (torch.bfloat16, device)):
        model = Llama(config, weights, dtype, place)
        seen, forward = [], model.forward
        model.forward = lambda *arguments, seen=seen, forward=forward: seen.append(forward(*arguments)) or seen[-1]
        engine = Engine(model, use_cuda_graphs=False, run_ahead=False)
        request = Request(tokens[:64], 6)
        engine.submit(request)
        for token in tokens[64:]:
            engine.step()
            request.tokens[-1] = token  # the same text for both
        logits[dtype] = torch.cat(seen).cpu()
    error = (logits[torch.bfloat16] - logits[torch.float32]).norm() / logits[torch.float32].norm()
    assert error < 0.03, error


def test_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_next", "linear_key_head_dim": 64, "linear_value_head_dim": 128, "vocab_size": 8,'
        ' "num_attention_heads": 1, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,'
        ' "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}'
    )
    with pytest.raises(ValueError, match="linear_key_head_dim is 64, expected 128"):
        load_checkpoint(tmp_path, "cpu")

    class Two:
        Get_rank, Get_size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    with pytest.raises(ValueError, match="hybrid models are served by one process"):
        TensorParallel(Two()).split(HYBRID, {})
