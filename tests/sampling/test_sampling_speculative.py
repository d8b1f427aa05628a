# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: tokens of the reference, counters, and the distribution of emitted tokens."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.trace.templates.sampling import chain_speculative_outputs

from .chi_square import chi_square
from .inputs import probs


def drafts_and_targets(batch: int, drafts: int, vocab: int, device: str, agreement: float = 0.5):
    draft = probs(batch * drafts, vocab, device).view(batch, drafts, vocab)
    target = probs(batch * (drafts + 1), vocab, device).view(batch, drafts + 1, vocab)
    target[:, :drafts] = agreement * draft + (1 - agreement) * target[:, :drafts]
    ids = (
        torch.multinomial(draft.flatten(0, 1), 1).view(batch, drafts)
        if drafts
        else torch.empty(batch, 0, device=device)
    )
    return draft, ids.int(), target


@pytest.mark.parametrize(
    "batch, drafts, vocab", [(1, 1, 1), (33, 1, 11), (9, 5, 111), (4, 3, 20011), (3, 0, 50), (0, 2, 9)]
)
def test_tokens_of_the_reference(device, batch, drafts, vocab):
    arguments = drafts_and_targets(batch, drafts, vocab, device)
    out, accepted, emitted = flashinfer.chain_speculative_sampling(*arguments, seed=3, offset=8)
    expected = chain_speculative_outputs(*arguments, seed=3, offset=8)
    assert out.shape == (batch, drafts + 1) and out.dtype == accepted.dtype == emitted.dtype == torch.int32
    assert torch.equal(accepted, expected[1]) and torch.equal(emitted, expected[2])
    assert (out != expected[0]).sum() <= 1  # the reference sums in another order
    assert torch.equal(emitted + 1, (out != -1).sum(dim=1).int())
    assert (accepted >= emitted).all()


def test_counters_are_added_to(device):
    arguments = drafts_and_targets(8, 4, 100, device)
    _, accepted, emitted = flashinfer.chain_speculative_sampling(*arguments, seed=3, offset=8)
    counters = torch.arange(8, device=device).int(), torch.arange(8, device=device).int() * 10
    _, one, two = flashinfer.chain_speculative_sampling(*arguments, *counters, seed=3, offset=8)
    assert one is counters[0] and two is counters[1]
    assert torch.equal(one, accepted + torch.arange(8, device=device).int())
    assert torch.equal(two, emitted + torch.arange(8, device=device).int() * 10)


def test_one_hot_target_is_followed(device):
    batch, drafts, vocab = 16, 4, 500
    ids = torch.randint(0, vocab, (batch, drafts + 1), device=device)
    target = torch.nn.functional.one_hot(ids, vocab).float()
    draft = probs(batch * drafts, vocab, device).view(batch, drafts, vocab)
    out, accepted, emitted = flashinfer.chain_speculative_sampling(draft, ids[:, :drafts], target)
    assert torch.equal(out.long(), ids) and (accepted == drafts).all() and (emitted == drafts).all()
    wrong = (ids[:, :drafts] + 1) % vocab
    out, accepted, emitted = flashinfer.chain_speculative_sampling(draft, wrong, target)
    assert torch.equal(out[:, 0].long(), ids[:, 0]) and (out[:, 1:] == -1).all() and not accepted.any()


def test_emitted_tokens_are_distributed_as_the_target(device):
    batch, vocab = 200_000, 6
    draft, target = probs(1, vocab, device, 1.0), probs(2, vocab, device, 1.0)
    ids = torch.multinomial(draft[0], batch, replacement=True).int().view(batch, 1)
    arguments = draft.expand(batch, 1, vocab), ids, target.expand(batch, 2, vocab)
    out, _, emitted = flashinfer.chain_speculative_sampling(*arguments, seed=17, offset=0)
    first = torch.bincount(out[:, 0], minlength=vocab).double()
    assert chi_square(first, target[0].double() * batch) < 5
    second = out[emitted == 1, 1]
    assert chi_square(torch.bincount(second, minlength=vocab).double(), target[1].double() * len(second)) < 5


def test_nothing_left_to_draw_from(device):
    """Check a draft outside of the vocabulary, and a target equal to the draft: the token is drawn from the target."""
    target = torch.zeros(2, 2, 10, device=device)
    target[..., 4] = 1
    ids = torch.tensor([[10], [-1]], device=device).int()
    out, accepted, emitted = flashinfer.chain_speculative_sampling(target[:, :1].clone(), ids, target)
    assert out.tolist() == [[4, -1], [4, -1]] and not accepted.any() and not emitted.any()
    out, _, emitted = flashinfer.chain_speculative_sampling(target[:, :1], ids.clamp(4, 4), torch.zeros_like(target))
    assert out.tolist() == [[0, -1], [0, -1]]


def test_seeds_by_request(device):
    arguments = drafts_and_targets(16, 3, 200, device)
    seeds, offsets = torch.arange(16, device=device) * 77, torch.arange(16, device=device)
    out, *_ = flashinfer.chain_speculative_sampling(*arguments, seed=seeds, offset=offsets)
    for i in range(16):
        alone, *_ = flashinfer.chain_speculative_sampling(*arguments, seed=77 * i, offset=i)
        assert torch.equal(out[i], alone[i])


def test_torch_compile(device):
    arguments = drafts_and_targets(4, 3, 200, device)

    def verify(*arguments):
        return flashinfer.chain_speculative_sampling(*arguments, seed=5, offset=0)

    compiled = torch.compile(verify, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(compiled, verify(*arguments), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two devices")
def test_devices_agree():
    for vocab in (7, 1000, 40000):
        arguments = drafts_and_targets(20, 4, vocab, "cpu")
        cpu = flashinfer.chain_speculative_sampling(*arguments, seed=1, offset=2)
        cuda = flashinfer.chain_speculative_sampling(*(x.cuda() for x in arguments), seed=1, offset=2)
        assert all(torch.equal(x, y.cpu()) for x, y in zip(cpu, cuda, strict=True))
