# SPDX-License-Identifier: Apache-2.0
"""Rows of few distinct probabilities: equal columns are kept together, however many they are."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from .inputs import function

KINDS = ["equal", "two", "rounded", "bfloat16", "smoothed", "spike", "neighbours", "sampled"]
LIMITS = [(50, 1.0), (3000, 1.0), (1 << 30, 0.9), (1 << 30, 0.3), (2500, 0.95)]


def tied(kind: str, rows: int, vocab: int, device: str) -> torch.Tensor:
    columns, noise = torch.arange(vocab).expand(rows, vocab), torch.randn(rows, vocab)
    if kind == "neighbours":  # adjacent floats
        return ((1 + (columns * 7919 % 3) * 2.0**-23) / 2 ** (vocab.bit_length() - 1)).to(device)
    logits = {
        "equal": torch.zeros_like(noise),  # input of engines' memory profiling
        "two": (columns % 3 == 0) * 0.7,
        "rounded": 2 * noise.round(),
        "bfloat16": (3 * noise).bfloat16().float(),
        "smoothed": torch.where(columns % 1000 == 7, 8.5, 0.0),
        "sampled": torch.isin(columns, torch.arange(2048) * vocab // 2048) * 0.7,  # large where the CPU samples
        "spike": torch.where(columns == vocab // 2, 15.0, 0.0),
    }[kind]
    return torch.softmax(logits, dim=-1).to(device)


def kept(row: torch.Tensor, top_k: int, top_p: float, top_k_first: bool = False) -> torch.Tensor:
    """Return the mask of kept columns, from the mass and number of all columns with a larger value."""
    values, inverse, counts = row.double().unique(return_inverse=True, return_counts=True)
    from_on = counts.flip(0).cumsum(0).flip(0)
    by_count = from_on - counts < top_k
    masses = values * counts * (by_count if top_k_first else 1)
    above = masses.flip(0).cumsum(0).flip(0) - masses
    if top_p < 1:
        limit = top_p * (masses.sum() if top_k_first else 1)
        assert ((above - limit).abs() > 4e-5).all(), "whether columns are kept depends on rounding"
        by_count = by_count & (above < limit)
    return by_count[inverse]


@pytest.mark.parametrize("vocab", [300, 20011, 128256])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(device, kind, vocab):
    p = tied(kind, 3, vocab, device)
    for top_k, top_p in LIMITS:
        expected = torch.stack([kept(row, top_k, top_p) for row in p])
        if top_p >= 1:
            assert torch.equal(flashinfer.top_k_renorm_probs(p, top_k) > 0, expected)
            assert torch.equal(flashinfer.top_k_mask_logits(p, top_k) > -torch.inf, expected)
        elif top_k > vocab:
            renormed = flashinfer.top_p_renorm_probs(p, top_p)
            assert torch.equal(renormed > 0, expected)
            torch.testing.assert_close(renormed.sum(dim=-1), torch.ones(3, device=device), rtol=1e-4, atol=0)


@pytest.mark.parametrize("vocab", [300, 20011, 128256])
@pytest.mark.parametrize("kind", KINDS)
def test_draws(device, kind, vocab):
    p = tied(kind, 1, vocab, device)
    for top_k, top_p in LIMITS:
        for order in ("joint", "top_k_first"):
            expected = kept(p[0], top_k, top_p, order == "top_k_first")
            draw = function("top_k_top_p_sampling_from_probs")
            parameters = {"top_k": top_k, "top_p": top_p, "filter_apply_order": order}
            tokens = draw(p.expand(40, -1), **parameters, seed=1, offset=0).long()
            assert expected[tokens].all()
            # Draws by a table of the row: equal random numbers give equal tokens.
            indices = torch.zeros(40, dtype=torch.int32, device=device)
            assert torch.equal(draw(p, **parameters, indices=indices, seed=1, offset=0).long(), tokens)
            if expected.sum() > 2000:  # many kept columns give many distinct tokens
                assert tokens.unique().numel() > 10 or kind in ("spike", "smoothed")


def test_threshold_among_subnormal_weights(device):
    """Top-k ends among weights below 2^-127: the search must not leave the range of keys at its lower end."""
    vocab, heavy, top_k = 8192, 7000, 7900
    keys = torch.arange(1, vocab - heavy + 1, dtype=torch.int32) * 400  # bits of distinct weights below 7e-40
    row = torch.cat([torch.full((heavy,), 1 / heavy), keys.view(torch.float32)])
    p = row[torch.randperm(vocab)].to(device)
    draw = function("top_k_sampling_from_probs")
    tokens = draw(p.expand(40, -1), top_k, seed=1, offset=0).long()
    assert (p[tokens] > 1e-5).all() and tokens.unique().numel() > 30
    indices = torch.zeros(40, dtype=torch.int32, device=device)
    assert torch.equal(draw(p[None], top_k, indices=indices, seed=1, offset=0).long(), tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two devices")
@pytest.mark.parametrize("rows, vocab", [(1, 128256), (40, 20011), (100, 20011), (600, 9001)])
@pytest.mark.parametrize("kind", KINDS)
def test_devices_agree(kind, rows, vocab):
    p = tied(kind, rows, vocab, "cpu")
    for top_k, top_p in LIMITS:
        for order in ("joint", "top_k_first"):
            arguments = (top_k, top_p, None, order)
            tokens = flashinfer.top_k_top_p_sampling_from_probs(p, *arguments, seed=3, offset=0)
            there = flashinfer.top_k_top_p_sampling_from_probs(p.cuda(), *arguments, seed=3, offset=0)
            assert torch.equal(tokens, there.cpu()), (top_k, top_p, order)
    for renorm, limits in ((flashinfer.top_p_renorm_probs, (0.9, 0.3)), (flashinfer.top_k_renorm_probs, (50, 9000))):
        for limit in limits:
            assert torch.equal(renorm(p, limit), renorm(p.cuda(), limit).cpu()), (renorm.__name__, limit)
