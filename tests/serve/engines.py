# SPDX-License-Identifier: Apache-2.0
"""Requests for an engine, what it makes of them, and a stand-in for a CUDA graph."""

from __future__ import annotations

import random

import torch

from .examples_path import EXAMPLES as EXAMPLES  # isort: skip
from serve.engine import Request, serve

PROMPT_LENGTHS = [1, 2, 16, 17, 70]  # no prefill, the shortest prefill, one page, one token more, several pages


def make_requests(lengths=PROMPT_LENGTHS, max_new_tokens=8, **options):
    tokens = random.Random(0)
    return [Request(tokens.choices(range(256), k=n), max_new_tokens, **options) for n in lengths]


def run(engine, requests):
    serve(engine, requests, lambda request: None)
    assert not engine.is_busy
    return [request.output for request in requests]


class FakeGraph:
    """Fake CUDA graph: runs the step again and keeps the address of its result."""

    def __init__(self, step):
        self.step, self.result = step, step()

    @torch.inference_mode()
    def replay(self):
        self.result.copy_(self.step())

    def pool(self):
        return None
