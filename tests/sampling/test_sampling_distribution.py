# SPDX-License-Identifier: Apache-2.0
"""Chi-square test of a million draws against the exact probabilities."""

from __future__ import annotations

import pytest
import torch

from .chi_square import chi_square
from .inputs import CASES, function, kept, rows_for

DRAWN = 1_000_000


@pytest.mark.parametrize("name, parameters", CASES, ids=str)
@pytest.mark.parametrize("vocab, spread", [(7, 1.0), (257, 2.0)])
def test_frequencies(device, name, parameters, vocab, spread):
    x = rows_for(name, 1, vocab, device, spread)
    indices = torch.zeros(DRAWN, dtype=torch.int32, device=device)
    tokens = function(name)(x, **parameters, indices=indices, seed=2024, offset=0)
    counts = torch.bincount(tokens, minlength=vocab).double()
    expected = kept(name, x, **parameters)[0] * DRAWN
    assert (counts[expected == 0] == 0).all()
    assert chi_square(counts, expected) < 5


def test_large_vocabulary(device):
    x = rows_for("sampling_from_probs", 1, 32000, device, 1.0)
    indices = torch.zeros(DRAWN, dtype=torch.int64, device=device)
    tokens = function("sampling_from_probs")(x, indices=indices, seed=7, offset=0)
    counts = torch.bincount(tokens, minlength=32000).double()
    assert chi_square(counts, x[0].double() * DRAWN) < 5


def test_offsets_are_independent(device):
    """Check that one draw of each of many calls is as random as many draws of one call."""
    x = rows_for("sampling_from_probs", 1, 5, device, 0.5).expand(100_000, 5)
    offsets = torch.arange(100_000, device=device)
    tokens = function("sampling_from_probs")(x, seed=torch.tensor([3], device=device), offset=offsets)
    counts = torch.bincount(tokens, minlength=5).double()
    assert chi_square(counts, x[0].double() * 100_000) < 5
    pairs = torch.bincount(tokens[0::2] * 5 + tokens[1::2], minlength=25).double()
    assert chi_square(pairs, torch.outer(x[0], x[0]).flatten().double() * 50_000) < 5
