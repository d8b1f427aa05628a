# SPDX-License-Identifier: Apache-2.0
"""Attention of ranks that share a sequence, against attention of one process over the whole sequence."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashinfer.parallel_attention import (
    ParallelAttention,
    VarlenCPConfig,
    get_parallel_groups,
    ring_varlen_config,
    split_varlen_input,
    ulysses_varlen_config,
    uneven_cp_config,
)

from ..comm.ranks import started_ranks

CLOSE = {"rtol": 2e-3, "atol": 2e-3}


@functools.cache
def groups(ulysses: int, ring: int) -> tuple[Any, Any]:
    return get_parallel_groups(ulysses, ring, "cpu")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of ``(tokens, heads, d)`` and its base-2 LSE, in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[2] ** 0.5
    if is_causal:
        later = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
        scores = scores.masked_fill(later, -torch.inf)
    lse = torch.logsumexp(scores, -1).T / torch.log(torch.tensor(2.0, dtype=torch.float64))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), lse


def tokens(count: int, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, 64, generator=g).half() for heads in (8, 4, 4)]


def dense(comm: Any, ulysses: int, ring: int) -> None:
    rank, world = comm.Get_rank(), comm.Get_size()
    q, k, v = tokens(8 * world, 1)
    own = slice(8 * rank, 8 * rank + 8)
    made = ParallelAttention("auto", *groups(ulysses, ring))
    for is_causal in (False, True):
        want, lse = attention(q, k, v, is_causal)
        found, found_lse = made.run(q[own], k[own], v[own], "NHD", is_causal=is_causal, return_lse=True)
        torch.testing.assert_close(found.double(), want[own], **CLOSE)
        torch.testing.assert_close(found_lse.double(), lse[own], **CLOSE)
        heads_first = [x[own].transpose(0, 1).contiguous() for x in (q, k, v)]
        found = made.run(*[torch.stack([x, x]) for x in heads_first], "HND", is_causal=is_causal)
        torch.testing.assert_close(found[1].transpose(0, 1).double(), want[own], **CLOSE)
    fused = ParallelAttention("fa2", *groups(ulysses, ring), fuse_qkv=True)
    found = fused.run(q[own], q[own], q[own], "NHD")
    torch.testing.assert_close(found.double(), attention(q, q, q, False)[0][own], **CLOSE)


@pytest.mark.parametrize("ulysses, ring", [(4, 1), (1, 4), (2, 2)])
def test_dense(ulysses, ring):
    started_ranks(4).run(dense, ulysses, ring)


def uneven(comm: Any, ulysses: int, ring: int) -> None:
    """Share 27 tokens among 4 ranks of 8 rows: the last rank has 3, and padding."""
    rank, world = comm.Get_rank(), comm.Get_size()
    count, rows = 27, 8
    q, k, v = tokens(count, 2)
    mine = min(max(count - rows * rank, 0), rows)
    config = uneven_cp_config(count, rows * world, mine, *groups(ulysses, ring))
    padded = [torch.cat([x, torch.full((5, *x.shape[1:]), torch.nan).half()])[rows * rank :][:rows] for x in (q, k, v)]
    made = ParallelAttention("auto", *groups(ulysses, ring), uneven_cp_config=config)
    for is_causal in (False, True):
        want, _ = attention(q, k, v, is_causal)
        found = made.run(*padded, "NHD", is_causal=is_causal)
        assert found.shape == (rows, 8, 64)
        torch.testing.assert_close(found[:mine].double(), want[rows * rank :][:mine], **CLOSE)


@pytest.mark.parametrize("ulysses, ring", [(4, 1), (1, 4), (2, 2)])
def test_a_sequence_with_padding(ulysses, ring):
    started_ranks(4).run(uneven, ulysses, ring)


def packed(comm: Any, kind: str) -> None:
    """Share packed sequences, some shorter than there are ranks."""
    rank, world = comm.Get_rank(), comm.Get_size()
    lengths = [9, 1, 17]
    whole = tokens(sum(lengths), 3)
    if kind == "ulysses":
        config = ulysses_varlen_config(lengths, lengths)
        made = ParallelAttention("auto", *groups(4, 1), varlen_cp_config=config)
    else:
        config = ring_varlen_config(lengths, lengths, groups(1, 4)[1])
        made = ParallelAttention("auto", *groups(1, 4), varlen_cp_config=config)
    own = [split_varlen_input(x, lengths, world, rank, "NHD") for x in whole]
    for is_causal in (False, True):
        each = zip(*(x.split(lengths) for x in whole), strict=True)
        want = torch.cat([attention(*one, is_causal)[0] for one in each])
        found = made.run(*own, "NHD", is_causal=is_causal)
        torch.testing.assert_close(found.double(), split_varlen_input(want, lengths, world, rank, "NHD"), **CLOSE)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_packed_sequences(kind):
    started_ranks(4).run(packed, kind)


def test_wrong_calls():
    x = torch.zeros(2, 4, 64).half()
    with pytest.raises(ValueError, match="attn_type must be one of auto, fa2, fa3"):
        ParallelAttention("cudnn", None, None)
    with pytest.raises(ValueError, match="uneven_cp_config must be None with varlen_cp_config"):
        ParallelAttention("auto", None, None, uneven_cp_config(2, 2, 2), VarlenCPConfig())
    made = ParallelAttention("auto", None, None)
    with pytest.raises(ValueError, match="tensor_layout must be 'HND' or 'NHD', got 'BHD'"):
        made.run(x, x, x, "BHD")
    with pytest.raises(ValueError, match="attn_mask must be None"):
        made.run(x, x, x, "HND", attn_mask=x)
    with pytest.raises(ValueError, match="must have 3 or 4 dimensions"):
        made.run(x[0], x, x, "HND")
    with pytest.raises(ValueError, match=r"seq_len_padded must be a multiple of 1 ranks .*, got 2"):
        uneven_cp_config(3, 2, 1)
    with pytest.raises(ValueError, match="seq_len_cur_rank must be from 0 to the 4 rows of a rank, got 5"):
        uneven_cp_config(3, 4, 5)
    with pytest.raises(ValueError, match="seq_len_list must add up to 4 tokens, got 3"):
        split_varlen_input(x, [1, 2], 2, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        split_varlen_input(x, [1, 3], 2, 2)


def groups_of_another_size(comm: Any) -> str:
    try:
        get_parallel_groups(2, 2, "cpu")
    except ValueError as error:
        return str(error)
    return str(dist.get_world_size())


def test_groups_of_another_size():
    text = "get_parallel_groups: ulysses_size * ring_size must be the 2 ranks of the default group, got 2 * 2"
    assert started_ranks(2).run(groups_of_another_size) == [text] * 2
