# SPDX-License-Identifier: Apache-2.0
"""The one-sided exchange of tokens: ranks as processes over shared memory, and as threads of one process."""

from __future__ import annotations

import time

import pytest
import torch

from flashinfer.comm import (
    CommTimeoutError,
    moe_a2a_active_rank_mask,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
)
from flashinfer.comm import trtllm_moe_alltoall as module
from flashinfer.comm.local_ranks import call_on_ranks

from .exchanges import (
    EXPERTS,
    HIDDEN,
    MOST,
    TOP_K,
    check_combined,
    exchange,
    make_exchange,
    results_of,
    run_cases,
    tokens_of,
)
from .ranks import LIMIT_S, time_limit


@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size):
    outcomes = ranks(size).run(run_cases, "cpu")
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("size", [1, 3])
def test_threads(size):
    call_on_ranks(size, lambda comm: run_cases(comm, "cpu"))


def raises(comm, change):
    """Return the texts of errors of this rank."""
    with time_limit(0.4 if change == "absent" else LIMIT_S):
        alltoall = make_exchange(comm, MOST, TOP_K, EXPERTS, HIDDEN, "cpu")
    rank, texts = comm.Get_rank(), []
    own = tokens_of(rank, 3, EXPERTS, TOP_K, HIDDEN, "random", "cpu")
    exchange(alltoall, own, 8)
    comm.barrier()
    start = time.monotonic()
    if change == "absent" and rank == 1:
        comm.barrier()
    else:
        rows = 9 if change == "rows" and rank == 1 else 8
        payloads = list(own) if change != "payloads" or rank != 1 else [own.x, own.ids]
        for _ in range(2 if change == "absent" else 1):
            try:
                alltoall.dispatch(own.ids, payloads, rows)
            except (ValueError, CommTimeoutError) as error:
                texts.append(str(error))
        if change == "absent":
            comm.barrier()
    took = time.monotonic() - start
    if change != "absent":
        _, found = exchange(alltoall, own, 8)  # the exchange works again
        check_combined(own, found, EXPERTS, comm.Get_size())
    comm.barrier()
    alltoall.destroy()
    return took, texts


@pytest.mark.parametrize("change", ["rows", "payloads"])
def test_ranks_that_disagree(ranks, change):
    for took, texts in ranks(2).run(raises, change):
        assert took < 10 and len(texts) == 1
        assert "runtime_max_tokens_per_rank, top_k, num_experts and payloads must be equal on all ranks" in texts[0]


def test_a_rank_that_does_not_come(ranks):
    outcomes = ranks(4).run(raises, "absent")
    for rank, (took, texts) in enumerate(outcomes):
        if rank != 1:
            assert took < 10 and len(texts) == 2 and texts[0] == texts[1]
            assert "rank 1 must send its tokens within 0.4 s" in texts[0]


def masked(comm):
    """Leave out rank 1: nobody waits for it, and what would go to it counts as zero."""
    rank, world = comm.Get_rank(), comm.Get_size()
    alltoall = make_exchange(comm, MOST, TOP_K, 8, HIDDEN, "cpu", enable_rank_mask=True, eplb_stats_num_experts=8)
    mask = moe_a2a_active_rank_mask([r for r in range(world) if r != 1], world)
    if rank != 1:
        own = tokens_of(rank, 5, 8, TOP_K, HIDDEN, "random", "cpu")
        views = alltoall.dispatch(
            own.ids, [own.x], 8, eplb_local_stats=torch.full((8,), rank, dtype=torch.int32), active_rank_mask=mask
        )
        assert alltoall.eplb_gathered_stats[:, 0].tolist() == [0, 0, 2, 3]
        found = alltoall.combine(torch.ones_like(views[0]), 8, active_rank_mask=mask)
        owners = own.ids // 2
        wanted = sum((owners == r).any(-1).float() for r in range(world) if r != 1)
        assert torch.equal(found[:, 0].float(), wanted)
        with pytest.raises(ValueError, match="active_rank_mask must be given with enable_rank_mask"):
            alltoall.dispatch(own.ids, [own.x], 8)
    comm.barrier()
    alltoall.destroy()


def test_ranks_that_take_no_part(ranks):
    ranks(4).run(masked)


