# SPDX-License-Identifier: Apache-2.0
"""Unfiltered and min-p draws on CUDA: each distribution of a row over blocks gives the tokens of the CPU."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from .inputs import function, probs, takes_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [
    (2, 70_000),  # largest clusters
    (9, 70_001),  # clusters of 8 blocks, which wait for each other with min-p; only the first row is aligned
    (64, 20_000),  # with min-p: two blocks that hold a row
    (64, 70_000),  # logits: two blocks; min-p: two blocks that fill SMs
    (64, 135_001),  # probabilities: eight blocks in passes, the last pass short
    (70, 150_000),  # four blocks, three passes or more
    (140, 33_000),  # one block of 16 warps
    (300, 17_000),  # one block of 8 warps
    (80, 70_000),  # logits: four blocks
    (100, 66_000),  # more blocks than the device can hold at once: with min-p only the leading blocks wait
    (600, 1025),  # one block per row, last segment of one column
    (3, 900),  # one block with more warps than the row has segments
]


DRAWS = [
    ("sampling_from_probs", {}),
    ("sampling_from_logits", {}),
    ("min_p_sampling_from_probs", {"min_p": 0.1}),
    ("min_p_sampling_from_probs", {"min_p": 0.0}),  # keeps all columns
]


@pytest.mark.parametrize("rows, vocab", SHAPES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_tokens_of_both_devices(rows, vocab, spread):
    p = probs(rows, vocab, "cpu", spread)
    p[0, vocab // 2 :] = 0.0  # the remaining mass may not reach the target
    for name, parameters in DRAWS:
        x = p.log() if takes_logits(name) else p
        tokens = function(name)(x.cuda(), **parameters, seed=5, offset=1)
        assert torch.equal(tokens.cpu(), function(name)(x, **parameters, seed=5, offset=1)), (name, parameters)


@pytest.mark.parametrize("rows, vocab", [(64, 128_256), (70, 150_000), (140, 33_001), (300, 17_000), (4, 50_000)])
def test_how_far_probabilities_are_read(rows, vocab):
    """Check draws from the first and the last segment, and from rows with too little mass, no mass, or NaN."""
    p = probs(rows, vocab, "cpu", 3.0)
    kinds = torch.arange(rows) % 6
    p[kinds == 1] = torch.nn.functional.one_hot(torch.tensor(0), vocab).float()
    p[kinds == 2] = torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab).float()
    p[kinds == 3] *= 0.3
    p[kinds == 3, vocab - 5000 :] = 0.0  # zeros after the last positive weight
    p[kinds == 4] = 0.0
    p[kinds == 5, ::7] = float("nan")
    for seed in range(5):
        tokens, valid = flashinfer.sampling_from_probs(p, seed=seed, offset=9, return_valid=True)
        on_gpu = flashinfer.sampling_from_probs(p.cuda(), seed=seed, offset=9, return_valid=True)
        assert torch.equal(tokens, on_gpu[0].cpu()) and torch.equal(valid, on_gpu[1].cpu())
        assert (tokens[kinds == 1] == 0).all() and (tokens[kinds == 2] == vocab - 1).all()
        assert (tokens[kinds == 3] < vocab - 5000).all()
        assert torch.equal(valid, kinds != 4)
