# SPDX-License-Identifier: Apache-2.0
"""Draws without a search on CUDA: each way that blocks share a row gives the tokens of the CPU."""

from __future__ import annotations

import pytest
import torch

from .inputs import function, probs, takes_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [
    (2, 70_000),  # the largest clusters
    (9, 70_001),  # of 8 blocks, which wait for each other with min-p; no row but the first is aligned
    (64, 20_000),  # two blocks that hold a row with min-p
    (64, 70_000),  # from logits two blocks; with min-p two that fill SMs
    (64, 135_001),  # from probabilities two blocks, too, whose warps have several segments
    (80, 70_000),  # from logits four
    (100, 66_000),  # more blocks than a device has places for: with min-p only the leading ones wait
    (600, 1025),  # one block for a row, a segment of one column
    (3, 900),  # one block that has more warps than the row has segments
]


DRAWS = [
    ("sampling_from_probs", {}),
    ("sampling_from_logits", {}),
    ("min_p_sampling_from_probs", {"min_p": 0.1}),
    ("min_p_sampling_from_probs", {"min_p": 0.0}),  # keeps all
]


@pytest.mark.parametrize("rows, vocab", SHAPES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_tokens_of_the_cpu(rows, vocab, spread):
    p = probs(rows, vocab, "cpu", spread)
    p[0, vocab // 2 :] = 0.0  # what is left may not reach the target
    for name, parameters in DRAWS:
        x = p.log() if takes_logits(name) else p
        tokens = function(name)(x.cuda(), **parameters, seed=5, offset=1)
        assert torch.equal(tokens.cpu(), function(name)(x, **parameters, seed=5, offset=1)), (name, parameters)