def workspace(ranks=1, tokens=8, nbytes=4096):
    size = moe_a2a_get_workspace_size_per_rank(ranks, tokens, nbytes, nbytes)
    table = torch.zeros(ranks, size, dtype=torch.uint8)
    return table, moe_a2a_initialize(table, 0, ranks, tokens)


def test_sizes_and_offsets():
    aux = module.get_moe_alltoall_module("cpu").moe_a2a_get_aux_data_size(4, 16)
    assert moe_a2a_get_workspace_size_per_rank(4, 16, 0, 0) == aux and aux % 128 == 0
    assert moe_a2a_get_workspace_size_per_rank(4, 16, 7, 2) == aux + 512 + 128
    names, indices = module.moe_a2a_get_metainfo_index_pairs()
    assert "MOE_A2A_PAYLOAD_DATA_OFFSET_INDEX" in names and indices == list(range(10))
    _, meta = workspace(2)
    assert meta[9] == module.get_moe_alltoall_module("cpu").moe_a2a_get_aux_data_size(2, 8)


def test_one_rank_is_a_copy_and_views_are_kept():
    table, meta = workspace()
    x, ids = torch.randn(5, 16).to(torch.float16), torch.zeros(5, 2, dtype=torch.int32)
    cache = {}
    sizes = (8, 0, 1, 2, 4)
    (first,), offset, gathered = moe_a2a_dispatch(ids, [x], table, meta, *sizes, recv_view_cache=cache)
    out = torch.full_like(x, 7)
    assert moe_a2a_combine(first, 5, table, meta, 8, 0, 1, 2, offset, output=out) is out
    assert torch.equal(out, x) and gathered is None
    (second,), *_ = moe_a2a_dispatch(ids, [x], table, meta, *sizes, recv_view_cache=cache)
    assert second is first
    moe_a2a_combine(first, 5, table, meta, 8, 0, 1, 2, offset)
    other, meta = workspace()
    (third,), *_ = moe_a2a_dispatch(ids, [x], other, meta, *sizes, recv_view_cache=cache)
    assert third is not first and len(cache) == 2


def test_payloads_that_grow_are_refused():
    table, meta = workspace()
    for x, is_right in ((X, True), (X[:, :8].contiguous(), True), (torch.randn(5, 17), False)):
        if is_right:
            (got,), offset, _ = moe_a2a_dispatch(IDS, [x], table, meta, 8, 0, 1, 2, 4)
            assert torch.equal(moe_a2a_combine(got, 5, table, meta, 8, 0, 1, 2, offset), x)
        else:
            with pytest.raises(ValueError, match="must have at most 64 bytes per token"):
                moe_a2a_dispatch(IDS, [x], table, meta, 8, 0, 1, 2, 4)


def rows_that_change(comm):
    """Exchange with few rows and many in turn, one rank late: results of a call outlive the tokens of the next one."""
    rank, world = comm.Get_rank(), comm.Get_size()
    alltoall = make_exchange(comm, 64, TOP_K, EXPERTS, HIDDEN, "cpu")
    sent = [tokens_of(rank, rows, EXPERTS, TOP_K, HIDDEN, "random", "cpu") for rows in (4, 64)]
    for repeat in range(40):
        own = sent[repeat % 2]
        rows = len(own.x)
        views = alltoall.dispatch(own.ids, list(own), rows)
        results = results_of(rank, views[0])
        if rank == world - 1:
            time.sleep(0.001)
        check_combined(own, alltoall.combine(results, rows), EXPERTS, world)
    comm.barrier()
    alltoall.destroy()


def test_rows_that_change_from_call_to_call(ranks):
    ranks(4).run(rows_that_change)


