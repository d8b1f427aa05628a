# SPDX-License-Identifier: Apache-2.0
"""Index scores on the CPU (tests/emulation): shapes, pages, shares of blocks, stale schedules, orders; ragged keys."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashinfer.trace.templates.indexer import compute_paged_mqa_logits_schedule_trace

from ..emulation.build import Library, compile_emulated
from . import ragged
from .paged import check, make

TENSORS = ("q", "kv_fused", "weights", "block_tables", "seq_lens", "schedule", "out")
SIZES = ("batch", "next_n", "heads", "dim", "block_size", "pages", "page_stride", "width", "columns", "blocks")


RAGGED = ("q", "k", "k_scales", "weights", "k_starts", "k_ends", "out")
RAGGED_SIZES = ("tokens", "heads", "dim", "keys", "columns")


class RaggedCall(ctypes.Structure):
    """Struct of emulated_mqa_logits.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in RAGGED), *((name, ctypes.c_int64) for name in RAGGED_SIZES)]


class Call(ctypes.Structure):
    """Struct of emulated_mqa_logits.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in TENSORS), *((name, ctypes.c_int64) for name in SIZES)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_mqa_logits.cpp", tmp_path_factory)


def run(
    library: Library, made: dict, blocks: int, schedule: torch.Tensor | None = None, entry: str = "scores"
) -> torch.Tensor:
    """Compute the schedule, unless it is given, and the scores; rows without keys stay infinite."""
    batch, next_n, heads, dim = made["q"].shape
    pages, block_size = made["kv_fused"].shape[:2]
    columns = -(-made["max_seq_len"] // 256) * 256
    out = torch.full((batch * next_n, columns), torch.inf)
    rows = torch.full((blocks + 1, 2), -9, dtype=torch.int32) if schedule is None else schedule
    tensors = [*(made[name] for name in TENSORS[:5]), rows, out]
    page_stride, width = made["kv_fused"].stride(0), made["block_tables"].shape[1]
    sizes = (batch, next_n, heads, dim, block_size, pages, page_stride, width, columns, blocks)
    call = Call(*(x.data_ptr() for x in tensors), *sizes)
    if schedule is None:
        assert library.call("schedule", ctypes.byref(call)) == 0
        expected = compute_paged_mqa_logits_schedule_trace.reference(made["seq_lens"], out=rows)
        assert torch.equal(rows, expected)
    assert library.call(entry, ctypes.byref(call)) == 0
    return out[:, : made["max_seq_len"]]


@pytest.mark.parametrize(
    "heads, dim, next_n, block_size",
    [(64, 128, 1, 64), (64, 128, 1, 32), (64, 128, 2, 128), (8, 256, 2, 32), (12, 128, 2, 64)],
)
def test_shapes(library, heads, dim, next_n, block_size):
    """Pages in parts of a tile and of several tiles; one and two products a tile; slots within eight columns."""
    made = make("cpu", [150, 0, 300], num_heads=heads, head_dim=dim, next_n=next_n, block_size=block_size)
    scored = run(library, made, 2)
    check(made, scored)
    assert bool(scored[next_n : 2 * next_n].isinf().all())


@pytest.mark.parametrize("blocks", [1, 3])
def test_shares(library, blocks):
    """Requests that go on in the next block, several of a block, more pages than a warp holds, empty ones."""
    made = make("cpu", [1300, 0, 20, *[0] * 150, 300], num_heads=8, head_dim=256, next_n=2, block_size=32)
    check(made, run(library, made, blocks))


@pytest.mark.parametrize("lengths", [[0, 0], [100000, 5], [1, 100000]])
def test_stale_schedule(library, lengths):
    """A schedule of other lengths neither hangs nor reaches outside (memory beside is checked by the emulator)."""
    made = make("cpu", [300, 70], num_heads=12, next_n=2)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    run(library, made, 2, compute_paged_mqa_logits_schedule_trace.reference(lengths, out=torch.empty(3, 2)))


def test_orders(library):
    """The result depends on no order of threads and copies."""
    made = make("cpu", [700, 65, 1], num_heads=8, head_dim=256, next_n=2, block_size=32)
    for seed in range(3):
        library.seed(seed)
        check(made, run(library, made, 2))


@pytest.mark.parametrize("heads, dim, next_n", [(64, 128, 1), (12, 96, 2)])
def test_kernel_of_all_gpus(library, heads, dim, next_n):
    made = make("cpu", [150, 0, 20], num_heads=heads, head_dim=dim, next_n=next_n, block_size=32)
    check(made, run(library, made, 1, entry="portable_scores"))


@pytest.mark.parametrize("heads, dim", [(64, 128), (12, 96)])
def test_ragged_keys(library, heads, dim):
    """Ranges that leave the keys are cut; blocks of keys that no token sees are left out."""
    made = ragged.make("cpu", [0] * 9 + [61, 100, 40], [*range(53, 62), 143, 150, 30], heads=heads, dim=dim)
    out = torch.full((12, 160), torch.inf)
    outside = {"k_starts": made["k_starts"].clone(), "k_ends": made["k_ends"].clone(), "out": out}
    outside["k_starts"][0], outside["k_ends"][10] = -7, 1 << 30
    pointers = [{**made, **outside}[name].data_ptr() for name in RAGGED]
    assert library.call("ragged_scores", ctypes.byref(RaggedCall(*pointers, 12, heads, dim, 150, 160))) == 0
    ragged.check(made, out[:, :150])
    assert torch.equal(out[:, :150] == torch.inf, ~ragged.seen_of(made)) and bool(out[:, 150:].isinf().all())
