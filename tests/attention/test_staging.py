# SPDX-License-Identifier: Apache-2.0
"""Pinned staging memory of plans: no block is written while a copy may still read it, and no plan waits for a copy."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from flashinfer.jit import gen_jit_spec

KIB, MIB = 1 << 10, 1 << 20


@functools.cache
def built() -> Any:
    source = Path(__file__).parent / "staging_module.cu"
    return gen_jit_spec("test_attention_staging_cpu", [source], backend="cpu").build_and_load()


@pytest.fixture
def pool() -> Any:
    module = built()
    module.reset(1 << 40)
    return module


def plan(pool: Any, number: int, size: int, stream: int) -> int:
    """Make a whole plan and return the address that it is copied from."""
    pool.begin(number)
    address = pool.room(number, size)
    pool.end(number, size, stream)
    return address


def test_random_plans_never_share_memory_that_is_read(pool):
    """Check plans of any size on four streams, some of which fail, interleaved with the copies."""
    draw = random.Random(0)
    pending: dict[int, list[tuple[int, int]]] = {stream: [] for stream in range(4)}  # pending reads: (address, bytes)
    for number in range(5000):
        stream, size = draw.randrange(4), draw.choice([1, 500, 64 * KIB, 70 * KIB, 1 * MIB])
        pool.begin(number)
        begin = pool.room(number, size)
        for other, bytes_read in (piece for pieces in pending.values() for piece in pieces):
            assert begin + size <= other or other + bytes_read <= begin
        fails = draw.random() < 0.1
        pool.end(number, size, -1 if fails else stream)
        if not fails:
            pending[stream].append((begin, size))
        if draw.random() < 0.5:
            stream, count = draw.randrange(4), draw.randrange(6)
            pool.finish(stream, count)
            del pending[stream][:count]
    assert pool.waits() == 0


def test_a_loop_uses_one_block_and_asks_once(pool):
    """Check a loop in which each plan follows the copy of the previous plan."""
    addresses = set()
    for number in range(100):
        addresses.add(plan(pool, number, 17 * KIB, 0))
        pool.finish(0, 1)
    assert len(addresses) == 1 and pool.queries() == 99 and pool.memory_left() == (1 << 40) - 64 * KIB


def test_a_busy_stream_does_not_hold_up_another(pool):
    for number in range(10):
        plan(pool, number, KIB, 0)  # copies that never finish
    for number in range(200):
        plan(pool, number, KIB, 1)
        pool.finish(1, 1)
    assert pool.waits() == 0 and (1 << 40) - pool.memory_left() <= 20 * 64 * KIB


def test_a_plan_that_outgrows_its_room_keeps_what_it_has(pool):
    pool.begin(0)
    first = pool.room(0, KIB)
    pool.begin(1)
    large = pool.room(0, MIB)
    assert large != first
    assert first not in (pool.room(1, KIB), plan(pool, 2, KIB, 0))  # items may still lie there
    pool.end(0, MIB, 0)
    pool.end(1, KIB, 0)


def test_a_captured_copy_keeps_its_block(pool):
    """Check that the block of a captured copy is not reused: each replay of the graph reads it."""
    pool.capture(0, True)
    captured = plan(pool, 0, KIB, 0)
    pool.capture(0, False)
    pool.finish(0, 100)
    assert captured not in {plan(pool, number, KIB, 0) for number in range(1, 20)}


def test_a_plan_that_fails_gives_its_block_back(pool):
    for number in range(100):
        pool.begin(number)
        pool.room(number, KIB)
        pool.end(number, KIB, -1)
    assert pool.memory_left() == (1 << 40) - 64 * KIB and pool.queries() == 0


@pytest.mark.parametrize("memory", [3 * 64 * KIB, 1 << 40], ids=["out of memory", "at the limit of the pool"])
def test_a_pool_that_cannot_grow_waits_for_the_oldest_copy(pool, memory):
    pool.reset(memory)
    limit = min(memory, 256 * MIB)
    seen = [plan(pool, number, 64 * KIB, 0) for number in range(limit // (64 * KIB))]
    assert pool.waits() == 0 and len(set(seen)) == len(seen)
    assert plan(pool, 0, 64 * KIB, 0) in seen and pool.waits() == 1


def test_no_memory_at_all_is_said(pool):
    pool.reset(0)
    pool.begin(0)
    assert pool.room(0, KIB) == 0
    pool.end(0, KIB, -1)
