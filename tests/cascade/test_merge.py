# SPDX-License-Identifier: Apache-2.0
"""Merging attention states: values, states without keys, masks, layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
import flashinfer.triton.cascade
from flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from flashinfer.cascade.merge import variable_length_merge_states
from flashinfer.testing import assert_close
from flashinfer.trace.templates.cascade import (
    merge_state_in_place_trace,
    merge_state_trace,
    merge_states_trace,
    variable_length_merge_states_trace,
)

from ..fresh_process import run_python
from ..tensors import view_of_wider
from .inputs import DTYPES, heads_first, states

on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Rows, heads, head_dim: no elements, one element, no multiple of a vector, the published head dims, more vectors than
# a block has threads, more heads than a block handles, one head with rows that share a block.
SHAPES = [
    (0, 4, 64),
    (3, 0, 64),
    (1, 1, 1),
    (5, 3, 41),
    (7, 32, 64),
    (33, 5, 128),
    (2, 8, 256),
    (3, 2, 512),
    (2, 3, 2056),
    (2, 1500, 64),
    (301, 1, 16),
]
INF = float("inf")


def test_reference_is_attention_over_all_keys():
    logits, values = 3 * torch.randn(5, 2, 24), torch.randn(24, 2, 16)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = logits[..., keys]
        v = torch.einsum("nhk,khd->nhd", torch.softmax(part, dim=-1), values[keys])
        return v, torch.logsumexp(part, dim=-1) / torch.log(torch.tensor(2.0))

    parts = [attend(slice(start, start + 8)) for start in (0, 8, 16)]
    v, s = (torch.stack(x, dim=1) for x in zip(*parts, strict=True))
    assert_close(merge_states_trace.reference(v, s), attend(slice(None)), rtol=1e-5, atol=1e-5)  # sums in another order


@on_any_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_state(device, shape, dtype):
    (v_a, s_a), (v_b, s_b) = (states(*shape, dtype=dtype, device=device) for _ in range(2))
    before = [x.clone() for x in (v_a, s_a, v_b, s_b)]
    v, s = merge_state(v_a, s_a, v_b, s_b)
    assert v.shape == shape and v.dtype == dtype and v.is_contiguous()
    assert s.shape == shape[:-1] and s.dtype == torch.float32
    assert_close((v, s), merge_state_trace.reference(v_a, s_a, v_b, s_b))
    assert all(torch.equal(x, y) for x, y in zip((v_a, s_a, v_b, s_b), before, strict=True))
    merge_state_in_place(v_a, s_a, v_b, s_b)
    assert torch.equal(v_a, v) and torch.equal(s_a, s)


@on_any_dtype
@pytest.mark.parametrize("num_states", [0, 1, 2, 4, 5, 100])
@pytest.mark.parametrize("shape", [(7, 5, 128), (3, 2, 41), (0, 4, 64), (2, 1, 2056)], ids=str)
def test_merge_states(device, shape, num_states, dtype):
    rows, heads, dim = shape
    v, s = states(rows, num_states, heads, dim, dtype=dtype, device=device)
    merged = merge_states(v, s)
    assert merged[0].shape == shape and merged[1].shape == shape[:-1]
    assert_close(merged, merge_states_trace.reference(v, s))
    if num_states == 1:
        assert_close(merged, (v[:, 0], s[:, 0]))
    if num_states == 2:
        assert_close(merged, merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]))


@on_any_dtype
def test_a_state_without_keys_adds_nothing(device, dtype):
    v, s = states(9, 7, 3, 64, dtype=dtype, device=device)
    s[:, 2], v[:, 2] = -INF, torch.nan  # entries without a state may hold any value
    s[0], s[1, :4], s[2, 4:] = -INF, -INF, -INF
    merged, score = merge_states(v, s)
    assert (merged[0] == 0).all() and (score[0] == -INF).all()
    assert not merged.isnan().any() and not score.isnan().any()
    assert_close((merged, score), merge_states_trace.reference(v, s))
    some = [0, 1, 3, 4, 5, 6]
    assert_close((merged, score), merge_states_trace.reference(v[:, some], s[:, some]))


def test_two_states_without_keys(device):
    v_a, v_b = torch.full((2, 3, 2, 64), torch.nan, device=device).half()
    none, some = torch.full((3, 2), -INF, device=device), torch.randn(3, 2, device=device)
    v, s = merge_state(v_a, none, v_b, none)
    assert (v == 0).all() and (s == -INF).all()
    v_b = torch.randn_like(v_a)
    for arguments in ((v_a, none, v_b, some), (v_b, some, v_a, none)):
        v, s = merge_state(*arguments)
        assert torch.equal(v, v_b) and torch.equal(s, some)


def test_large_scores_do_not_overflow(device):
    v, _ = states(2, 3, 2, 64, dtype=torch.float32, device=device)
    for offset in (-1e4, 1e4, 3e38):
        s = torch.full((2, 3, 2), offset, device=device)
        merged, score = merge_states(v, s)
        assert_close((merged, score), merge_states_trace.reference(v, s))
        assert_close(merged, v.mean(dim=1))


def test_the_result_is_rounded_once(device):
    v, s = states(64, 8, 4, 64, dtype=torch.bfloat16, device=device)
    weights = torch.softmax(s.double() * 0.6931471805599453, dim=1).unsqueeze(-1)
    exact = (v.double() * weights).sum(dim=1)
    error = (merge_states(v, s)[0].double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


@on_any_dtype
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(33, 5, 128), (40, 1, 16), (9, 3, 41)], ids=str)
def test_mask(device, shape, mask_dtype, dtype):
    (v, s), (v_other, s_other) = (states(*shape, dtype=dtype, device=device) for _ in range(2))
    mask = (torch.arange(shape[0], device=device) % 3).to(mask_dtype)  # uint8: 2 counts as True, like 1
    before = v.clone(), s.clone()
    expected = merge_state_in_place_trace.reference(v, s, v_other, s_other, mask)
    assert merge_state_in_place(v, s, v_other, s_other, mask) is None
    assert_close((v, s), expected)
    assert torch.equal(v[::3], before[0][::3]) and torch.equal(s[::3], before[1][::3])
    strided = torch.zeros(shape[0], 2, dtype=mask_dtype, device=device)[:, 0]
    merge_state_in_place(v, s, v_other, s_other, mask=strided)
    assert_close((v, s), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_scores_of_another_dtype(device, dtype):
    (v, s), (v_other, s_other) = (states(7, 3, 64, dtype=torch.float16, device=device) for _ in range(2))
    s, s_other = s.to(dtype), s_other.to(dtype)
    expected = merge_state_trace.reference(v, s, v_other, s_other)
    assert_close(merge_state(v, s, v_other, s_other), expected)
    stacked = torch.stack([v, v_other], dim=1), torch.stack([s, s_other], dim=1)
    assert_close(merge_states(*stacked), expected)
    merge_state_in_place(v, s, v_other, s_other)  # s is updated in place
    assert s.dtype == dtype
    assert_close((v, s), (expected[0], expected[1].to(dtype)), rtol=2e-3, atol=1e-5)  # computed in fp32


@on_any_dtype
@pytest.mark.parametrize("pad, offset", [(0, 0), (64, 0), (64, 8), (3, 1)])
def test_strided(device, pad, offset, dtype):
    (v_a, s_a), (v_b, s_b) = (states(9, 5, 64, dtype=dtype, device=device) for _ in range(2))
    expected = merge_state_trace.reference(v_a, s_a, v_b, s_b)
    wide, scores = view_of_wider(heads_first(v_a), pad, offset), view_of_wider(s_a, 3, 1)
    assert_close(merge_state(wide, scores, heads_first(v_b), heads_first(s_b)), expected)
    v, s = view_of_wider(v_a, pad, offset), view_of_wider(s_a, 3, 1)
    merge_state_in_place(v, s, heads_first(v_b), heads_first(s_b))
    assert_close((v, s), expected)
    assert (v._base[..., :offset] == 7).all() and (v._base[..., offset + 64 :] == 7).all()
    assert (s._base[:, 0] == 7).all() and (s._base[:, 6:] == 7).all()
    stacked = torch.stack([v_a, v_b]), torch.stack([s_a, s_b])  # the state dimension is outermost in memory
    assert_close(merge_states(*(x.transpose(0, 1) for x in stacked)), expected)


@settings(max_examples=25)
@given(data=st.data())
def test_merge_states_any_layout(device, data):
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    rows, num_states, heads = (data.draw(st.integers(0, n), label=name) for n, name in ((9, "n"), (9, "k"), (40, "h")))
    dim = data.draw(st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 256])), label="head_dim")
    v, s = states(rows, num_states, heads, dim, dtype=dtype, device=device)
    s[torch.rand(s.shape, device=device) < data.draw(st.sampled_from([0, 0.5, 1]), label="empty")] = -INF
    expected = merge_states_trace.reference(v, s)
    pad = data.draw(st.integers(0, 20), label="pad")
    order = data.draw(st.permutations(range(3)), label="order in memory")
    back = [order.index(i) for i in range(3)]
    v = view_of_wider(v.permute(*order, 3).contiguous(), pad, data.draw(st.integers(0, pad))).permute(*back, 3)
    s = s.permute(order).contiguous().permute(back)
    assert_close(merge_states(v, s), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(device, backend):
    def model(v, s):
        v_a, s_a = merge_states(v, s)
        v_b, s_b = merge_state(v_a, s_a, v[:, 0], s[:, 0])
        merge_state_in_place(v_a, s_a, v_b, s_b, mask=torch.ones_like(s_a[:, 0], dtype=torch.bool))
        merge_state_in_place(v_a, s_a, v_b, s_b)
        return v_a * 2, s_a

    v, s = states(7, 3, 2, 64, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(v, s)
    assert all(torch.equal(x, y) for x, y in zip(compiled, model(v, s), strict=True))


def test_names():
    for name in ("merge_state", "merge_state_in_place", "merge_states"):
        assert getattr(torch.ops.flashinfer, name).default._schema.is_mutable
        assert getattr(flashinfer, name) is getattr(flashinfer.cascade, name)
    assert flashinfer.jit.gen_cascade_module().name == "cascade"


def test_module_has_the_merges(device):
    assert hasattr(flashinfer.cascade.get_cascade_module(device), "merge_states")


@on_any_dtype
@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 1, 100, 5], [1] * 40], ids=str)
@pytest.mark.parametrize("shape", [(5, 128), (2, 41), (1, 2056)], ids=str)
def test_variable_length_merge_states(device, shape, lengths, dtype):
    v, s = states(sum(lengths), *shape, dtype=dtype, device=device)
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(device)  # int64 is converted
    merged = variable_length_merge_states(v, s, indptr)
    assert merged[0].shape == (len(lengths), *shape) and merged[1].shape == (len(lengths), shape[0])
    assert_close(merged, variable_length_merge_states_trace.reference(v, s, indptr))
    wide = view_of_wider(heads_first(v), 8, 3), heads_first(s)
    assert_close(variable_length_merge_states(*wide, indptr.int()), merged)


def test_variable_lengths_that_are_equal_are_merge_states(device):
    v, s = states(6, 4, 3, 64, dtype=torch.bfloat16, device=device)
    s[1], s[2, :3], v[2, :3] = -INF, -INF, torch.nan
    indptr = torch.arange(0, 25, 4, dtype=torch.int32, device=device)
    merged = variable_length_merge_states(v.flatten(0, 1), s.flatten(0, 1), indptr)
    assert all(torch.equal(x, y) for x, y in zip(merged, merge_states(v, s), strict=True))


def test_triton_names():
    names = ("merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states")
    assert all(getattr(flashinfer.triton.cascade, name) is getattr(flashinfer.cascade.merge, name) for name in names)


def test_the_package_of_triton_names_binds_its_module():
    program = "import flashinfer.triton; print(flashinfer.triton.cascade.merge_states.__name__)"
    run = run_python(["-c", program])
    assert run.stdout == "merge_states\n", run.stderr
