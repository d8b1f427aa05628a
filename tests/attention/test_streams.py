# SPDX-License-Identifier: Apache-2.0
"""Calls on one wrapper from several CUDA streams, with fake streams on the CPU: waits, and memory that is kept."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.attention import index_arrays, options, streams, uniform_plan
from flashinfer.attention.locks import CallLock
from flashinfer.attention.plan_options import AttentionOptions
from flashinfer.attention.uniform_plan import UniformSizes
from flashinfer.decode.planning import store_options

from .wrappers import decode_batch, workspace


class FakeStream:
    """Stream that lists its waits. Streams are numbered, and stream 0 is the default one."""

    def __init__(self, number: int, cuda: FakeCuda) -> None:
        self.number, self.cuda, self.device_index, self.is_captured = number, cuda, 0, False

    def record_event(self) -> int:
        assert not self.is_captured, "an event of a captured stream"
        return self.number

    def wait_event(self, event: int) -> None:
        assert not self.is_captured, "a captured stream waits for work outside of its graph"
        self.cuda.waits.append((self.number, event))

    def synchronize(self) -> None:
        self.cuda.finished.append(self.number)


class FakeCuda:
    """Part of torch.cuda that streams.py calls, for one device."""

    def __init__(self) -> None:
        self.streams = [FakeStream(i, self) for i in range(3)]
        self.now = self.streams[0]
        self.waits: list[tuple[int, int]] = []  #: pairs of the waiting stream and the stream that it waits for
        self.finished: list[int] = []  #: streams that the host waited for
        self.kept: list[tuple[int, int]] = []  #: address of a tensor and the stream that reads it

    def Stream(self) -> FakeStream:
        self.streams.append(FakeStream(len(self.streams), self))
        return self.streams[-1]

    def current_stream(self, device: Any = None) -> FakeStream:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.now.is_captured

    def device(self, index: Any) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self.now = self.now, stream
        yield
        self.now = before

    def on(self, number: int) -> Any:
        return self.stream(self.streams[number])


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(streams, "cuda", fake)
    monkeypatch.setattr(streams, "raw_stream", lambda index: 1000 + fake.now.number)
    monkeypatch.setattr(streams, "keep_until_read", lambda x, s: fake.kept.append((x.data_ptr(), s.number)))
    return fake


def follow(wrapper: Any) -> Any:
    """Let a wrapper on the CPU, and the wrappers inside it, believe to be on a GPU."""
    for part in streams._parts(list(vars(wrapper).values())):
        if not isinstance(part, torch.Tensor):
            follow(part)
    wrapper._lock.follow_streams(torch.device("cuda", 0))
    return wrapper


class Decode:
    """A decode wrapper with a batch."""

    def __init__(self) -> None:
        self.batch = decode_batch("cpu")
        self.pages = self.batch.pages(8)
        self.cache = self.batch.cache(self.pages)
        self.wrapper = follow(flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu")))

    def plan(self) -> None:
        self.wrapper.plan(*self.pages.table, *self.batch.heads, 64, 8)

    def run(self) -> None:
        self.wrapper.run(self.batch.q, self.cache)


def test_a_torch_without_raw_streams_is_asked_by_its_public_function(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=1000 + index))
    assert streams._stream_handle(7) == 1007


def test_one_stream_records_no_event(cuda):
    with cuda.on(1):
        decode = Decode()
        for _ in range(2):
            decode.plan()
            decode.run()
    assert not cuda.waits and not cuda.kept and not cuda.finished


def test_each_change_of_stream_waits_once(cuda):
    decode = Decode()
    with cuda.on(1):
        decode.plan()
    assert cuda.waits == [(1, 0)]  # memory of the constructor comes from stream 0
    with cuda.on(2):
        decode.run()
        decode.run()
    assert cuda.waits == [(1, 0), (2, 1)]
    with cuda.on(1):
        decode.plan()  # must not overwrite the plan that stream 2 reads
    assert cuda.waits == [(1, 0), (2, 1), (1, 2)]


def test_memory_is_kept_for_each_stream_that_reads_it(cuda):
    decode = Decode()
    decode.plan()
    with cuda.on(2):
        decode.run()
    wrapper = decode.wrapper
    for name in ("_int_workspace_buffer", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_float_workspace_buffer"):
        assert (getattr(wrapper, name).data_ptr(), 2) in cuda.kept, name


def test_a_copy_waits_too(cuda):
    decode = Decode()
    decode.plan()
    with cuda.on(1):
        copy.copy(decode.wrapper)
    assert cuda.waits == [(1, 0)]


def test_a_replaced_workspace_waits(cuda):
    decode = Decode()
    decode.plan()
    with cuda.on(1):
        decode.wrapper.reset_workspace_buffer(workspace("cpu"), workspace("cpu"))
        decode.plan()
    assert cuda.waits == [(1, 0)]


def test_levels_of_a_cascade(cuda):
    """Check tables of a level that another level's launch reads."""
    wrapper = follow(flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu")))
    tables = ([0, 2], [0, 1, 2]), ([0, 1], [0, 1, 2]), ([0], [1, 2]), ([8], [3, 3])
    wrapper.plan(*([torch.tensor(x).int() for x in table] for table in tables), 4, 2, 64, 8)
    with cuda.on(1):
        wrapper.run(torch.randn(2, 4, 64).half(), torch.randn(3, 2, 8, 2, 64).half())
    assert set(cuda.waits) == {(1, 0)}
    for level in wrapper._batch_prefill_wrappers:
        assert (level._paged_kv_indices_buf.data_ptr(), 1) in cuda.kept


def test_captures_are_left_alone(cuda):
    """Check that a captured stream neither waits nor is waited for."""
    decode = Decode()
    decode.plan()
    decode.run()
    cuda.streams[1].is_captured = True
    with cuda.on(1):
        streams.enter(decode.wrapper)
    assert not cuda.waits
    cuda.streams[0].is_captured = True  # another thread captures it after the last call
    with cuda.on(2):
        decode.run()
    assert not cuda.waits


def test_a_graph_keeps_the_plan(cuda, monkeypatch):
    """Check that all memory but the caller's scratch outlives the wrapper, and that of wrappers inside it."""
    held: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(streams, "_held", held)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    inner = torch.zeros(4)
    part = SimpleNamespace(_lock=CallLock(), tables=[inner])
    buffers = {"_int_workspace_buffer": torch.zeros(1), "_float_workspace_buffer": torch.zeros(2)}
    owner = SimpleNamespace(_lock=CallLock(), **buffers, _part=part)
    streams.hold_for_graph(owner)
    assert [x.numel() for x in held.values()] == [1, 4]


def test_shared_tensors_are_finished_before_they_are_cached(cuda, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(index_arrays, "_ranges", {})
    monkeypatch.setattr(index_arrays, "_views", {})
    monkeypatch.setattr(options, "_slopes", {})
    monkeypatch.setattr(index_arrays.torch, "arange", lambda size, **_: torch.ones(size).cumsum(0).int() - 1)
    monkeypatch.setattr(options, "get_alibi_slopes", lambda heads, _: torch.ones(heads))
    first = index_arrays.range_buffer(7, device)
    assert first.tolist() == list(range(7)) and cuda.finished == [3]
    longer = index_arrays.range_buffer(1500, device)
    assert longer.tolist() == list(range(1500)) and len(cuda.finished) == 2
    assert index_arrays._ranges[device][0].data_ptr() == first.data_ptr()  # pending launches may read the shorter one
    assert index_arrays.range_buffer(2048, device).data_ptr() == longer.data_ptr()
    assert options.alibi_slopes(4, device) is options.alibi_slopes(4, device)
    assert len(cuda.finished) == 3


def test_shared_tensors_of_a_graph_are_not_cached(cuda, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(options, "_slopes", {})
    monkeypatch.setattr(options, "get_alibi_slopes", lambda heads, _: torch.ones(heads))
    cuda.now.is_captured = True
    options.alibi_slopes(4, device)
    assert not options._slopes and not cuda.finished


def test_row_offsets_of_a_graph_are_not_cached(cuda, monkeypatch):
    """Plan while a stream is captured: the offsets made there have no values before a replay, so no later plan uses
    them.
    """
    made = []

    def ranges(size: int, **_: Any) -> torch.Tensor:
        made.append(size)
        return torch.ones(size).cumsum(0).int() - 1

    monkeypatch.setattr(index_arrays, "_ranges", {})
    monkeypatch.setattr(index_arrays, "_views", {})
    monkeypatch.setattr(index_arrays.torch, "arange", ranges)
    types = options.resolve_dtypes("op", torch.float16, None, None)

    def offsets() -> torch.Tensor:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=True)
        wrapper.device = torch.device("cuda", 0)
        sizes = {"batch_size": 6, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 8}
        store_options(
            wrapper,
            **sizes,
            q_len_per_req=1,
            dtypes=types,
            options=AttentionOptions("NONE", -1, None, None, None, None),
        )
        return wrapper._qo_indptr_buf

    cuda.now.is_captured = True
    of_graph = offsets()
    cuda.now.is_captured = False
    assert offsets().data_ptr() != of_graph.data_ptr() and len(made) == 2 and len(cuda.finished) == 1
    assert offsets() is offsets() and len(made) == 2


class TestUniformPlans:
    sizes = UniformSizes(2, 1, 4, 16, 64, 4, 2, False)

    @pytest.fixture(autouse=True)
    def alone(self, cuda, monkeypatch):
        monkeypatch.setattr(uniform_plan, "_plans", type(uniform_plan._plans)())
        monkeypatch.setattr(uniform_plan, "_captured", {})
        monkeypatch.setattr(uniform_plan, "_make", lambda *args: object())
        monkeypatch.setattr(uniform_plan.torch.cuda, "is_current_stream_capturing", cuda.is_current_stream_capturing)

    def plan(self) -> Any:
        return uniform_plan.uniform_plan("op", self, torch.device("cuda", 0), torch.empty(1), self.sizes)

    def test_streams_do_not_share_counters(self, cuda):
        first = self.plan()
        assert self.plan() is first
        with cuda.on(1):
            assert self.plan() is not first

    def test_a_graph_takes_the_plan_over(self, cuda):
        first = self.plan()
        cuda.streams[1].is_captured = True
        with cuda.on(1):
            assert self.plan() is first
            assert self.plan() is first
        assert self.plan() is not first

    def test_a_graph_needs_a_call_before(self, cuda):
        cuda.now.is_captured = True
        with pytest.raises(ValueError, match="before a capture"):
            self.plan()
