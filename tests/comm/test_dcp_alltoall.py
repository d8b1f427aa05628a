# SPDX-License-Identifier: Apache-2.0
"""Exchange of partial attention between context-parallel ranks: as it is, and merged by LSE."""

from __future__ import annotations

import pytest
import torch

from flashinfer.comm import (
    CommTimeoutError,
    Mapping,
    decode_cp_a2a_allocate_mnnvl_workspace,
    decode_cp_a2a_alltoall,
    decode_cp_a2a_init_workspace,
    decode_cp_a2a_lse_reduce,
    decode_cp_a2a_lse_reduce_workspace_size,
    decode_cp_a2a_workspace_size,
)
from flashinfer.comm.mnnvl import MnnvlConfig

from .exchanges import partial_attention
from .ranks import time_limit


@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size):
    ranks(size).run(partial_attention, "cpu")


def test_sizes():
    sizes = [decode_cp_a2a_workspace_size(cp) for cp in (1, 2, 4, 8)]
    assert sizes == sorted(set(sizes)) and all(size % 1024 == 0 for size in sizes)
    size = decode_cp_a2a_lse_reduce_workspace_size
    assert size(16, 4, 2, 128, torch.float16) == 32 + 2 * 2 * 16 * 4 * (256 + 4)
    for wrong, text in [((0, 4, 2, 128), "max_tokens"), ((1, 4, 65, 128), "cp_size"), ((1, 4, 2, 4), "head_dim")]:
        with pytest.raises(ValueError, match=text):
            size(*wrong, torch.float16)
    with pytest.raises(TypeError, match="dtype must be float16 or bfloat16"):
        size(1, 1, 1, 64, torch.float32)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"partial_o": torch.zeros(3, 2, 64).half()}, "softmax_stats must have the leading dimensions"),
        ({"softmax_stats": torch.zeros(3, 1, 3)}, "must be even, at least 2, got 3"),
        ({"partial_o": torch.zeros(3, 1, 4).half()}, "rows of a multiple of 16 bytes, got 8"),
        ({"partial_o": torch.zeros(3, 1, 64)}, "partial_o must be float16 or bfloat16"),
        ({"workspace": torch.zeros(1, 4096, dtype=torch.uint8)}, "workspace must be int64"),
        ({"workspace": torch.zeros(1, 8, dtype=torch.int64)}, "partial_o must have rows that fit in the workspace"),
        ({"cp_size": 2}, "workspace must be int64 of cp_size = 2 rows"),
        ({"cp_rank": 1}, r"cp_rank must be in \[0, 1\), got 1"),
        ({"out": (torch.zeros(3, 1, 64), torch.zeros(3, 1, 2))}, r"out\[0\] must be torch.float16"),
    ],
)
def test_wrong_calls(change, text):
    table = torch.zeros(1, 4096, dtype=torch.int64)
    decode_cp_a2a_init_workspace(table, 0, 1)
    given = {"partial_o": torch.zeros(3, 1, 64).half(), "softmax_stats": torch.zeros(3, 1, 2), "workspace": table}
    given |= {"cp_rank": 0, "cp_size": 1}
    with pytest.raises((ValueError, RuntimeError), match=text):
        decode_cp_a2a_alltoall(**{**given, **change})


def test_wrong_merging_calls():
    o, lse, foreign = torch.zeros(1, 1, 64).half(), torch.zeros(1, 1), torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="lse_mode must be 'base2' or 'basee', got 'e'"):
        decode_cp_a2a_lse_reduce(o, lse, foreign, 0, 1, "e")
    with pytest.raises(ValueError, match="workspace must be made by decode_cp_a2a_lse_reduce_create_workspace"):
        decode_cp_a2a_lse_reduce(o, lse, foreign, 0, 1)


def absent(comm):
    """Let rank 1 stay away from a table that is set up as engines do, as int64."""
    rank = comm.Get_rank()
    mapping = Mapping(2, rank, 2, cp_size=2)
    table = decode_cp_a2a_allocate_mnnvl_workspace(mapping, mnnvl_config=MnnvlConfig(comm), device="cpu")
    with time_limit(0.3):
        decode_cp_a2a_init_workspace(table, rank, 2)
    comm.barrier()
    text = ""
    if rank == 0:
        try:
            decode_cp_a2a_alltoall(torch.zeros(3, 2, 64).half(), torch.zeros(3, 2, 2), table, rank, 2)
        except CommTimeoutError as error:
            text = str(error)
    comm.barrier()
    return text, [table[r].view(torch.uint8)[12].item() for r in range(2)]


def test_a_rank_that_does_not_come(ranks):
    (text, told), (_, also_told) = ranks(2).run(absent)
    assert "rank 1 must send its tokens within 0.3 s, rank 0 got nothing of call 1" in text
    assert told == also_told == [2, 2], "all ranks are told which one is late"


def different(comm):
    """Let rank 1 exchange other rows, other sizes, another dtype; nothing is written, and the next call is right."""
    rank = comm.Get_rank()
    table = decode_cp_a2a_allocate_mnnvl_workspace(
        Mapping(2, rank, 2, cp_size=2), mnnvl_config=MnnvlConfig(comm), device="cpu"
    )
    decode_cp_a2a_init_workspace(table, rank, 2)
    comm.barrier()
    texts = []
    for rows, width, dtype in ((3 + rank, 64, torch.float16), (3, 64 + 8 * rank, torch.float16), (3, 64, rank)):
        dtype = (torch.float16, torch.bfloat16)[dtype] if isinstance(dtype, int) else dtype
        o, stats = torch.ones(rows, 2, width, dtype=dtype), torch.ones(rows, 2, 2)
        out = torch.full_like(o, 7), torch.full_like(stats, 7)
        with pytest.raises(
            ValueError, match="shapes and dtypes of partial_o and its statistics must be equal"
        ) as found:
            decode_cp_a2a_alltoall(o, stats, table, rank, 2, out=out)
        assert (out[0] == 7).all() and (out[1] == 7).all()
        texts.append(str(found.value))
    o, stats = torch.full((3, 2, 64), float(rank)).half(), torch.ones(3, 2, 2)
    found, _ = decode_cp_a2a_alltoall(o, stats, table, rank, 2)
    return texts, found[0, :, 0].tolist()


def test_ranks_that_differ(ranks):
    for rank, (texts, values) in enumerate(ranks(2).run(different)):
        assert values == [0.0, 1.0]
        assert all(text.endswith(f"got others on rank {1 - rank} in call {i + 1}") for i, text in enumerate(texts))
