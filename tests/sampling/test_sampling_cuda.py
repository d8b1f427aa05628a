# SPDX-License-Identifier: Apache-2.0
"""CUDA-only behaviour of sampling: graphs, streams, millions of outputs, rows that no cluster can hold."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..graphs import capture
from .inputs import CASES, INF, function, kept, probs, rows_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name, parameters", CASES, ids=str)
def test_graph_capture(name, parameters):
    """Check that seeds are read when the graph is replayed."""
    x = rows_for(name, 40, 5000, "cuda")
    seed, offset = torch.tensor([1], device="cuda"), torch.tensor([0], device="cuda")

    def step():
        return function(name)(x, **parameters, seed=seed, offset=offset)

    graph, tokens = capture(step)
    for value in (3, 4):
        seed.fill_(value)
        x.copy_(rows_for(name, 40, 5000, "cuda"))
        graph.replay()
        assert torch.equal(tokens, function(name)(x, **parameters, seed=value, offset=0))


def test_graph_capture_of_rows():
    x = torch.randn(40, 5000, device="cuda")

    def step():
        p = flashinfer.softmax(x, 0.7)
        return flashinfer.top_p_renorm_probs(p, 0.5), flashinfer.top_k_mask_logits(x, 7)

    graph, result = capture(step)
    x.normal_()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(result, step(), strict=True))


def test_runs_on_the_current_stream():
    p = probs(64, 5000, "cuda")
    flashinfer.top_k_sampling_from_probs(p, 3)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a draw on any other stream would run before the fill
        p.zero_()
        p[:, 77] = 1
        tokens = flashinfer.top_k_sampling_from_probs(p, 3)
    stream.synchronize()
    assert (tokens == 77).all()


def test_millions_of_outputs():
    p = probs(1, 128256, "cuda")
    indices = torch.zeros(5_000_000, dtype=torch.int32, device="cuda")
    for name, parameters in CASES:
        x = p.log() if name.endswith("logits") else p
        tokens = function(name)(x, **parameters, indices=indices)
        counts = torch.bincount(tokens, minlength=128256).double()
        expected = kept(name, x, **parameters)[0]
        # Columns at the threshold may be kept or dropped.
        assert counts[expected == 0].sum() < 1e-4 * len(indices)
        assert torch.nn.functional.cosine_similarity(counts, expected, dim=0) > 0.99


@pytest.mark.parametrize("name, parameters", CASES, ids=str)
def test_rows_that_no_cluster_can_hold(name, parameters):
    x = rows_for(name, 2, 700_001, "cuda")
    tokens = function(name)(x, **parameters, seed=1, offset=0)
    assert torch.equal(tokens.cpu(), function(name)(x.cpu(), **parameters, seed=1, offset=0))


def test_large_rows_of_rows():
    x = torch.randn(2, 700_001, device="cuda")
    for one, other in (
        (flashinfer.softmax(x, 0.5), flashinfer.softmax(x.cpu(), 0.5)),
        (flashinfer.top_k_mask_logits(x.half(), 9), flashinfer.top_k_mask_logits(x.half().cpu(), 9)),
        (flashinfer.top_p_renorm_probs(x.softmax(-1), 0.9), flashinfer.top_p_renorm_probs(x.softmax(-1).cpu(), 0.9)),
    ):
        assert torch.equal(one.cpu(), other)


def test_rows_that_keep_more_than_a_block_lists():
    """Check one block per row with more kept columns than its list of about 9000 holds."""
    p = probs(270, 128256, "cuda", 2.9)
    for top_p in (0.88, 0.9, 0.92):
        some = flashinfer.top_p_renorm_probs(p, top_p)[:24]
        assert torch.equal(some.cpu(), flashinfer.top_p_renorm_probs(p[:24].cpu(), top_p))


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_batches_do_not_change_a_row(rows):
    p = probs(rows, 32000, "cuda")
    tokens = flashinfer.top_k_top_p_sampling_from_probs(p, 40, 0.9, seed=3, offset=0)
    again = flashinfer.top_k_top_p_sampling_from_probs(p.cpu(), 40, 0.9, seed=3, offset=0)
    assert torch.equal(tokens.cpu(), again)


def shaped(shape: str, rows: int, vocab: int) -> torch.Tensor:
    """Return rows that violate the assumptions of candidate lists, bounds and threshold estimates."""
    p = probs(rows, vocab, "cpu")
    if shape == "sorted":
        p = p.sort(dim=-1, descending=True).values
    elif shape == "equal":
        p = torch.full_like(p, 1 / vocab)
    elif shape == "few":
        p = torch.where(torch.rand_like(p) < 1e-3, p, 0.0)
    elif shape == "flat":
        p = probs(rows, vocab, "cpu", 0.1)
    elif shape == "tiny":
        p = p * 1e-30
    elif shape == "heavy":
        p = p * 1e3
    elif shape == "half":
        p = p * 0.5
    elif shape == "ascending":
        p = p.sort(dim=-1).values
    elif shape == "one":
        p = torch.zeros_like(p)
        p[:, vocab // 3] = 1
    elif shape == "two":
        p = torch.where(torch.arange(vocab) % 3 == 0, 1.5, 0.75).expand(rows, vocab) / vocab
    elif shape == "ties":
        p = (p.view(torch.int32) & ~0x1FFFFF).view(torch.float32)
    elif shape == "nan":
        p = torch.where(torch.arange(vocab) % 7 == 0, float("nan"), p)
    elif shape == "infinite":
        p[:, vocab // 2] = INF
    elif shape == "zero":
        p = torch.zeros_like(p)
    return p.contiguous()


SHAPES = ["soft", "sorted", "ascending", "equal", "few", "flat", "tiny", "heavy", "half"]
SHAPES += ["one", "two", "ties", "nan", "infinite", "zero"]


@pytest.mark.parametrize("shape", SHAPES + ["spread"])
@pytest.mark.parametrize(  # clusters of 16, 1 and 4 blocks; of 2 wide blocks and 1; one block; rows of two samples
    "rows, vocab",
    [(1, 128256), (3, 6145), (5, 6144), (50, 20001), (70, 20001), (300, 9000), (2, 200001)],
)
def test_guesses(shape, rows, vocab):
    """Check thresholds estimated from a sample (rows of more than 6144 columns): a wrong estimate changes no result."""
    p = probs(rows, vocab, "cpu", 5.0) if shape == "spread" else shaped(shape, rows, vocab)
    on_gpu = p.cuda()
    ps = torch.tensor([0.9, 0.0, 1.0, 0.999, 0.2, 0.01])[torch.arange(rows) % 6]
    for name, parameters in (
        ("top_p_sampling_from_probs", {"top_p": 0.9}),
        ("top_p_sampling_from_probs", {"top_p": ps}),
        ("top_k_sampling_from_probs", {"top_k": 2500}),
        ("top_k_top_p_sampling_from_probs", {"top_k": vocab, "top_p": 0.9}),
        ("top_k_top_p_sampling_from_probs", {"top_k": 1 << 30, "top_p": ps, "filter_apply_order": "joint"}),
        ("top_k_top_p_sampling_from_probs", {"top_k": 3000, "top_p": 0.95, "filter_apply_order": "joint"}),
    ):
        there = {key: value.cuda() if torch.is_tensor(value) else value for key, value in parameters.items()}
        tokens = function(name)(on_gpu, **there, seed=7, offset=0)
        assert torch.equal(tokens.cpu(), function(name)(p, **parameters, seed=7, offset=0)), (name, parameters)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("top_p", [0.9, 0.999, [0.9, 0.0, 1.0, 0.999, 0.2, 0.01, 0.6]], ids=str)
def test_pairs_of_rows(top_p, scale):
    """Check renormalisation by pairs of blocks: none, one or both blocks cannot finish their row alone."""
    vocab, of_shape = 17500, {}
    for shape in SHAPES:
        of_shape[shape] = shaped(shape, 1, vocab)[0] * scale
    p = torch.stack([of_shape[shape] for first in SHAPES for second in SHAPES for shape in (first, second)])
    p = torch.cat([p, p[:1]])
    assert len(p) > 2 * torch.cuda.get_device_properties(0).multi_processor_count
    if isinstance(top_p, list):
        top_p = torch.tensor(top_p)[torch.arange(len(p)) % len(top_p)]
    result = flashinfer.top_p_renorm_probs(p.cuda(), top_p.cuda() if torch.is_tensor(top_p) else top_p)
    torch.testing.assert_close(result.cpu(), flashinfer.top_p_renorm_probs(p, top_p), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", ["soft", "equal", "two", "flat"])
def test_every_kernel_of_few_rows(shape):
    """Run each kernel and each threshold search once, on small rows, for sanitizers."""
    p = shaped(shape, 3, 9001)
    seeds = {"seed": 11, "offset": 0}
    indices = torch.arange(3, dtype=torch.int32).repeat(4)
    for name, parameters in CASES:
        x = p.log() if name.endswith("_logits") else p
        tokens = function(name)(x.cuda(), **parameters, **seeds)
        assert torch.equal(tokens.cpu(), function(name)(x, **parameters, **seeds)), (name, parameters)
        tokens = function(name)(x.cuda(), **parameters, indices=indices.cuda(), **seeds)
        assert torch.equal(tokens.cpu(), function(name)(x, **parameters, indices=indices, **seeds)), (name, parameters)
    for rows_of, x, parameter in (
        (flashinfer.softmax, p.log(), 0.7),
        (flashinfer.top_p_renorm_probs, p, 0.9),
        (flashinfer.top_k_renorm_probs, p, 40),
        (flashinfer.top_k_renorm_probs, p.half(), 4500),
        (flashinfer.top_k_mask_logits, p.log(), 40),
        (flashinfer.top_k_mask_logits, p.bfloat16(), 4500),
    ):
        assert torch.equal(rows_of(x.cuda(), parameter).cpu(), rows_of(x, parameter)), rows_of.__name__


def test_rows_at_any_address():
    """Check rows without vector alignment, of which every other one is sampled."""
    p = probs(6, 10007, "cpu")
    for first in (0, 1, 3):
        there, here = p.cuda()[::2, first:], p[::2, first:]
        for top_k, top_p in ((40, 0.9), (10**6, 0.9), (5000, 1.0)):
            parameters = {"top_k": top_k, "top_p": top_p, "filter_apply_order": "joint", "seed": 1, "offset": 0}
            tokens = flashinfer.top_k_top_p_sampling_from_probs(there, **parameters)
            assert torch.equal(tokens.cpu(), flashinfer.top_k_top_p_sampling_from_probs(here, **parameters))


def test_many_outputs_of_few_rows_are_the_same():
    """Check that the table for many outputs per row gives the same sums as single draws."""
    p = probs(2, 20001, "cpu")
    on_gpu = p.cuda()
    indices = torch.arange(64, dtype=torch.int32) % 2
    for name, parameters in CASES:
        if name.endswith("_from_probs"):
            draw = function(name)
            tokens = draw(on_gpu, **parameters, indices=indices.cuda(), seed=1, offset=0)
            assert torch.equal(tokens.cpu(), draw(p, **parameters, indices=indices, seed=1, offset=0)), name


@pytest.mark.parametrize("shape", ["soft", "sorted", "equal", "few", "flat", "tiny", "heavy"])
@pytest.mark.parametrize("rows, vocab", [(3, 50), (5, 40001), (130, 9000)])
def test_unusual_rows(shape, rows, vocab):
    """Check that the threshold does not depend on the search that found it."""
    p = shaped(shape, rows, vocab)
    on_gpu = p.cuda()
    ks = torch.tensor([1, 40, 3000, vocab, 300], dtype=torch.int32)[torch.arange(rows) % 5]
    for name, parameters in (
        ("top_k_sampling_from_probs", {"top_k": 40}),
        ("top_k_sampling_from_probs", {"top_k": ks}),
        ("top_p_sampling_from_probs", {"top_p": 0.9}),
        ("top_p_sampling_from_probs", {"top_p": 0.3}),
        ("top_k_top_p_sampling_from_probs", {"top_k": 200, "top_p": 0.7}),
        ("top_k_top_p_sampling_from_probs", {"top_k": 200, "top_p": 0.7, "filter_apply_order": "joint"}),
        ("top_k_top_p_sampling_from_probs", {"top_k": ks, "top_p": 0.7}),
    ):
        there = {key: value.cuda() if torch.is_tensor(value) else value for key, value in parameters.items()}
        tokens = function(name)(on_gpu, **there, seed=5, offset=0)
        assert torch.equal(tokens.cpu(), function(name)(p, **parameters, seed=5, offset=0)), (name, parameters)
    for rows_of, parameter in (
        (flashinfer.top_p_renorm_probs, 0.9),
        (flashinfer.top_k_renorm_probs, 40),
        (flashinfer.top_k_renorm_probs, 3000),
        (flashinfer.top_k_mask_logits, 40),
    ):
        assert torch.equal(rows_of(on_gpu, parameter).cpu(), rows_of(p, parameter)), rows_of.__name__


def test_more_than_2_31_elements():
    p = torch.zeros(17_000, 128256, device="cuda")
    p[:, 5] = 1
    p[-1, 5], p[-1, 128255] = 0, 1
    tokens = flashinfer.top_p_sampling_from_probs(p, 0.9)
    assert (tokens[:-1] == 5).all() and tokens[-1] == 128255
