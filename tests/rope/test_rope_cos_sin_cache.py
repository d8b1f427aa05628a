# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by a table of cosines and sines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.rope import (
    apply_rope_pos_ids,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from flashinfer.testing import assert_close
from flashinfer.trace.templates.rope import apply_rope_with_cos_sin_cache_trace

from ..tensors import randn
from .inputs import DTYPES, table

reference = apply_rope_with_cos_sin_cache_trace.reference
on_any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(positions, query, key, head_size, cache, is_neox):
    expected = reference(positions, query, key, head_size, cache, is_neox)
    actual = apply_rope_with_cos_sin_cache(positions, query, key, head_size, cache, is_neox)
    for one, other, like in zip(actual, expected, (query, key), strict=True):
        assert one.shape == like.shape
        assert_close(one, other)
    assert apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cache, is_neox) is None
    assert_close(query, expected[0])
    assert_close(key, expected[1])


@on_any_dtype
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    "head_size, rotary_dim",
    [(64, 64), (64, 32), (80, 80), (112, 64), (160, 128), (192, 128), (256, 128), (72, 40), (9, 6)],
)
def test_rope(device, head_size, rotary_dim, is_neox, dtype):
    query, key = (randn(7, heads * head_size, dtype=dtype, device=device) for heads in (8, 2))
    positions = torch.randint(0, 128, (7,), device=device)
    check(positions, query, key, head_size, table(rotary_dim, 128, device), is_neox)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nnz", [0, 1, 33])
def test_positions(device, nnz, dtype):
    query, key = (randn(nnz, heads * 64, dtype=torch.bfloat16, device=device) for heads in (4, 1))
    check(torch.arange(nnz, dtype=dtype, device=device), query, key, 64, table(64, 40, device), True)


@pytest.mark.parametrize("is_neox", [True, False])
def test_many_tokens(device, is_neox):
    """Check enough tokens for two items per thread of the CUDA kernel; the last columns of a head are copied."""
    query, key = (randn(1100, heads * 160, dtype=torch.bfloat16, device=device) for heads in (24, 3))
    check(torch.arange(1100, device=device), query, key, 160, table(128, 1100, device), is_neox)


@pytest.mark.parametrize("shape", [(6, 4, 64), (2, 3, 256), (2, 3, 4, 64)], ids=str)
def test_shapes_that_are_rows_of_heads(device, shape):
    query, key = randn(*shape, dtype=torch.float32, device=device), randn(6, 64, dtype=torch.float32, device=device)
    check(torch.arange(6, device=device), query, key, 64, table(64, 8, device), True)


def test_slices_of_a_packed_projection(device):
    qkv = randn(5, 8 * 64, dtype=torch.bfloat16, device=device)
    before = qkv.clone()
    check(torch.arange(5, device=device), qkv[:, : 4 * 64], qkv[:, 4 * 64 : 6 * 64], 64, table(32, 8, device), True)
    assert torch.equal(qkv[:, 6 * 64 :], before[:, 6 * 64 :])


@pytest.mark.parametrize("is_neox", [True, False])
def test_agrees_with_frequencies(device, is_neox):
    q, k = (randn(9, heads, 128, dtype=torch.float32, device=device) for heads in (4, 2))
    positions = torch.randint(0, 4096, (9,), device=device)
    by_table = apply_rope_with_cos_sin_cache(positions, q, k, 128, table(128, 4096, device), is_neox)
    by_frequency = apply_rope_pos_ids(q, k, positions, interleave=not is_neox)
    for one, other in zip(by_table, by_frequency, strict=True):
        assert_close(one, other)


def test_rows_of_a_wider_table(device):
    query, key = (randn(5, 128, dtype=torch.float32, device=device) for _ in range(2))
    wide = torch.cat([table(64, 8, device), torch.full((8, 3), 7.0, device=device)], dim=-1)
    check(torch.arange(5, device=device), query, key, 64, wide[:, :64], True)


def test_last_row_of_the_table(device):
    query, key = (randn(1, 64, dtype=torch.float32, device=device) for _ in range(2))
    check(torch.tensor([7], device=device), query, key, 64, table(64, 8, device), True)


@pytest.mark.parametrize("position", [-1, 8])
def test_position_outside_of_the_table(device, position):
    """Check positions outside of the table: a CPU kernel rejects them; a GPU kernel stays inside the table."""
    query, key = (randn(2, 64, dtype=torch.float32, device=device) for _ in range(2))
    positions = torch.tensor([0, position], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=f"the position of token 1 must be 0 to 7.*, got {position}"):
            apply_rope_with_cos_sin_cache(positions, query, key, 64, table(64, 8, device))
    else:
        nearest = positions.clamp(0, 7)
        expected = reference(nearest, query, key, 64, table(64, 8, device))
        assert_close(apply_rope_with_cos_sin_cache(positions, query, key, 64, table(64, 8, device))[0], expected[0])


@settings(max_examples=40)
@given(data=st.data())
def test_any_shape(device, data):
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    nnz, num_q, num_k = (data.draw(st.integers(0, 5), label=label) for label in ("nnz", "num_q", "num_k"))
    head_size = data.draw(st.integers(2, 140), label="head_size")
    rotary_dim = 2 * data.draw(st.integers(1, head_size // 2), label="pairs")
    pad = data.draw(st.sampled_from([0, 1, 8]), label="pad")
    query, key = (
        randn(nnz, heads * head_size + pad, dtype=dtype, device=device)[:, : heads * head_size]
        for heads in (num_q, num_k)
    )
    positions = torch.randint(0, 16, (nnz,), device=device)
    check(positions, query, key, head_size, table(rotary_dim, 16, device), data.draw(st.booleans(), label="is_neox"))
