# SPDX-License-Identifier: Apache-2.0
"""The one-shot kernel on the CPU (tests/emulation), with ranks that are blocks of one cluster, in random order."""

from __future__ import annotations

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .calls import check, check_fp4, digest, expected, fp4_scales, inputs, outputs

HEAD_BYTES, GENERATIONS, SENTINEL = 512, 3, -(2**31)
NAMES = ("input", "output", "residual_in", "residual_out", "rms_gamma", "norm_out", "quant_out", "scale_out", "record")
NAMES += ("fp4_out", "fp4_scales")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_allreduce.cpp", tmp_path_factory)


class Group:
    """Memory of the ranks, and calls of all of them."""

    def __init__(self, library: Library, world: int, elements: int, dtype: torch.dtype) -> None:
        self.library, self.world, self.dtype = library, world, dtype
        self.slot_bytes = elements * dtype.itemsize
        words = (HEAD_BYTES + GENERATIONS * world * self.slot_bytes) // 4
        self.memory = [torch.full((words,), SENTINEL, dtype=torch.int32) for _ in range(world)]
        for memory in self.memory:
            memory[: HEAD_BYTES // 4] = 0
        self.records = [torch.zeros(4, dtype=torch.int32) for _ in range(world)]

    def call(self, pattern, tokens, hidden, seed, blocks=1, present=None, timeout_ns=0, value=None, layout=None):
        given = [inputs(rank, tokens, hidden, self.dtype, "cpu", seed) for rank in range(self.world)]
        if value is not None:
            for x, _, _ in given:
                x[:, 0::2], x[:, 1::2] = 0, value
        made = [outputs(pattern, x) for x, _, _ in given]
        if layout is not None:
            for one in made:
                one["fp4_out"] = torch.full((tokens, hidden // 2), 7, dtype=torch.uint8)
                one["fp4_scales"] = torch.full_like(fp4_scales(tokens, hidden, layout), 7)
        each = list(blocks) if isinstance(blocks, tuple) else [blocks] * self.world
        numbers = [self.world, self.world if present is None else present, *each]
        numbers += [
            self.slot_bytes,
            tokens,
            hidden,
            timeout_ns,
            layout or 0,
            *(memory.data_ptr() for memory in self.memory),
        ]
        for rank in range(self.world):
            x, residual, gamma = given[rank]
            tensors = {"input": x, "record": self.records[rank], **made[rank]}
            if pattern:
                tensors |= {"residual_in": residual, "rms_gamma": gamma}
            numbers += [tensors[name].data_ptr() if name in tensors else 0 for name in NAMES]
        packed = torch.tensor(numbers, dtype=torch.int64)
        kind = 0 if self.dtype is torch.float32 else 1
        assert self.library.call("all_reduce", kind, packed.data_ptr()) == 0
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world, blocks", [(2, 1), (4, 2), (2, 3)])
def test_calls_of_changing_size(library, world, blocks, dtype):
    """Check sums, norms and sentinels over more calls than there are generations, smaller and larger in turn."""
    group = Group(library, world, 7 * 264, dtype)
    for seed, (pattern, tokens, hidden) in enumerate(
        [(0, 1, 8), (1, 7, 264), (10, 2, 264), (0, 7, 264), (4, 1, 40), (11, 3, 16), (0, 2, 8), (2, 5, 264)]
    ):
        library.seed(seed)
        made = group.call(pattern, tokens, hidden, seed, blocks)
        options = {"rms_eps": 1e-5, "weight_bias": 1.0, "scale_factor": 0.5}
        for found in made:
            check(found, expected(world, pattern, (tokens, hidden), dtype, seed, **options), dtype)
        assert len({digest(found) for found in made}) == 1
        heads = {tuple(memory[:7].tolist()) for memory in group.memory}
        (head,) = heads
        assert head[:4] == (seed + 1, (seed + 1) % GENERATIONS, 0, 0)
        assert head[4 + seed % GENERATIONS] == tokens * hidden * dtype.itemsize // 16
        slots = [memory[HEAD_BYTES // 4 :].view(GENERATIONS, -1) for memory in group.memory]
        for other in ((seed + 1) % GENERATIONS, (seed + 2) % GENERATIONS):
            assert all((one[other] == SENTINEL).all() for one in slots), "two generations hold sentinels only"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_negative_zeros_arrive(library, dtype):
    """The bits of -0.0, alone or in the upper half of a word, mean that nothing has arrived: 0.0 is sent."""
    group = Group(library, 2, 64, dtype)
    for found in group.call(0, 1, 64, 0, timeout_ns=1000, value=-0.0):
        assert (found["output"] == 0).all()
    assert all(record[0] == 0 for record in group.records), "no rank has waited in vain"


def test_a_rank_that_does_not_come(library):
    group = Group(library, 2, 64, torch.float32)
    group.call(0, 1, 64, 0, present=1, timeout_ns=1)
    assert group.records[0].tolist() == [1, 1, 1, 0]
    assert [memory[3].item() for memory in group.memory] == [2, 2], "all ranks are told which one is late"


def test_ranks_with_other_grids(library):
    """Finish with one CTA on a rank and three on another: a flag counts data, not CTAs."""
    group = Group(library, 3, 7 * 264, torch.float32)
    for seed, (tokens, hidden) in enumerate([(7, 264), (2, 8), (5, 64), (7, 264)]):
        library.seed(seed)
        made = group.call(1, tokens, hidden, seed, blocks=(1, 3, 2), timeout_ns=0)
        options = {"rms_eps": 1e-5, "weight_bias": 1.0}
        for found in made:
            check(found, expected(3, 1, (tokens, hidden), torch.float32, seed, **options), torch.float32)


@pytest.mark.parametrize("layout", [0, 1, 2])
def test_fp4(library, layout):
    """Compare codes and scales with those of the norm that the kernel wrote: bit for bit."""
    group = Group(library, 2, 9 * 208, torch.bfloat16)
    for found in group.call(5, 9, 208, 3, blocks=2, layout=layout):
        check_fp4(found["norm_out"], found["fp4_out"], found["fp4_scales"], 0.5, layout)
