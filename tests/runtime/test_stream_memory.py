# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of streams (csrc/stream_memory.h): no two calls have the same memory at once, and none is lost."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.gemm import fp8_blockscale_gemm_sm90
from flashinfer.jit import gen_jit_spec

from ..fused_moe.layers import dense
from ..graphs import capture
from ..hopper.devices import needs_hopper

KIB, MIB = 1 << 10, 1 << 20
PLENTY = 1 << 30


@functools.cache
def built() -> Any:
    source = Path(__file__).parent / "stream_memory_module.cu"
    return gen_jit_spec("test_stream_memory_cpu", [source], backend="cpu").build_and_load()


@pytest.fixture
def memory() -> Any:
    module = built()
    module.reset(PLENTY)
    return module


def call(memory: Any, stream: int, size: int) -> int:
    """Borrow and give back; return the address of what was lent, 0 if nothing was."""
    place = memory.lend(stream, size)
    if place == 0:
        return 0
    assert memory.bytes(place) >= size
    address = memory.address(place)
    memory.give_back(place)
    return address


def test_calls_of_a_stream_use_the_same_memory(memory):
    assert len({call(memory, 0, size) for size in (1, 100 * KIB, 256 * KIB, 0)}) == 1


def test_streams_have_their_own_memory(memory):
    assert len({call(memory, stream, KIB) for stream in range(16)} - {0}) == 16


def test_what_is_lent_is_not_lent_again(memory):
    place = memory.lend(0, KIB)
    assert memory.lend(0, KIB) == 0
    assert call(memory, 1, KIB) not in (0, memory.address(place))
    memory.give_back(place)
    assert memory.lend(0, KIB) == place


def test_larger_calls_get_more_and_later_ones_use_it(memory):
    small, large = call(memory, 0, KIB), call(memory, 0, 3 * MIB)
    assert 0 not in (small, large) and large != small
    assert call(memory, 0, KIB) == call(memory, 0, 4 * MIB) == large


def test_a_stream_keeps_what_it_has_if_there_is_no_more(memory):
    memory.reset(MIB)
    kept = call(memory, 0, KIB)
    assert kept != 0 and call(memory, 0, 2 * MIB) == 0
    assert call(memory, 0, KIB) == kept


def test_streams_without_number_and_too_many_streams_get_nothing(memory):
    assert memory.lend(-1, KIB) == 0 and memory.counters(-1) == 0
    for stream in range(16):
        assert memory.counters(stream) != 0
    assert memory.lend(16, KIB) == 0 and call(memory, 15, KIB) != 0


def test_counters_are_not_scratch_memory(memory):
    counters = memory.counters(0)
    assert counters == memory.counters(0) != 0
    address = call(memory, 0, KIB)
    assert address + 256 * KIB <= counters or counters + 512 * 4 <= address


def product(device: str) -> Callable[[], torch.Tensor]:
    """Return a call of two kernels with codes of its input between them."""
    x, w = torch.randn(16, 512, device=device).bfloat16(), torch.randn(128, 512, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(1, 4, device=device)
    return lambda: fp8_blockscale_gemm_sm90(x, w, None, scale)


def layer(tokens: int, device: str) -> Callable[[], torch.Tensor]:
    """Return a call of one kernel for few tokens and of several for more, with hidden values between products."""
    call = dense(tokens, 128, 64, 4, 2, device)
    return lambda: cutlass_fused_moe(**call)[0]


CALLS: dict[str, Callable[[str], Callable[[], torch.Tensor]]] = {
    "product": product,
    "layer of few tokens": lambda device: layer(4, device),
    "layer": lambda device: layer(32, device),
}


@pytest.mark.parametrize("name", CALLS)
def test_threads_that_share_a_stream_share_no_memory(device, name):
    if device == "cuda" and name == "product" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("CUDA devices other than SM90 are refused")
    calls = [CALLS[name](device) for _ in range(3)]
    expected = [call() for call in calls]
    faults: list[str] = []

    def repeat(call: Callable[[], torch.Tensor], result: torch.Tensor) -> None:
        try:
            if not all(call().equal(result) for _ in range(200 if device == "cuda" else 10)):
                faults.append("another result")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(calls, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@needs_hopper
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_has_memory_of_its_own(name):
    """Check replays on one stream while calls run on another."""
    call, other = CALLS[name]("cuda"), CALLS[name]("cuda")
    expected, expected_other = call().clone(), other().clone()
    graph, result = capture(call)
    stream = torch.cuda.Stream()
    others = []
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(stream):
            others.append(other())
    torch.cuda.synchronize()
    assert result.equal(expected) and all(x.equal(expected_other) for x in others)
