# SPDX-License-Identifier: Apache-2.0
"""The engine of examples/serve: the generated tokens do not depend on batching."""

from __future__ import annotations

import pytest
import torch

from flashinfer.testing import assert_close

from .engines import FakeGraph, make_requests, run

from serve.engine import Engine, Request, Sampling  # isort: skip
from serve.model import Llama, LlamaConfig, Rope, random_weights  # isort: skip

CONFIG = LlamaConfig(num_layers=2)


def model_on(device: str, config: LlamaConfig = CONFIG) -> Llama:
    dtype = torch.float16 if device == "cuda" else torch.float32
    return Llama(config, random_weights(config, "cpu"), dtype, device)


@pytest.fixture(scope="module")
def model():
    return model_on("cpu")


@pytest.fixture(scope="module")
def alone(model):
    """Return the tokens that each request generates when it runs alone."""
    outputs = [run(Engine(model), [request])[0] for request in make_requests()]
    assert all(len(output) == 8 for output in outputs)
    assert len({tuple(output) for output in outputs}) == len(outputs)
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_split_kv": True},
        {"max_prefill_tokens": 5},  # prompts are split into many pieces, two of them in one step
        {"max_batch_size": 2},
        {"num_pages": 9, "page_size": 16},  # eight usable pages: most requests wait until others finish
        {"page_size": 3, "num_pages": 200},
    ],
    ids=str,
)
def test_output_does_not_depend_on_the_batch(model, alone, options):
    assert run(Engine(model, **options), make_requests()) == alone


def test_output_does_not_depend_on_when_others_arrive(model, alone):
    engine, requests = Engine(model), make_requests()
    for request in requests:  # each request joins when the previous one has three tokens and others may be done
        engine.submit(request)
        while len(request.output) < 3:
            engine.step()
    while engine.is_busy:
        engine.step()
    assert [request.output for request in requests] == alone
    sizes = [len(step.chunks) for step in engine.steps if step.kind == "decode"]
    assert len(set(sizes)) > 2, "requests joined and left"


def test_pages_are_returned(model):
    engine = Engine(model, num_pages=40)
    run(engine, make_requests())
    assert sorted(engine.free_pages) == list(range(1, 40))


def test_a_token_ends_a_request(alone):
    end = alone[-1][5]
    model = model_on("cpu", LlamaConfig(num_layers=2, eos_tokens=(end,)))
    expected = [output[: output.index(end) + 1] if end in output else output for output in alone]
    assert run(Engine(model), make_requests()) == expected


def test_sampling_is_repeatable_and_keeps_to_its_filter(model):
    def outputs(sampling):
        return run(Engine(model), make_requests(sampling=sampling))

    greedy = outputs(Sampling())
    assert outputs(Sampling(0.7, top_k=1)) == greedy
    assert outputs(Sampling(0.7, top_p=1e-6)) == greedy
    drawn = outputs(Sampling(1.0, 50, 0.9, seed=1))
    assert drawn != greedy
    assert drawn == outputs(Sampling(1.0, 50, 0.9, seed=1))
    assert drawn != outputs(Sampling(1.0, 50, 0.9, seed=2))


@pytest.mark.parametrize(
    "prompt, max_new_tokens, text",
    [
        ([], 4, "the prompt has 0 tokens"),
        ([1], 0, "max_new_tokens is 0"),
        ([1] * 2000, 49, "at most 2048 together"),
        ([1, 256], 4, "the prompt has token 256, expected 0 to 255"),
        ([-1, 2], 4, "the prompt has token -1, expected 0 to 255"),
    ],
)
def test_impossible_requests_are_refused(model, prompt, max_new_tokens, text):
    with pytest.raises(ValueError, match=text):
        Engine(model).submit(Request(prompt, max_new_tokens))


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("temperature", -0.5, "0 or more"),
        ("temperature", float("nan"), "0 or more"),
        ("top_k", 0, "1 to 2147483647"),
        ("top_k", 2**31, "1 to 2147483647"),
        ("top_p", 0.0, "more than 0 and at most 1"),
        ("top_p", 1.5, "more than 0 and at most 1"),
        ("seed", 2**63, "64 bits"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(name, value, text):
    """Check that invalid sampling options are rejected early: they could stop a batch or invert probabilities."""
    with pytest.raises(ValueError, match=f"Sampling: {name} is {value}, expected {text}"):
        Sampling(**{name: value})


def test_low_temperatures(model, alone):
    """Check tiny temperatures: division would give infinite logits, which are all equally likely."""
    assert run(Engine(model), make_requests(sampling=Sampling(1e-40))) == alone


def test_a_cache_that_nobody_has_room_for(model):
    with pytest.raises(MemoryError, match=r"a cache of 1000000000000000 pages takes .* GiB"):
        Engine(model, num_pages=10**15)


def test_requests_beyond_the_cache_are_refused(model):
    with pytest.raises(ValueError, match="at most 32 together"):
        Engine(model, num_pages=3).submit(Request([1] * 30, 3))


def test_padding_of_graphs(model, alone, monkeypatch):
    """Check graph buffers on any machine: three requests in a graph of four, five in one of six."""
    monkeypatch.setattr("serve.engine.capture", lambda step, pool: ((graph := FakeGraph(step)), graph.result))
    engine = Engine(model, max_batch_size=6, use_cuda_graphs=True)
    assert sorted(engine.graphs) == [1, 2, 4, 6]
    assert run(engine, make_requests()) == alone
    assert run(engine, make_requests()[2:]) == alone[2:]


@pytest.mark.parametrize("rope", [Rope(), Rope(5e5, 8.0, (1.0, 4.0, 64))], ids=["plain", "llama3"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_agree(rope):
    """Compare logits after prompts, one of them a single token (a decode step), in float16 and in float32."""
    config = LlamaConfig(num_layers=2, rope=rope)
    logits = {}
    for device in ("cpu", "cuda"):
        model = model_on(device, config)
        seen = logits.setdefault(device, [])
        forward = model.forward
        model.forward = lambda *arguments, forward=forward, seen=seen: seen.append(forward(*arguments)) or seen[-1]
        run(Engine(model, use_cuda_graphs=False), make_requests(max_new_tokens=1))
    for one, other in zip(logits["cuda"], logits["cpu"], strict=True):
        assert_close(one.cpu(), other, rtol=2e-2, atol=5e-2)  # tolerance for two layers of float16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_graphs_generate_what_separate_launches_do():
    """Check four requests, which fill a graph, so that matrix products have the same shapes in both modes."""
    model = model_on("cuda")
    sampling = Sampling(0.8, 50, 0.9, seed=3)

    def outputs(graphs):
        requests = make_requests([5, 40, 3, 300]) + make_requests([7, 8, 9, 10], sampling=sampling)
        engine = Engine(model, max_batch_size=4, disable_split_kv=True, use_cuda_graphs=graphs)
        assert sorted(engine.graphs) == ([1, 2, 4] if graphs else [])
        return run(engine, requests)

    assert outputs(True) == outputs(False)
