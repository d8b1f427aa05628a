# SPDX-License-Identifier: Apache-2.0
"""Decode steps that are launched before the tokens of the last one are read give the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.engine import Engine, Request
from serve.model import Llama, LlamaConfig, random_weights

CONFIG = LlamaConfig(num_layers=1)
PROMPTS = ([5], [1, 2, 3], list(range(40)), [7, 7])


def generated(config, device, run_ahead, arrivals=(0, 0, 3, 9), **options):
    """Return the tokens of each request, submitted before the step of its number, and the engine."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    engine = Engine(Llama(config, random_weights(config, "cpu"), dtype, device), run_ahead=run_ahead, **options)
    requests = [Request(prompt, 9 + i) for i, prompt in enumerate(PROMPTS)]
    step, was_ahead = 0, False
    while engine.is_busy or step <= max(arrivals):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.submit(request)
        if engine.is_busy:
            engine.step()
        was_ahead |= engine.launched is not None
        step += 1
    assert was_ahead == run_ahead and engine.launched is None
    assert len(engine.free_pages) == engine.num_pages - 1, "all pages are free again"
    return [request.output for request in requests]


@pytest.mark.parametrize("max_batch_size", [2, 8])
def test_the_tokens_are_the_same(device, max_batch_size):
    options = {"max_batch_size": max_batch_size, "disable_split_kv": True}
    if device == "cuda":  # products depend on the size of a batch, so both engines need the same batches
        options["arrivals"] = (0, 0, 0, 0)
    one_by_one = generated(CONFIG, device, False, **options)
    assert [len(output) for output in one_by_one] == [9, 10, 11, 12]
    assert generated(CONFIG, device, True, **options) == one_by_one


def test_tokens_that_end_a_text():
    """The step after such a token has run already: what it computed for the request is dropped."""
    whole = generated(CONFIG, "cpu", False)
    ending = replace(CONFIG, eos_tokens=(whole[0][4], whole[2][6]))
    one_by_one = generated(ending, "cpu", False)
    assert min(map(len, one_by_one)) < 9
    assert generated(ending, "cpu", True) == one_by_one
