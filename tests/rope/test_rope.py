# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding with frequencies: values, positions, layouts, edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing import assert_close
from flashinfer.trace.templates import rope as templates

from ..tensors import gaps_are_untouched, randn, view_of_wider
from .inputs import DTYPES, ragged

on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_both_styles = pytest.mark.parametrize("interleave", [False, True], ids=["halves", "neighbours"])
FORMS = ["apply_rope", "apply_rope_pos_ids", "apply_llama31_rope", "apply_llama31_rope_pos_ids"]


def reference(form):
    return getattr(templates, f"{form}_trace").reference


def heads(nnz, head_dim, dtype, device, num_q=4, num_k=2):
    return randn(nnz, num_q, head_dim, dtype=dtype, device=device), randn(
        nnz, num_k, head_dim, dtype=dtype, device=device
    )


def places(form, nnz, device):
    """Return the token positions as the form takes them: ``pos_ids``, or offsets."""
    if "pos_ids" in form:
        return {"pos_ids": torch.randint(0, 1 << 20, (nnz,), device=device)}
    return ragged([nnz // 3, 0, nnz - nnz // 3], device)


def check(form, q, k, **call):
    """Check both the allocating and the in-place form."""
    expected = reference(form)(q, k, **call)
    before = q.clone(), k.clone()
    for actual, want in zip(getattr(flashinfer, form)(q, k, **call), expected, strict=True):
        assert_close(actual, want)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    q, k = q.clone(), k.clone()
    assert getattr(flashinfer, f"{form}_inplace")(q, k, **call) is None
    for actual, want in zip((q, k), expected, strict=True):
        assert_close(actual, want)


@pytest.mark.parametrize("interleave", [False, True])
def test_reference_in_plain_words(interleave):
    """Compute the reference element by element, for one head at one position."""
    position, dim, theta, scale = 5, 8, 100.0, 2.0
    x = torch.randn(1, 1, dim + 2)  # two columns are not rotated
    y, _ = reference("apply_rope_pos_ids")(x, x, torch.tensor([position]), dim, interleave, scale, theta)
    for j in range(dim // 2):
        first, second = (2 * j, 2 * j + 1) if interleave else (j, j + dim // 2)
        angle = position * theta ** (-2 * j / dim) / scale
        a, b = float(x[0, 0, first]), float(x[0, 0, second])
        assert math.isclose(y[0, 0, first], a * math.cos(angle) - b * math.sin(angle), abs_tol=1e-6)
        assert math.isclose(y[0, 0, second], b * math.cos(angle) + a * math.sin(angle), abs_tol=1e-6)
    assert torch.equal(y[..., dim:], x[..., dim:])


def test_reference_of_llama31_in_plain_words():
    """Check that high frequencies are kept, low ones divided by the scale, and those between blended."""
    dim, theta, scale, low, high, context = 64, 5e5, 8.0, 1.0, 4.0, 8192
    x = torch.zeros(1, 1, dim)
    x[..., : dim // 2] = 1  # the result is then the cosines and the sines
    y, _ = reference("apply_llama31_rope_pos_ids")(x, x, torch.tensor([3]))
    for j in range(dim // 2):
        f = theta ** (-2 * j / dim)
        smooth = min(1.0, max(0.0, context / (2 * math.pi * (high - low)) * f - 1 / (high / low - 1)))
        f = (1 - smooth) * f / scale + smooth * f
        assert math.isclose(y[0, 0, j], math.cos(3 * f), abs_tol=1e-6)
        assert math.isclose(y[0, 0, j + dim // 2], math.sin(3 * f), abs_tol=1e-6)


@on_any_dtype
@on_both_styles
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("form", FORMS)
def test_rope(device, form, head_dim, interleave, dtype):
    q, k = heads(19, head_dim, dtype, device)
    check(form, q, k, **places(form, 19, device), interleave=interleave)


@on_any_dtype
@on_both_styles
@pytest.mark.parametrize("head_dim, rotary_dim", [(128, 64), (128, 34), (256, 64), (80, 32), (24, 8), (18, 6), (7, 2)])
def test_part_of_a_head(device, head_dim, rotary_dim, interleave, dtype):
    q, k = heads(5, head_dim, dtype, device)
    check(
        "apply_rope_pos_ids", q, k, pos_ids=torch.arange(5, device=device), rotary_dim=rotary_dim, interleave=interleave
    )


@pytest.mark.parametrize("form", FORMS)
def test_scale_and_theta(device, form):
    q, k = heads(5, 128, torch.float32, device)
    check(form, q, k, **places(form, 5, device), rope_scale=2.5, rope_theta=1e6)


@pytest.mark.parametrize("factors", [(1.0, 4.0, 8192), (0.5, 2.0, 4096), (1, 32, 131072)])
def test_llama31_factors(device, factors):
    names = ("low_freq_factor", "high_freq_factor", "old_context_len")
    q, k = heads(5, 128, torch.float32, device)
    pos_ids = torch.randint(0, 1 << 17, (5,), device=device)
    check("apply_llama31_rope_pos_ids", q, k, pos_ids=pos_ids, **dict(zip(names, factors, strict=True)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions(device, dtype):
    """Check the largest int32 and negative positions: angles are as exact there as near zero."""
    pos_ids = torch.tensor([0, 1, -7, 2**20, 2**24 + 1, 2**31 - 1], device=device, dtype=dtype)
    q, k = heads(6, 128, torch.float32, device)
    check("apply_rope_pos_ids", q, k, pos_ids=pos_ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths",
    [[5], [1, 1, 1], [0, 3, 0, 0, 2, 0], [1] * 40, [2, 0] * 600],
    ids=lambda lengths: f"{len(lengths)} requests",
)
def test_ragged(device, lengths, dtype):
    q, k = heads(sum(lengths), 64, torch.float32, device)
    check("apply_rope", q, k, **ragged(lengths, device, dtype))


def test_tokens_of_no_request_are_left_alone(device):
    q, k = heads(9, 64, torch.float32, device)
    indptr, offsets = torch.tensor([2, 4, 7], device=device), torch.tensor([10, 3], device=device)
    expected = q.clone()
    pos_ids = torch.tensor([10, 11, 3, 4, 5], device=device)
    expected[2:7] = reference("apply_rope_pos_ids")(q[2:7], k[2:7], pos_ids)[0]
    flashinfer.apply_rope_inplace(q, k, indptr, offsets)
    assert_close(q, expected)
    assert torch.equal(q[:2], expected[:2]) and torch.equal(q[7:], expected[7:])


@pytest.mark.parametrize("nnz, num_q, num_k", [(0, 4, 2), (3, 0, 2), (3, 4, 0), (1, 1, 1), (3, 71, 1), (2, 128, 128)])
def test_numbers_of_tokens_and_heads(device, nnz, num_q, num_k):
    q, k = heads(nnz, 128, torch.bfloat16, device, num_q, num_k)
    check("apply_rope_pos_ids", q, k, pos_ids=torch.arange(nnz, device=device))


@on_both_styles
@pytest.mark.parametrize("form", ["apply_rope", "apply_rope_pos_ids"])
def test_many_tokens(device, form, interleave):
    """Check enough tokens for two items per thread of the CUDA kernel, and a head count that leaves threads idle."""
    q, k = heads(1100, 128, torch.bfloat16, device, 24, 3)
    check(form, q, k, **places(form, 1100, device), interleave=interleave)


def test_no_requests(device):
    q, k = heads(0, 64, torch.float32, device)
    indptr, offsets = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    assert flashinfer.apply_rope(q, k, indptr, offsets)[0].shape == q.shape


@on_any_dtype
@on_both_styles
def test_heads_of_a_packed_projection(device, dtype, interleave):
    """Check q and k as slices of one (tokens, q + k + v heads, head_dim) buffer, overwritten in place."""
    qkv, pos_ids = randn(5, 8, 128, dtype=dtype, device=device), torch.arange(5, device=device)
    before = qkv.clone()
    expected = reference("apply_rope_pos_ids")(qkv[:, :4], qkv[:, 4:6], pos_ids, interleave=interleave)
    flashinfer.apply_rope_pos_ids_inplace(qkv[:, :4], qkv[:, 4:6], pos_ids, interleave=interleave)
    assert_close(qkv[:, :4], expected[0])
    assert_close(qkv[:, 4:6], expected[1])
    assert torch.equal(qkv[:, 6:], before[:, 6:])


def test_one_token_is_as_in_a_batch(device):
    q, k = heads(9, 128, torch.bfloat16, device)
    pos_ids = torch.randint(0, 4096, (9,), device=device)
    together = flashinfer.apply_rope_pos_ids(q, k, pos_ids)[0]
    for i in (0, 8):
        assert torch.equal(
            flashinfer.apply_rope_pos_ids(q[i : i + 1], k[i : i + 1], pos_ids[i : i + 1])[0], together[i : i + 1]
        )


@on_any_dtype
def test_nan_and_inf_stay_in_their_pair(device, dtype):
    q, k = heads(1, 64, dtype, device)
    q[0, 0, 3] = torch.nan
    k[0, 1, 40] = torch.inf
    q_rope, k_rope = flashinfer.apply_rope_pos_ids(q, k, torch.tensor([1], device=device))
    assert q_rope.isfinite().logical_not().nonzero().tolist() == [[0, 0, 3], [0, 0, 35]]
    assert k_rope.isfinite().logical_not().nonzero().tolist() == [[0, 1, 8], [0, 1, 40]]


@settings(max_examples=60)
@given(data=st.data())
def test_any_layout(device, data):
    """Check that shape, padding, offset, order of dimensions, dtype, style and in-place do not change the values."""
    form = data.draw(st.sampled_from(FORMS), label="form")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    nnz, num_q, num_k = (data.draw(st.integers(0, 6), label=label) for label in ("nnz", "num_q", "num_k"))
    head_dim = data.draw(st.integers(1, 40).map(lambda n: 2 * n) | st.sampled_from([64, 96, 128]), label="head_dim")
    rotary_dim = data.draw(st.none() | st.integers(1, head_dim // 2).map(lambda n: 2 * n), label="rotary_dim")
    interleave = data.draw(st.booleans(), label="interleave")
    pad = data.draw(st.sampled_from([0, 1, 8, 16]), label="pad")
    offset = data.draw(st.sampled_from([0, pad]), label="offset")
    q, k = heads(nnz, head_dim, dtype, device, num_q, num_k)
    if data.draw(st.booleans(), label="transposed"):
        q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    call = {**places(form, nnz, device), "rotary_dim": rotary_dim, "interleave": interleave}
    expected = reference(form)(q, k, **call)
    q, k = view_of_wider(q, pad, offset), view_of_wider(k, pad, offset)
    if data.draw(st.booleans(), label="in place"):
        getattr(flashinfer, f"{form}_inplace")(q, k, **call)
        actual = q, k
        assert gaps_are_untouched(q) and gaps_are_untouched(k)
    else:
        actual = getattr(flashinfer, form)(q, k, **call)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
