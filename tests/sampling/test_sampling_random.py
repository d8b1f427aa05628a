# SPDX-License-Identifier: Apache-2.0
"""Random numbers: Philox, seeds as numbers and as tensors, generators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer.sampling import get_seed_and_offset
from flashinfer.trace.templates.sampling_shared import random_words

from .inputs import CASES, DRAWS, function, kept, probs, rows_for


@pytest.mark.parametrize(
    "seed, offset, row, words",
    [  # published test vectors: counter (offset, row), key seed
        (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, -1, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x85A308D3243F6A88,
            0x0370734413198A2E,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_reference_is_philox(seed, offset, row, words):
    def signed(x):
        return x - 2**64 if x >= 2**63 else x

    rows = torch.tensor([signed(row)])
    found = random_words(signed(seed), signed(offset), rows)
    assert tuple(int(word) & 0xFFFFFFFF for word in found) == words


def test_kernels_use_the_same_numbers(device):
    """Check Philox in kernels: with equal columns a token is the leading bits of the random number."""
    vocab = 4096
    p = torch.full((1, vocab), 1 / vocab, device=device)
    rows = torch.arange(300)
    indices = torch.zeros(300, dtype=torch.int32, device=device)
    for seed, offset in ((0, 0), (7, 1), (2**63 + 5, 2**40)):
        words = random_words(seed - 2**64 if seed >= 2**63 else seed, offset, rows)
        tokens = flashinfer.sampling_from_probs(p, indices, seed=seed, offset=offset)
        assert torch.equal(tokens.cpu().long(), words[1] >> 20)


@pytest.mark.parametrize("name, parameters", CASES, ids=str)
def test_same_seed_same_tokens(device, name, parameters):
    x = rows_for(name, 300, 500, device)

    def draw(seed, offset):
        return function(name)(x, **parameters, seed=seed, offset=offset)

    base = draw(1, 0)
    assert torch.equal(draw(1, 0), base)
    if ((kept(name, x, **parameters) > 0).sum(dim=-1) > 1).sum() > 50:  # not greedy
        assert not torch.equal(draw(2, 0), base) and not torch.equal(draw(1, 4), base)
    one = torch.tensor([1], device=device), torch.tensor([0], device=device)
    assert torch.equal(draw(*one), base)
    assert torch.equal(draw(*(t.to(torch.uint64) for t in one)), base)


def test_integers_of_numpy(device):
    x = probs(3, 500, device)
    expected = flashinfer.sampling_from_probs(x, seed=5, offset=6)
    assert torch.equal(flashinfer.sampling_from_probs(x, seed=np.int64(5), offset=np.uint32(6)), expected)


def test_rows_have_their_own_seeds(device):
    p = probs(64, 1000, device)
    seeds = torch.arange(64, device=device) * 1000003
    offsets = torch.arange(64, device=device) % 3
    tokens = flashinfer.sampling_from_probs(p, seed=seeds, offset=offsets)
    alone = [flashinfer.sampling_from_probs(p, seed=int(seeds[i]), offset=int(offsets[i]))[i] for i in range(64)]
    assert torch.equal(tokens, torch.stack(alone))


def test_more_than_one_seed_and_one_offset(device):
    p = probs(8, 1000, device)
    seeds, offset = torch.arange(8, device=device), torch.tensor([5], device=device)
    tokens = flashinfer.sampling_from_probs(p, seed=seeds, offset=offset)
    assert torch.equal(tokens, flashinfer.sampling_from_probs(p, seed=seeds, offset=offset.expand(8)))


def test_generator_moves_on(device):
    p = probs(100, 1000, device)
    generator = torch.Generator(device).manual_seed(11)
    one, two = (flashinfer.sampling_from_probs(p, generator=generator) for _ in range(2))
    assert not torch.equal(one, two)
    generator.manual_seed(11)
    assert torch.equal(flashinfer.sampling_from_probs(p, generator=generator), one)
    torch.manual_seed(5)
    default = flashinfer.sampling_from_probs(p)
    torch.manual_seed(5)
    assert torch.equal(flashinfer.sampling_from_probs(p), default)


def test_cpu_generator_gives_a_seed():
    generator = torch.Generator().manual_seed(3)
    seed, offset = get_seed_and_offset(100, generator)
    assert 0 <= seed < 2**63 and offset == 0
    again = torch.Generator().manual_seed(3)
    assert get_seed_and_offset(5, again) == (seed, 0)  # any increment
    assert torch.equal(generator.get_state(), again.get_state())
    torch.manual_seed(3)
    assert get_seed_and_offset(1)[0] == seed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA generator")
def test_increments_of_a_cuda_generator():
    batch, vocab, drafts = 7, 50, 3
    generator = torch.Generator("cuda")
    p = probs(batch, vocab, "cuda")
    per_output = dict.fromkeys(DRAWS, 32) | {"sampling_from_probs": 1, "min_p_sampling_from_probs": 1}
    per_output["sampling_from_logits"] = vocab
    calls = {name: lambda name=name: function(name)(p, **DRAWS[name][0], generator=generator) for name in DRAWS}
    draft, target = probs(batch * drafts, vocab, "cuda"), probs(batch * (drafts + 1), vocab, "cuda")
    ids = torch.zeros(batch, drafts, dtype=torch.int32, device="cuda")
    calls["chain"] = lambda: flashinfer.chain_speculative_sampling(
        draft.view(batch, drafts, vocab), ids, target.view(batch, drafts + 1, vocab), generator=generator
    )
    per_output["chain"] = drafts + 1
    for name, call in calls.items():
        generator.manual_seed(9)
        call()
        seed, offset = (int(x) for x in generator.get_state().view(torch.int64))
        assert (seed, offset) == (9, (batch * per_output[name] + 3) // 4 * 4), name
    generator.manual_seed(9)
    assert get_seed_and_offset(5, generator) == (9, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two devices")
@pytest.mark.parametrize("name, parameters", CASES, ids=str)
@pytest.mark.parametrize("vocab", [5, 777, 4096, 30011, 128256])
def test_devices_agree(name, parameters, vocab):
    x = rows_for(name, 64, vocab, "cpu")
    tokens = function(name)(x, **parameters, seed=4, offset=0)
    assert torch.equal(function(name)(x.cuda(), **parameters, seed=4, offset=0).cpu(), tokens)
    indices = (torch.arange(400) % 64).int()
    tokens = function(name)(x, **parameters, indices=indices, seed=4, offset=0)
    on_cuda = function(name)(x.cuda(), **parameters, indices=indices.cuda(), seed=4, offset=0)
    assert torch.equal(on_cuda.cpu(), tokens)
