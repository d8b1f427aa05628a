# SPDX-License-Identifier: Apache-2.0
"""The work planner: it covers every key of every tile once, balances work, stays in its buffers, keeps its layout in
graphs.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.jit import gen_jit_spec

from .inputs import int32, offsets

KV_UNIT = 64
FILLER = 0x55  # bytes that no plan has written
ITEM = np.dtype(
    [("request", "<i4"), ("kv_head", "<i2"), ("is_first", "<i2")]
    + [
        (name, "<i4")
        for name in [
            "qo_begin",
            "qo_len",
            "kv_begin",
            "kv_len",
            "row_begin",
            "kv_start",
            "kv_end",
            "slot",
            "merge",
            "next",
        ]
    ]
)
MERGE = np.dtype(
    [(name, "<i4") for name in ["kv_head", "qo_begin", "qo_len", "row_begin", "first_slot", "count", "step", "unused"]]
)
INFO = [
    "int_bytes",
    "float_bytes",
    "has_shares",
    "tile",
    "keys",
    "decode_items",
    "decode_tickets",
    "decode_merges",
    "decode_blocks",
    "decode_merge_blocks",
    "prefill_items",
    "prefill_merges",
    "prefill_blocks",
    "prefill_merge_blocks",
    "prefill_partial",
]


@functools.cache
def module() -> Any:
    source = Path(__file__).parent / "planner_module.cu"
    return gen_jit_spec("test_attention_planner_cpu", [source], backend="cpu").build_and_load()


@functools.cache
def _filled() -> torch.Tensor:
    """Return a buffer that each plan without a place leaves filled: to fill 64 MiB takes longer than to plan."""
    return torch.full((64 << 20,), FILLER, dtype=torch.uint8)


@dataclass(frozen=True)
class Case:
    """Input of the planner. ``kv_lens`` is known to the planner unless ``hides_lens``."""

    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_size: int = 1
    heads: tuple[int, int] = (8, 2)
    causal: bool = False
    window_left: int = -1
    fixed_split: int = -1
    disable_split: bool = False
    graph: bool = False
    max_rows: Optional[int] = None
    hides_lens: bool = False
    decode_blocks: int = 132
    takes_shares: bool = True
    prefill_tiles: tuple[int, int] = (64, 128)
    prefill_blocks: tuple[int, int] = (264, 132)
    takes_items: bool = False
    head_dim: int = 128

    @property
    def group(self) -> int:
        return self.heads[0] // self.heads[1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        pages = [-(-n // self.page_size) for n in self.kv_lens]
        rows = sum(self.qo_lens) if self.max_rows is None else self.max_rows
        numbers = (0, 0, self.page_size, *self.heads, self.head_dim, self.causal, self.window_left, self.fixed_split)
        numbers += (self.disable_split, self.graph, rows, 16, self.decode_blocks, self.takes_shares)
        numbers += (*self.prefill_tiles, *self.prefill_blocks, self.takes_items)
        lens = None if self.hides_lens else int32(self.kv_lens, "cpu")
        return int32(offsets(self.qo_lens), "cpu"), int32(offsets(pages), "cpu"), lens, [int(n) for n in numbers]


@dataclass
class Work:
    """One work list of a plan, read back."""

    tile: int
    items: np.ndarray
    merges: np.ndarray
    indptr: Optional[np.ndarray]
    blocks: int
    merge_blocks: int
    slots: int


@dataclass
class Plan:
    case: Case
    place: tuple[int, int] = (0, 0)  #: offset and bytes of the item buffer; 0 bytes: items are built elsewhere
    info: dict[str, int] = field(init=False)
    decode: Work = field(init=False)
    prefill: Work = field(init=False)

    def __post_init__(self) -> None:
        buffer = _filled() if self.place == (0, 0) else torch.full((64 << 20,), FILLER, dtype=torch.uint8)
        self.info = dict(zip(INFO, module().plan(*self.case.arguments, buffer, *self.place), strict=True))
        written = buffer.numpy()[: self.info["int_bytes"]]
        self.raw = written.copy()
        written.fill(FILLER)
        shares = self.info["has_shares"]  # three packed numbers
        self.info |= {"has_shares": shares & 0xFFFF, "qo_len": shares >> 16 & 0xFFFF, "chunk_size": shares >> 32}
        counts = self.raw[:16].view("<i4")
        info = self.info
        bounds = (info["decode_tickets"], info["prefill_items"], info["prefill_merges"])
        items = (bounds[0] - info["decode_items"]) // ITEM.itemsize if info["has_shares"] else counts[0]
        self.decode = self._work("decode", 16, items, counts[1], (bounds[0], bounds[1]))
        self.prefill = self._work("prefill", info["tile"], counts[2], counts[3], (bounds[2], info["int_bytes"]))
        assert not self.raw[info["decode_tickets"] : info["decode_merges"]].any()
        if info["has_shares"]:
            ranges, rest = divmod(counts[0], self.case.heads[1])
            assert rest == 0
            self.decode.items, self.decode.indptr = self._ranges(self.decode.items, ranges)

    def _ranges(self, items: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the items in the order in which a block follows each linked list, and the offset of each list."""
        order, indptr = [], [0]
        blocks = -(-self.info["decode_blocks"] // self.case.heads[1])
        assert blocks <= len(items) and (items["request"][count:blocks] < 0).all()  # blocks without work
        for begin in range(count):
            at = begin
            while at >= 0:
                order.append(at)
                at = int(items["next"][at])
            indptr.append(len(order))
        assert len(set(order)) == len(order)
        return items[order], np.array(indptr)

    def _read(self, at: int, dtype: np.dtype, count: int) -> np.ndarray:
        return self.raw[at : at + count * dtype.itemsize].view(dtype)

    def _work(self, name: str, tile: int, items: int, merges: int, ends: tuple[int, int]) -> Work:
        info = self.info
        first, second = info[f"{name}_items"], info[f"{name}_merges"]
        assert first + items * ITEM.itemsize <= ends[0] and second + merges * MERGE.itemsize <= ends[1]
        partial = 0, info["prefill_partial"], info["float_bytes"]
        bytes_ = partial[1] - partial[0] if name == "decode" else partial[2] - partial[1]
        return Work(
            tile,
            self._read(first, ITEM, items),
            self._read(second, MERGE, merges),
            None,
            info[f"{name}_blocks"],
            info[f"{name}_merge_blocks"],
            bytes_ // 4 // (tile * (self.case.head_dim + 1)),
        )

    @property
    def lists(self) -> tuple[Work, Work]:
        return self.decode, self.prefill


def heads_of(item: np.void, count: int) -> range:
    return range(count) if item["kv_head"] < 0 else range(item["kv_head"], item["kv_head"] + 1)


def chunks_of(plan: Plan) -> int:
    """Return the number of splits per request if all requests are split equally (attention_launch.h), else 0."""
    if plan.info["chunk_size"] == 0:
        return 0
    merges = plan.info["decode_merge_blocks"]
    return plan.info["decode_blocks"] // merges if merges > 0 else 1


def computed(plan: Plan) -> np.ndarray:
    """Compute the items of equally split requests, as EqualRequestItem of attention/common/work_items.cuh does."""
    info, heads = plan.info, plan.case.heads[1]
    chunks, size = chunks_of(plan), info["chunk_size"]
    items = np.zeros(info["decode_blocks"] // heads, ITEM)
    kv_len = info["keys"] // (len(items) // chunks)
    request, chunk = np.divmod(np.arange(len(items)), chunks)
    items["request"], items["is_first"], items["kv_head"] = request, chunk == 0, -1
    items["qo_begin"], items["qo_len"] = request * info["qo_len"], info["qo_len"]
    items["kv_begin"], items["kv_len"] = request * -(-kv_len // plan.case.page_size), kv_len
    items["kv_start"], items["kv_end"] = chunk * size, np.minimum((chunk + 1) * size, kv_len)
    items["slot"] = np.arange(len(items)) * heads if chunks > 1 else -1
    items["merge"] = request if chunks > 1 else -1
    items["next"] = -1
    return items


def check(plan: Plan) -> None:
    """Check that splits of a tile are adjacent and cover the visible keys, and that slots and merges agree."""
    case, seen = plan.case, {}
    if plan.info["chunk_size"] > 0:
        assert (plan.decode.items == computed(plan)).all()
        assert (plan.decode.merges["count"] == chunks_of(plan)).all()
    for work in plan.lists:
        slots: dict[int, tuple[Any, ...]] = {}
        for item in work.items:
            b = item["request"]
            assert item["qo_begin"] == sum(case.qo_lens[:b]) and item["qo_len"] == case.qo_lens[b]
            assert item["kv_begin"] == sum(-(-n // case.page_size) for n in case.kv_lens[:b])
            assert item["kv_len"] == (-1 if case.hides_lens else case.kv_lens[b])
            assert item["kv_start"] % KV_UNIT == 0 and item["kv_start"] <= item["kv_end"]
            assert item["row_begin"] % work.tile == 0
            for head in heads_of(item, case.heads[1]):
                slot = int(item["slot"]) + (head if item["kv_head"] < 0 else 0) if item["slot"] >= 0 else -1
                piece = (int(item["kv_start"]), int(item["kv_end"]), slot, int(item["is_first"]))
                seen.setdefault((int(b), head, int(item["row_begin"]), work.tile), []).append(piece)
                if slot >= 0:
                    assert slot < work.slots and slot not in slots
                    merge = work.merges[item["merge"]]
                    assert (slot - head * (item["kv_head"] < 0) - merge["first_slot"]) % merge["step"] == 0
                    slots[slot] = (int(b), head, int(item["row_begin"]))
        merged = set()
        for merge in work.merges:
            for head in heads_of(merge, case.heads[1]):
                first = int(merge["first_slot"]) + (head if merge["kv_head"] < 0 else 0)
                own = [first + i * int(merge["step"]) for i in range(merge["count"])]
                tiles = {slots[slot] for slot in own}
                assert len(tiles) == 1 and len(own) > 1
                b, tile_head, row = tiles.pop()
                assert (tile_head, row) == (head, merge["row_begin"]) and merge["qo_len"] == case.qo_lens[b]
                pieces = sorted(seen[b, head, row, work.tile])
                assert [p[2] for p in pieces] == own  # sorted by keys
                merged.update(own)
        assert merged == set(slots)
        assert len(work.merges) <= work.merge_blocks
    expected = {
        (b, head, row, tile)
        for b, rows in enumerate(n * case.group for n in case.qo_lens)
        for tile in [16 if rows <= 16 or not case.prefill_tiles[0] else plan.info["tile"]]
        for row in range(0, rows, tile)
        for head in range(case.heads[1])
    }
    assert set(seen) == expected
    for (b, _, row, tile), pieces in seen.items():
        pieces.sort()
        assert [p[3] for p in pieces] == [1] + [0] * (len(pieces) - 1)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert len(pieces) == 1 or all(start < end for start, end, *_ in pieces)
        begin, end = visible(case, b, row, tile)
        assert end <= begin or (pieces[0][0] <= begin and pieces[-1][1] >= end)
        assert pieces[-1][1] <= (-(-case.kv_lens[b] // case.page_size)) * case.page_size


def visible(case: Case, b: int, row: int, tile: int) -> tuple[int, int]:
    """Return the range from the first to the last key that any row of the tile may see."""
    qo_len, kv_len = case.qo_lens[b], case.kv_lens[b]
    first, last = row // case.group, min(qo_len, -(-(row + tile) // case.group)) - 1
    begin = max(0, first + kv_len - qo_len - case.window_left) if case.window_left >= 0 else 0
    end = min(kv_len, max(0, last + kv_len - qo_len + 1)) if case.causal else kv_len
    return begin, end


lengths = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3000)), max_size=9)


@settings(max_examples=150)
@given(
    lengths,
    st.sampled_from([1, 16]),
    st.sampled_from([(8, 2), (5, 5), (32, 1)]),
    st.booleans(),
    st.sampled_from([-1, 0, 100]),
    st.sampled_from([{}, {"fixed_split": 100}, {"disable_split": True}, {"graph": True}]),
    st.sampled_from([(1, 1, 1), (7, 5, 3), (132, 264, 132)]),
)
def test_every_key_once(
    lens: Any, page_size: int, heads: Any, causal: bool, window: int, options: Any, blocks: Any
) -> None:
    qo_lens, kv_lens = [a for a, _ in lens], [b for _, b in lens]
    case = Case(qo_lens, kv_lens, page_size, heads, causal, window, decode_blocks=blocks[0], prefill_blocks=blocks[1:])
    check(Plan(replace(case, **options)))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.booleans(), st.sampled_from([-1, 70]))
def test_decode(kv_lens: list[int], hides_lens: bool, window: int) -> None:
    case = Case(
        [1] * len(kv_lens), kv_lens, 16, (16, 2), window_left=window, prefill_tiles=(0, 0), hides_lens=hides_lens
    )
    check(Plan(case))


@pytest.mark.parametrize("last_page", [1, 2, 15, 16])
def test_window_without_lengths(last_page: int) -> None:
    """A page may be partly filled, so the first key of a window may be a page before that of a full one."""
    kv_lens = [16 * n + last_page for n in range(5, 30)]
    case = Case([1] * len(kv_lens), kv_lens, 16, (16, 2), window_left=70, prefill_tiles=(0, 0), hides_lens=True)
    check(Plan(case))


@pytest.mark.parametrize("heads", [2, 5, 200])
@pytest.mark.parametrize(
    "kv_lens",
    [[4096] * 64, [100000] + [50] * 63, list(range(1, 8000, 31)), [20000], [200000] * 8],
    ids=["even", "skew", "ramp", "one", "much"],
)
def test_shares_are_balanced(kv_lens: list[int], heads: int) -> None:
    """Check that blocks of equal speed, each of which takes the next share when it is done, end together."""
    plan = Plan(Case([1] * len(kv_lens), kv_lens, 16, (heads, heads), prefill_tiles=(0, 0)))
    if heads == 2:
        check(plan)
    assert plan.decode.indptr is not None
    keys = plan.decode.items["kv_end"] - plan.decode.items["kv_start"]
    cost = np.repeat(np.add.reduceat(-(-keys // KV_UNIT) + 1, plan.decode.indptr[:-1]), heads)
    ends = [0] * min(132, len(cost))
    for share in cost:
        heapq.heapreplace(ends, ends[0] + int(share))
    fair = sum(cost) / min(132, sum(cost) / 3)
    assert max(ends) <= fair + max(4, 0.06 * fair)


@pytest.mark.parametrize(
    "kv_lens, options, chunks",
    [
        ([8192], {}, 64),
        ([2048] * 16, {}, 4),
        ([2000] * 16, {}, 4),  # the last split of each request is shorter
        ([100] * 5, {}, 1),
        ([2048] * 15 + [2047], {}, 0),
        ([2048] * 16, {"hides_lens": True}, 0),
        ([2048] * 16, {"graph": True}, 0),
        ([2048] * 16, {"window_left": 600}, 0),  # windows do not begin at the first key
        ([1024] * 256, {}, 0),  # several items per block
    ],
)
def test_items_that_blocks_compute(kv_lens: list[int], options: dict[str, Any], chunks: int) -> None:
    plan = Plan(replace(Case([1] * len(kv_lens), kv_lens, 16, (16, 2)), **options))
    check(plan)
    assert chunks_of(plan) == chunks


@pytest.mark.parametrize("kv_lens, pieces", [([1024] * 4, 32), ([1000, 3000, 70, 500], 25), ([1], 1)])
def test_few_keys_take_many_blocks(kv_lens: list[int], pieces: int) -> None:
    """Check that splits are as short as the block count allows, 33 per head here, and at least two granules long."""
    plan = Plan(Case([1] * len(kv_lens), kv_lens, 16, (32, 8), decode_blocks=264))
    check(plan)
    assert len(plan.decode.items) == pieces


@pytest.mark.parametrize("place", [(0, 64 << 20), (32 << 20, 32 << 20), (32 << 20, 5000), (32 << 20, 20)])
@pytest.mark.parametrize("options", [{}, {"disable_split": True}, {"graph": True}])
def test_items_made_in_the_buffer_are_the_same(place: tuple[int, int], options: dict[str, bool]) -> None:
    """Check equal items wherever they are built, with or without room: copying them would take as long as the plan."""
    case = Case([1] * 64 + [90], [100000] + [50] * 63 + [700], 16, **options)
    assert Plan(case, place).raw.tobytes() == Plan(case).raw.tobytes()


def test_long_prompts_fill_the_device() -> None:
    """Check that a long prompt is split into equal parts: one tile per head would leave most blocks idle."""
    plan = Plan(Case([32], [30000], causal=True))
    check(plan)
    keys = plan.prefill.items["kv_end"] - plan.prefill.items["kv_start"]
    assert 0.8 * 132 <= len(keys) * 2 <= 264 and keys.max() - np.sort(keys)[1] <= KV_UNIT


@pytest.mark.parametrize("options", [{}, {"disable_split": True}])
def test_graphs_have_one_layout(options: dict[str, bool]) -> None:
    """Check that all values that a captured launch takes from the first plan hold for later plans."""
    infos = []
    for qo_lens, kv_lens in [([1] * 8, [1] * 8), ([1, 0, 30, 1, 1, 1, 1, 5], [9000] * 8), ([40] + [0] * 7, [70] * 8)]:
        plan = Plan(Case(qo_lens, kv_lens, 16, causal=True, graph=True, max_rows=40, **options))
        check(plan)
        infos.append(plan.info)
    assert infos[0] == infos[1] == infos[2]


@pytest.mark.parametrize("options", [{"fixed_split": 200}, {"disable_split": True}])
def test_fixed_splits_ignore_the_batch(options: dict[str, Any]) -> None:
    def pieces(case: Case, request: int) -> list[tuple[int, ...]]:
        plan = Plan(case)
        check(plan)
        names = ["kv_head", "row_begin", "kv_start", "kv_end"]
        return sorted((*map(int, i[names]), w.tile) for w in plan.lists for i in w.items if i["request"] == request)

    alone = Case([70], [3000], causal=True, **options)
    crowd = Case([1, 70, 400], [9000, 3000, 400], causal=True, **options)
    assert pieces(alone, 0) == pieces(crowd, 1)


@pytest.mark.alone
def test_a_plan_takes_microseconds() -> None:
    """Check the planning time: 5 us on an idle core; the bound allows for a busy one."""
    kv_lens = [1000 + 37 * i for i in range(256)]
    case = Case([1] * 256, kv_lens, 16, (32, 8), prefill_tiles=(0, 0))
    nanoseconds = module().time(*case.arguments, torch.empty(8 << 20, dtype=torch.uint8))
    assert nanoseconds < 50_000, f"{nanoseconds / 1e3:.1f} us"
    assert math.isfinite(nanoseconds)


@pytest.mark.parametrize(
    "qo_lens, kv_lens, options, tile",
    [
        ([512] * 32, [512] * 32, {"causal": True}, 64),  # 256 keys on average
        ([512] * 32, [512] * 32, {}, 128),
        ([4096], [4096], {"causal": True}, 128),
        ([4096], [4096], {"causal": True, "window_left": 200}, 64),
        ([12] * 8, [9000] * 8, {}, 64),  # 48 rows of each request: large tiles would be half empty
        ([40] * 8, [9000] * 8, {}, 128),
        ([1, 512, 512], [9000, 512, 512], {"causal": True}, 64),  # the request of one row is not a prefill tile
        ([512] * 32, [512] * 32, {"causal": True, "graph": True}, 128),
        ([512] * 32, [512] * 32, {"causal": True, "disable_split": True}, 128),
    ],
)
def test_form_of_the_hopper_kernel(qo_lens: list[int], kv_lens: list[int], options: dict[str, Any], tile: int) -> None:
    """Short items run in blocks of 64 rows, two on an SM, unless the form must not depend on the batch."""
    case = Case(qo_lens, kv_lens, heads=(32, 8), prefill_tiles=(128, 64), prefill_blocks=(132, 264), takes_items=True)
    plan = Plan(replace(case, **options))
    assert plan.info["tile"] == plan.prefill.tile == tile
    check(plan)
