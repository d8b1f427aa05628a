# SPDX-License-Identifier: Apache-2.0
"""Draws: equal to the reference in any layout; rows without a token; parameters at their limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer

from .inputs import CASES, DRAWS, INF, function, kept, probs, reference, rows_for, takes_logits

every_draw = pytest.mark.parametrize("name, parameters", CASES, ids=str)
every_filter = pytest.mark.parametrize("name", [name for name in DRAWS if name.endswith("_probs")])

# One row and column; a prime; a row that several blocks share; rows whose starts are no multiple of 16 bytes.
SHAPES = [(1, 1), (9, 7), (33, 111), (17, 4096), (5, 20011)]


@every_draw
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_of_the_reference(device, shape, name, parameters):
    x = rows_for(name, *shape, device)
    before = x.clone()
    tokens = function(name)(x, **parameters, seed=42, offset=8)
    assert tokens.shape == shape[:1] and tokens.dtype == torch.int32
    expected = reference(name)(x, **parameters, seed=42, offset=8)
    # The reference sums in another order: one token in thousands may be a neighbour.
    assert (tokens != expected).sum() <= 1
    assert torch.equal(x, before)


@every_draw
def test_large_vocabulary(device, name, parameters):
    for vocab in (128256, 262144):
        x = rows_for(name, 2, vocab, device)
        tokens = function(name)(x, **parameters, seed=1, offset=2)
        assert kept(name, x, **parameters).gather(1, tokens.long().unsqueeze(1)).gt(0).all()


@every_draw
def test_per_row_parameters_and_strides(device, name, parameters):
    rows, vocab = 13, 1031
    x = rows_for(name, rows, vocab, device)
    numbers = {key: value for key, value in parameters.items() if not isinstance(value, str)}
    tensors = parameters | {key: torch.full((rows,), value, device=device) for key, value in numbers.items()}
    expected = function(name)(x, **parameters, seed=3, offset=4)
    assert torch.equal(function(name)(x, **tensors, seed=3, offset=4), expected)
    wide = torch.full((rows, vocab + 37), 7.0, device=device)
    wide[:, 5 : 5 + vocab] = x
    assert torch.equal(function(name)(wide[:, 5 : 5 + vocab], **tensors, seed=3, offset=4), expected)
    backwards = torch.stack([x, x], dim=1)[:, 0]
    assert torch.equal(function(name)(backwards, **parameters, seed=3, offset=4), expected)


def test_rows_have_their_own_parameters(device):
    x = probs(4, 500, device)
    order = x.argsort(dim=-1, descending=True)
    limits = torch.tensor([1, 2, 500, 10_000], device=device)
    for seed in range(20):
        tokens = flashinfer.top_k_sampling_from_probs(x, limits, seed=seed, offset=0)
        ranks = (order == tokens.unsqueeze(1)).int().argmax(dim=1)
        assert (ranks < limits.clamp(max=500)).all()
    greedy = flashinfer.top_p_sampling_from_probs(x, torch.zeros(4, device=device), seed=0, offset=0)
    assert torch.equal(greedy.long(), x.argmax(dim=-1))
    certain = flashinfer.min_p_sampling_from_probs(x, torch.ones(4, device=device), seed=0, offset=0)
    assert torch.equal(certain.long(), x.argmax(dim=-1))


@every_draw
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices(device, name, parameters, dtype):
    x = rows_for(name, 3, 777, device)
    chosen = torch.tensor([2, 0, 0, 1, 2, 2, 2, 1, 0, 1, 1, 2, 0, 0], dtype=dtype, device=device)
    tokens = function(name)(x, **parameters, indices=chosen, seed=5, offset=6)
    assert tokens.dtype == dtype
    assert torch.equal(tokens, function(name)(x[chosen.long()], **parameters, seed=5, offset=6).to(dtype))
    strided = torch.stack([chosen, chosen], dim=1)[:, 0]
    assert torch.equal(function(name)(x, **parameters, indices=strided, seed=5, offset=6), tokens)
    few = chosen[:2]  # fewer outputs than rows
    assert torch.equal(function(name)(x, **parameters, indices=few, seed=5, offset=6), tokens[:2])


def test_which_row_a_parameter_belongs_to(device):
    """Check parameters with indices: top_p belongs to the row of probabilities, top_k and min_p to the output."""
    x = probs(2, 200, device, spread=1)
    best = x.argmax(dim=-1)
    indices = torch.tensor([1, 0], dtype=torch.int32, device=device)

    def greedy(draw) -> list[bool]:
        tokens = torch.stack([draw(seed) for seed in range(30)])
        return (tokens == best[indices.long()]).all(dim=0).tolist()

    sample = flashinfer.sampling
    top_p, top_k = torch.tensor([1e-6, 1.0], device=device), torch.tensor([1, 200], device=device)
    arguments = {"indices": indices, "offset": 0}
    assert greedy(lambda seed: sample.top_p_sampling_from_probs(x, top_p, seed=seed, **arguments)) == [False, True]
    assert greedy(lambda seed: sample.top_k_sampling_from_probs(x, top_k, seed=seed, **arguments)) == [True, False]
    min_p = torch.tensor([1.0, 0.0], device=device)
    assert greedy(lambda seed: sample.min_p_sampling_from_probs(x, min_p, seed=seed, **arguments)) == [True, False]
    joint = sample.top_k_top_p_sampling_from_probs
    assert greedy(lambda seed: joint(x, top_k, top_p, seed=seed, **arguments)) == [False, True]


@every_filter
def test_rows_without_a_token(device, name):
    x = probs(6, 300, device)
    x[1], x[2], x[4] = 0.0, torch.nan, -1.0
    expected = [True, False, False, True, False, True]
    for parameters in DRAWS[name]:
        tokens, valid = function(name)(x, **parameters, return_valid=True, seed=1, offset=1)
        assert valid.dtype == torch.bool and valid.tolist() == expected
        assert (tokens[[1, 2, 4]] == 0).all()
        indices = torch.tensor([0, 0, 0, 1, 1, 2], device=device).int()
        alone = function(name)(x[[0, 3, 5]], **parameters, indices=indices, seed=1, offset=1)
        assert torch.equal(tokens[[0, 3, 5]], alone[[0, 3, 5]])


@pytest.mark.parametrize("name", [name for name in DRAWS if takes_logits(name)])
def test_logits_without_a_token(device, name):
    x = torch.randn(4, 300, device=device)
    x[1], x[2] = -INF, torch.nan
    x[3, :-1] = -INF
    for parameters in DRAWS[name]:
        tokens = function(name)(x, **parameters, seed=1, offset=1)
        assert tokens[1:].tolist() == [0, 0, 299]


def test_logits_of_any_size(device):
    """Check logits of any magnitude: sums are computed by segments of 1024 columns, whose maximum may be anywhere."""
    x = torch.full((7, 5000), -INF, device=device)
    x[0, 4000], x[0, 10] = 0.0, -200.0
    x[1, 10], x[1, 4000] = 3e38, 1e6
    x[2, 10], x[2, 4000] = -3e38, -INF
    x[3, 77], x[3, 3000] = 1e5, 1e5 - 50
    x[4], x[4, 4999] = -1e30, -90.0
    x[5, 2000], x[5, 10] = INF, 80.0
    x[6], x[6, 123] = -1e5, torch.nan
    x[6, 3333] = -1e4
    indices = torch.arange(7, dtype=torch.int32, device=device).repeat(50)
    tokens = flashinfer.sampling_from_logits(x, indices, seed=1, offset=0)
    assert tokens.view(50, 7).unique(dim=0).tolist() == [[4000, 10, 10, 77, 4999, 2000, 3333]]
    assert torch.equal(flashinfer.sampling_from_logits(x, seed=1, offset=0), tokens[:7])


def neighbours(number: float, rows: int, columns: int, device: str) -> torch.Tensor:
    """Return floats near a number: the number itself, and up to 40 steps below."""
    steps = torch.randint(41, (rows, columns), device=device, dtype=torch.int32)
    bits = torch.tensor(number, dtype=torch.float32, device=device).view(torch.int32)
    return (bits - steps if number > 0 else bits + steps).view(torch.float32)


@pytest.mark.parametrize("size", [1e6, 2097152.0, 2097153.0, 1e7, 5.3e8, 536870912.0, 1e12, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_far_from_zero(device, size, sign):
    """Check large logits, as after division by a low temperature: only differences matter."""
    x = neighbours(sign * size, 4, 5000, device)
    x[1, 1000:], x[2, 1::2], x[3, 7] = -INF, -1e4, torch.nan
    for seed in range(5):
        tokens = flashinfer.sampling_from_logits(x, seed=seed, offset=0)
        assert torch.equal(tokens, reference("sampling_from_logits")(x, seed=seed, offset=0))
        indices = torch.arange(4, dtype=torch.int32, device=device).repeat(8)
        assert torch.equal(flashinfer.sampling_from_logits(x, indices, seed=seed, offset=0)[:4], tokens)
    filtered = flashinfer.top_k_top_p_sampling_from_logits(x[:3], 50, 0.9, seed=1, offset=0)
    p = torch.softmax(x[:3].double(), dim=-1)
    assert (p.gather(1, filtered.long().unsqueeze(1)) > 0.02 * p.amax(dim=1, keepdim=True)).all()


@every_draw
def test_impossible_columns_are_never_drawn(device, name, parameters):
    x = rows_for(name, 1, 64, device, spread=0.3)
    x[:, ::2] = -INF if takes_logits(name) else 0.0
    x[:, 1::4] = torch.nan
    indices = torch.zeros(5000, dtype=torch.int32, device=device)
    tokens = function(name)(x, **parameters, indices=indices, seed=9, offset=9)
    assert (tokens % 4 == 3).all()


@pytest.mark.parametrize("top_k", [5 - 2**32, -1, 0, 1, 5, 100, 2**31 - 1, 2**40])
@pytest.mark.parametrize("top_p", [-1.0, 0.0, 1e-9, 0.5, 1.0, 7.0, float("nan"), INF])
def test_limits_of_the_parameters(device, top_k, top_p):
    x = probs(3, 5, device)
    for order in ("top_k_first", "joint"):
        draw = flashinfer.top_k_top_p_sampling_from_probs
        tokens, valid = draw(x, top_k, top_p, filter_apply_order=order, seed=1, offset=0, return_valid=True)
        assert valid.all() and (tokens >= 0).all() and (tokens < 5).all()
        if top_k <= 1 or not top_p > 1e-9:
            assert torch.equal(tokens.long(), x.argmax(dim=-1))


@pytest.mark.parametrize("many", [2**31, 2**32 + 1, 2**63 - 1, INF])
def test_top_k_without_limit_by_row(device, many):
    """Check the largest value of each dtype as "no limit"."""
    x = probs(3, 100, device)
    top_k = torch.tensor([many, 1, many], device=device)
    masked = flashinfer.top_k_mask_logits(x, top_k)
    assert (masked > -INF).sum(dim=1).tolist() == [100, 1, 100]
    kept = torch.tensor([100, 1, 100], device=device)
    drawn = flashinfer.top_k_sampling_from_probs(x, top_k, seed=3, offset=0)
    assert torch.equal(drawn, flashinfer.top_k_sampling_from_probs(x, kept, seed=3, offset=0))


@pytest.mark.parametrize(
    "dtype, top_k, kept",
    [
        (torch.int64, [5 - 2**32, -(2**63)], [1, 1]),
        (torch.uint32, [2**32 - 1, 5], [100, 5]),
        (torch.uint64, [2**64 - 1, 2**32], [100, 100]),
    ],
    ids=str,
)
def test_top_k_by_row_of_integers_beyond_32_bits(device, dtype, top_k, kept):
    masked = flashinfer.top_k_mask_logits(probs(2, 100, device), torch.tensor(top_k, dtype=dtype, device=device))
    assert (masked > -INF).sum(dim=1).tolist() == kept


@pytest.mark.parametrize("min_p", [-1.0, 0.0, 1e-20, 1.0, 2.0, float("nan")])
def test_limits_of_min_p(device, min_p):
    x = probs(7, 50, device)
    tokens, valid = flashinfer.min_p_sampling_from_probs(x, min_p, seed=1, offset=0, return_valid=True)
    if min_p >= 1:
        assert torch.equal(tokens.long(), x.argmax(dim=-1))
    assert valid.all() or min_p != min_p


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e30])
def test_weights_of_any_size(device, scale):
    """Check filters that do not need normalised rows, with subnormal and with huge weights."""
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]], device=device) * scale
    indices = torch.zeros(4000, dtype=torch.int32, device=device)
    tokens = flashinfer.top_k_sampling_from_probs(x, 2, indices, seed=2, offset=2)
    assert set(tokens.tolist()) == {1, 3}
    tokens = flashinfer.min_p_sampling_from_probs(x, 0.5, indices, seed=2, offset=2)
    assert set(tokens.tolist()) == {1, 2, 3}
    if scale < 1:
        assert (flashinfer.sampling_from_probs(x, indices, seed=2, offset=2) == 3).all()  # sums below 1: last column


def test_equals_are_kept_together(device):
    x = torch.full((1, 1000), 1e-3, device=device)
    indices = torch.zeros(40_000, dtype=torch.int32, device=device)
    for tokens in (
        flashinfer.top_k_sampling_from_probs(x, 3, indices, seed=0, offset=0),
        flashinfer.top_p_sampling_from_probs(x, 0.01, indices, seed=0, offset=0),
    ):
        assert tokens.unique().numel() == 1000


def test_nothing_to_draw(device):
    for name, parameters in CASES:
        x = torch.empty(0, 100, device=device)
        assert function(name)(x, **parameters).shape == (0,)
        none = torch.empty(0, dtype=torch.int64, device=device)
        assert function(name)(rows_for(name, 2, 10, device), **parameters, indices=none).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(device, dtype):
    for name, parameters in CASES:
        x = rows_for(name, 5, 300, device).to(dtype)
        expected = function(name)(x.float(), **parameters, seed=1, offset=0)
        assert torch.equal(function(name)(x, **parameters, seed=1, offset=0), expected)


def test_check_nan(device):
    for name, parameters in CASES:
        x = rows_for(name, 5, 300, device)
        function(name)(x, **parameters, check_nan=True)
        x[3, 7] = torch.nan
        kind = "logits" if takes_logits(name) else "probs"
        with pytest.raises(ValueError, match=f"Input {kind} contains NaN."):
            function(name)(x, **parameters, check_nan=True)


def test_logits_and_probabilities_draw_the_same(device):
    logits = 3 * torch.randn(200, 3000, device=device)
    p = flashinfer.softmax(logits)
    same = flashinfer.sampling_from_logits(logits, seed=1, offset=0) == flashinfer.sampling_from_probs(
        p, seed=1, offset=0
    )
    assert same.sum() >= 199
    for order in ("top_k_first", "joint"):
        arguments = {"filter_apply_order": order, "seed": 1, "offset": 0}
        one = flashinfer.top_k_top_p_sampling_from_logits(logits, 100, 0.7, **arguments)
        other = flashinfer.top_k_top_p_sampling_from_probs(p, 100, 0.7, **arguments)
        assert torch.equal(one, other)
        view = torch.cat([logits, logits], dim=1)[:, :3000]
        assert torch.equal(flashinfer.top_k_top_p_sampling_from_logits(view, 100, 0.7, **arguments), other)
        arguments["indices"] = torch.arange(1000, device=device) % 200
        one = flashinfer.top_k_top_p_sampling_from_logits(logits, 100, 0.7, **arguments)
        assert torch.equal(one, flashinfer.top_k_top_p_sampling_from_probs(p, 100, 0.7, **arguments))


@settings(max_examples=40)
@given(data=st.data())
def test_any_row(device, data):
    """Check rows of few distinct values with many ties: drawn tokens are kept ones, equal on all devices."""
    vocab = data.draw(st.one_of(st.integers(1, 300), st.sampled_from([1024, 1025, 9999])), label="vocab")
    values = data.draw(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6), label="values")
    pick = torch.randint(0, len(values), (4, vocab))
    x = torch.tensor(values)[pick]
    x = (x / x.sum(dim=-1, keepdim=True).clamp(min=1e-30)).to(device)
    top_k, top_p = data.draw(st.integers(1, 2 * vocab), label="top_k"), data.draw(st.floats(0, 1.2), label="top_p")
    order = data.draw(st.sampled_from(["top_k_first", "joint"]), label="order")
    seed = data.draw(st.integers(0, 2**64 - 1), label="seed")
    arguments = {"filter_apply_order": order, "seed": seed, "offset": 0, "return_valid": True}
    tokens, valid = flashinfer.top_k_top_p_sampling_from_probs(x, top_k, top_p, **arguments)
    assert torch.equal(valid, x.amax(dim=-1) > 0)
    threshold = kept("", x, top_k=top_k, top_p=max(0.0, top_p - 1e-4), filter_apply_order=order)
    lowest = torch.where(threshold > 0, x.double(), INF).amin(dim=-1)
    looser = kept("", x, top_k=top_k, top_p=top_p + 1e-4, filter_apply_order=order)
    drawn = looser.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    assert (drawn[valid] > 0).all() and not lowest.isnan().any()
    if device == "cuda":
        on_cpu, _ = flashinfer.top_k_top_p_sampling_from_probs(x.cpu(), top_k, top_p, **arguments)
        assert torch.equal(on_cpu, tokens.cpu())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(device, backend):
    def model(logits, seed, offset):
        p = flashinfer.softmax(logits, temperature=0.7)
        p = flashinfer.top_p_renorm_probs(p, 0.9)
        one = flashinfer.sampling_from_probs(p, seed=seed, offset=offset)
        two, valid = flashinfer.top_k_sampling_from_probs(p, 5, seed=3, offset=4, return_valid=True)
        three = flashinfer.top_k_top_p_sampling_from_logits(logits, 5, 0.5, seed=seed, offset=offset)
        return one + two, valid, three, flashinfer.top_k_mask_logits(flashinfer.top_k_renorm_probs(p, 7), 3)

    logits = torch.randn(7, 300, device=device)
    seeds = torch.tensor([5], device=device), torch.tensor([6], device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(logits, *seeds)
    assert all(torch.equal(x, y) for x, y in zip(compiled, model(logits, *seeds), strict=True))


def test_torch_compile_draws_from_the_generator(device):
    draw = torch.compile(lambda p: flashinfer.min_p_sampling_from_probs(p, 0.01), fullgraph=True, backend="aot_eager")
    p = probs(50, 1000, device)
    torch.manual_seed(3)
    one, two = draw(p), draw(p)
    torch.manual_seed(3)
    assert torch.equal(draw(p), one) and not torch.equal(one, two)