X, IDS = torch.randn(5, 16), torch.zeros(5, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"backend": "cake"}, "requires compute capability 10.0 or 10.3"),
        ({"backend": "nccl"}, "Unknown MoE all-to-all backend"),
        ({"input_payloads": []}, "input_payloads must be 1 to 6 tensors, got 0"),
        ({"input_payloads": [X] * 7}, "input_payloads must be 1 to 6 tensors, got 7"),
        ({"input_payloads": [X[:4]]}, r"input_payloads\[0\].shape\[0\] must be 5"),
        ({"input_payloads": [torch.randn(5, 9000)]}, "input_payloads must fit in the workspace"),
        ({"runtime_max_tokens_per_rank": 9}, "runtime_max_tokens_per_rank must be from 1 to the max_num_tokens"),
        ({"runtime_max_tokens_per_rank": 0}, "runtime_max_tokens_per_rank must be positive, got 0"),
        ({"runtime_max_tokens_per_rank": 4}, "must have at most runtime_max_tokens_per_rank rows, 4, got 5"),
        ({"top_k": 3}, r"token_selected_experts must be \(tokens, top_k = 3\)"),
        ({"token_selected_experts": IDS.long()}, "token_selected_experts must be int32, got int64"),
        ({"ep_size": 2}, "workspace must have ep_size = 2 rows"),
        ({"ep_rank": 1}, r"ep_rank must be in \[0, 1\), got 1"),
        ({"num_experts": 0}, "num_experts must be at least ep_size 1, got 0"),
        ({"enable_rank_mask": True}, "active_rank_mask must be given with enable_rank_mask"),
        (
            {"active_rank_mask": moe_a2a_active_rank_mask([0], 1)},
            "active_rank_mask must be None without enable_rank_mask",
        ),
    ],
)
def test_wrong_dispatches(change, text):
    table, meta = workspace()
    given = {"token_selected_experts": IDS, "input_payloads": [X], "workspace": table, "metainfo": meta, "top_k": 2}
    given |= {"runtime_max_tokens_per_rank": 8, "ep_rank": 0, "ep_size": 1, "num_experts": 4}
    with pytest.raises(ValueError, match=text):
        moe_a2a_dispatch(**{**given, **change})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"output": torch.empty(16, 5).T}, "output must be contiguous"),
        ({"output": torch.empty(5, 8)}, r"output must be \(5, 16\)"),
        ({"output_dtype": torch.uint8}, "need compute capability 10.0"),
        ({"use_low_precision": True}, "payload must be bfloat16 with use_low_precision"),
        ({"payload_in_workspace": True}, "payload must be at combine_payload_offset"),
        ({"payload": torch.zeros(1, 7, 16)}, "payload must be"),
        ({"payload": torch.zeros(1, 8, 17)}, "payload must have rows of a multiple of 16 bytes"),
        ({"combine_payload_offset": 1 << 20}, "payload must fit in the workspace"),
    ],
)
def test_wrong_combines(change, text):
    table, meta = workspace()
    _, offset, _ = moe_a2a_dispatch(IDS, [X], table, meta, 8, 0, 1, 2, 4)
    given = {"payload": torch.zeros(1, 8, 16), "local_num_tokens": 5, "workspace": table, "metainfo": meta, "top_k": 2}
    given |= {"runtime_max_tokens_per_rank": 8, "ep_rank": 0, "ep_size": 1, "combine_payload_offset": offset}
    with pytest.raises(ValueError, match=text):
        moe_a2a_combine(**{**given, **change})


def test_calls_out_of_order():
    def work(comm):
        alltoall = make_exchange(comm, 8, 2, 4, 16, "cpu")
        with pytest.raises(AssertionError, match="dispatch must be called first"):
            alltoall.combine(torch.zeros(1, 8, 16), 8)
        with pytest.raises(RuntimeError, match="dispatch must be called first"):
            alltoall.get_combine_payload_tensor_in_workspace(8, 16, torch.float32)
        with pytest.raises(AssertionError, match="at most max_num_tokens = 8, got 9"):
            alltoall.dispatch(IDS, [X], 9)
        alltoall.dispatch(IDS, [X], 8)
        with pytest.raises(AssertionError, match="got dispatch twice"):
            alltoall.dispatch(IDS, [X], 8)
        with pytest.raises(RuntimeError, match="combine must be called first"):
            alltoall.checkpoint_prepare()
        alltoall.destroy()
        with pytest.raises(RuntimeError, match="MNNVL handles are unmapped"):
            alltoall.combine(torch.zeros(1, 8, 16), 8)

    call_on_ranks(1, work)


def shared(comm):
    """Objects of one size share a table; sizes that differ are other tables."""
    one, two = (make_exchange(comm, 8, 2, 4, 16, "cpu") for _ in range(2))
    other = make_exchange(comm, 8, 2, 4, 32, "cpu")
    comm.barrier()
    same = one.workspace.data_ptr() == two.workspace.data_ptr() != other.workspace.data_ptr()
    for alltoall in (one, other):
        alltoall.destroy()
    return same


def test_tables_are_shared(ranks):
    assert ranks(2).run(shared) == [True, True]
