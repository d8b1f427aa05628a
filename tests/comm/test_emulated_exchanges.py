# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels of the two-sided exchange and of vLLM's all-reduce on the CPU (tests/emulation), in random order."""

from __future__ import annotations

import random

import pytest
import torch

from flashinfer.comm import vllm_all_reduce
from flashinfer.comm.trtllm_alltoall import get_moe_commworkspace_size_per_rank

from ..emulation.build import Library, compile_emulated

INT = torch.int32


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_exchanges.cpp", tmp_path_factory)


def call(library, name, numbers):
    packed = torch.tensor(numbers, dtype=torch.int64)
    assert library.call(name, packed.data_ptr()) == 0


def exchange(library, table, counts, width, seed, blocks, present=None, timeout_ns=0):
    """Send random rows; return what arrived, what should have, and the records of the ranks."""
    world, order = len(counts), random.Random(seed)
    sources = [[[order.randrange(20) for _ in range(n)] for n in row] for row in counts]
    inputs = [torch.randint(0, 1 << 30, (20, width), dtype=INT) for _ in range(world)]
    most = max(sum(counts[r][q] for r in range(world)) for q in range(world)) + 1
    outs = [torch.full((most, width), -1, dtype=INT) for _ in range(world)]
    records = [torch.zeros(4, dtype=INT) for _ in range(world)]
    numbers = [world, world if present is None else present, blocks]
    numbers += [table.data_ptr(), table.stride(0), 4 * width, 20, most, timeout_ns]
    kept, wanted = [], []
    for r in range(world):
        received = [counts[q][r] for q in range(world)]
        places = torch.randperm(most)[: sum(received)].to(INT)
        sends = torch.tensor([i for one in sources[r] for i in one], dtype=INT)
        sums, recv_sums = (torch.tensor(one).cumsum(0).to(INT) for one in (counts[r], received))
        kept += [sums, sends, recv_sums, places]
        numbers += [inputs[r].data_ptr(), outs[r].data_ptr(), sums.data_ptr(), sends.data_ptr(), len(sends)]
        numbers += [recv_sums.data_ptr(), places.data_ptr(), len(places), records[r].data_ptr()]
        want = torch.full_like(outs[r], -1)
        rows = [inputs[q][i] for q in range(world) for i in sources[q][r]]
        for place, row in zip(places, rows, strict=True):
            want[place] = row
        wanted.append(want)
    call(library, "fifo", numbers)
    return outs, wanted, records


@pytest.mark.parametrize("world, blocks", [(2, 4), (3, 2)])
def test_rows_in_order(library, world, blocks):
    """Send more rows than the slots hold, few, and none; with fewer CTAs than peers as well."""
    table = torch.zeros(world, 8 * get_moe_commworkspace_size_per_rank(world), dtype=torch.uint8)
    for head in table:
        head[128:1152].view(INT)[:] = -1  # counters that wrap in the first calls
    wide = 128 << 8  # one row fills a slot
    for seed, (width, most) in enumerate([(wide, 7), (8, 5), (8, 0)]):
        library.seed(seed)
        counts = [[(r + q + seed) % (most + 1) if r else most for q in range(world)] for r in range(world)]
        outs, wanted, records = exchange(library, table, counts, width, seed, blocks)
        for out, want, record in zip(outs, wanted, records, strict=True):
            assert torch.equal(out, want) and record[0] == 0
        assert [head[:16].view(INT).tolist() for head in table] == [[seed + 1, 0, 0, 0]] * world


def test_a_rank_that_does_not_send(library):
    table = torch.zeros(2, 8 * get_moe_commworkspace_size_per_rank(2), dtype=torch.uint8)
    *_, records = exchange(library, table, [[0, 0], [1, 0]], 4, 0, 4, present=1, timeout_ns=1)
    assert records[0].tolist() == [1, 1, 1, 1]
    assert [head[12].item() for head in table] == [2, 2], "all ranks are told which one is late"


@pytest.mark.parametrize("world, blocks", [(2, 2), (4, 1)])
@pytest.mark.parametrize("is_two_shot", [False, True])
def test_sums_of_inputs_of_peers(library, world, blocks, is_two_shot):
    memory = [torch.zeros(512 + 4096, dtype=torch.uint8) for _ in range(world)]
    for head in memory:
        head[512:] = 255  # scratch needs no first state
    for seed, size in enumerate([2048, 8, 1000]):
        library.seed(seed)
        inputs = torch.randn(world, size).bfloat16()
        outs = [torch.full((size,), 7.0).bfloat16() for _ in range(world)]
        records = [torch.zeros(4, dtype=INT) for _ in range(world)]
        pointers = torch.tensor([x.data_ptr() for x in inputs])
        numbers = [world, world, blocks, size, int(is_two_shot), 0, pointers.data_ptr()]
        for own in zip(memory, outs, records, strict=True):
            numbers += [one.data_ptr() for one in own]
        call(library, "pull", numbers)
        want = vllm_all_reduce._trace_template.reference(inputs)
        assert all(torch.equal(out, want) for out in outs)
        assert [head[:16].view(INT).tolist() for head in memory] == [[seed + 1, 0, 0, 0]] * world


def test_a_rank_that_does_not_enter(library):
    memory = [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
    inputs, record = torch.zeros(2, 8).bfloat16(), torch.zeros(4, dtype=INT)
    pointers = torch.tensor([x.data_ptr() for x in inputs])
    numbers = [2, 1, 1, 8, 0, 1, pointers.data_ptr()]
    for head in memory:
        numbers += [head.data_ptr(), inputs[0].data_ptr(), record.data_ptr()]
    call(library, "pull", numbers)
    assert record[:3].tolist() == [1, 1, 1] and [head[12].item() for head in memory] == [2, 2]


def compare(library, heads, digests, present=None, timeout_ns=0):
    """Run a check of all ranks, and return what each leaves on the host."""
    records = [torch.zeros(4, dtype=torch.int32) for _ in heads]
    numbers = [len(heads), len(heads) if present is None else present, timeout_ns]
    for head, digest, record in zip(heads, digests, records, strict=True):
        numbers += [head.data_ptr(), digest, record.data_ptr()]
    call(library, "check", numbers)
    return [record[:3].tolist() for record in records]


@pytest.mark.parametrize("world", [2, 4])
def test_digests_of_all_ranks(library, world):
    heads = [torch.zeros(512, dtype=torch.uint8) for _ in range(world)]
    same = [7] * world
    for seed, digests in enumerate([same, [7] * (world - 1) + [9], same, [2**32 - 1] * world]):
        library.seed(seed)
        found = compare(library, heads, digests)
        if len(set(digests)) == 1:
            assert found == [[0, 0, 0]] * world
        else:  # all ranks find a difference, and none touches what the all-reduce uses
            assert found == [[2, world - 1, seed + 1]] * (world - 1) + [[2, 0, seed + 1]]
        assert all((head[:128] == 0).all() for head in heads)


def test_a_rank_that_does_not_compare(library):
    heads = [torch.zeros(512, dtype=torch.uint8) for _ in range(2)]
    assert compare(library, heads, [7, 7], present=1, timeout_ns=1) == [[1, 1, 1], [0, 0, 0]]
