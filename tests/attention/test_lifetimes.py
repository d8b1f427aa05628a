# SPDX-License-Identifier: Apache-2.0
"""Memory of plans: no memory is overwritten or reused while a copy or a kernel still reads it, whoever owns it by then.

On a GPU everything happens while streams sleep, so that host and device are far apart. Results must be
those of a quiet run, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
from typing import Any, Callable, ContextManager, NamedTuple, Sequence

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError

from ..graphs import capture
from .inputs import Batch
from .wrappers import workspace

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F16, BF16 = torch.float16, torch.bfloat16
PAGE = 8
HEADS = (4, 2)


class Input(NamedTuple):
    """Arguments of plan, with all index arrays on the host, and arguments of run."""

    plan: tuple[Any, ...]
    options: dict[str, Any]
    run: tuple[Any, ...]


class Kind(NamedTuple):
    """A wrapper, and two batches that it is planned for."""

    name: str
    make: Callable[[torch.Tensor], Any]
    inputs: Sequence[Input]


def _lens(which: int) -> tuple[list[int], list[int]]:
    return [([5, 20, 3], [40, 97, 64]), ([37] * 12, [37] * 12)][which]


def _ragged(device: str, dtype: torch.dtype) -> Kind:
    def given(which: int) -> Input:
        batch = Batch(*_lens(which), dtype=dtype, device=device)
        plan = (batch.qo_indptr.cpu(), batch.kv_indptr.cpu(), *HEADS, 64)
        return Input(plan, {"q_data_type": dtype, "causal": True}, (batch.q, *batch.dense()))

    return Kind(f"ragged {dtype}", flashinfer.BatchPrefillWithRaggedKVCacheWrapper, [given(0), given(1)])


def _paged(device: str, dtype: torch.dtype, soft_cap: float = 0.0) -> Kind:
    def given(which: int) -> Input:
        batch = Batch(*_lens(which), dtype=dtype, device=device)
        pages = batch.pages(PAGE)
        plan = (batch.qo_indptr.cpu(), *(t.cpu() for t in pages.table), *HEADS, 64, PAGE)
        return Input(plan, {"q_data_type": dtype, "logits_soft_cap": soft_cap}, (batch.q, batch.cache(pages)))

    return Kind(f"paged {dtype} {soft_cap}", flashinfer.BatchPrefillWithPagedKVCacheWrapper, [given(0), given(1)])


def _decode(device: str, dtype: torch.dtype, tensor_cores: bool) -> Kind:
    def given(which: int) -> Input:
        lens = [[40, 700, 97], [3] * 50][which]
        batch = Batch([1] * len(lens), lens, dtype=dtype, device=device)
        pages = batch.pages(PAGE)
        plan = (*(t.cpu() for t in pages.table), *HEADS, 64, PAGE)
        return Input(plan, {"q_data_type": dtype}, (batch.q, batch.cache(pages)))

    make = functools.partial(flashinfer.BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores=tensor_cores)
    return Kind(f"decode {dtype} {tensor_cores}", make, [given(0), given(1)])


def _latent(device: str) -> Kind:
    def given(which: int) -> Input:
        lens = [[40, 300], [9] * 20][which]
        batch = Batch([1] * len(lens), lens, 16, 1, 576, 512, dtype=BF16, device=device, latent=True)
        pages = batch.pages(PAGE)
        cache = pages.scatter(batch.k, "NHD").squeeze(2)
        plan = (batch.qo_indptr.cpu(), pages.indptr.cpu(), pages.indices.cpu(), pages.lens.cpu())
        sizes = (16, 512, 64, PAGE, True, 192**-0.5, BF16, BF16)
        run = (batch.q[..., :512], batch.q[..., 512:], cache[..., :512], cache[..., 512:])
        return Input((*plan, *sizes), {}, run)

    return Kind("mla", flashinfer.mla.BatchMLAPagedAttentionWrapper, [given(0), given(1)])


def _cascade(device: str) -> Kind:
    def given(which: int) -> Input:
        requests, shared = [(20, 64), (7, 200)][which]
        count = shared // PAGE
        tables = [
            (torch.tensor([0, requests]), torch.arange(requests + 1)),
            (torch.tensor([0, count]), torch.arange(requests + 1)),
            (torch.arange(count), torch.arange(count, count + requests)),
            (torch.tensor([PAGE]), torch.full((requests,), 3)),
        ]
        plan = [[x.int() for x in table] for table in tables]
        q = torch.randn(requests, 8, 128, device=device).half()
        cache = torch.randn(count + requests, 2, PAGE, 2, 128, device=device).half()
        return Input((*plan, 8, 2, 128, PAGE), {}, (q, cache))

    make = functools.partial(flashinfer.MultiLevelCascadeAttentionWrapper, 2)
    return Kind("cascade", make, [given(0), given(1)])


def _pod(device: str) -> Kind:
    def given(which: int) -> Input:
        decode = _decode(device, F16, True).inputs[which]
        rows = [30, 90][which]
        q, kv = torch.randn(rows, 4, 64, device=device).half(), torch.randn(rows, 2, 64, device=device).half()
        return Input(decode.plan, decode.options, (q, kv, kv, *decode.run))

    return Kind("pod", flashinfer.PODWithPagedKVCacheWrapper, [given(0), given(1)])


#: Indices of :func:`kinds` on a GPU, named for tests.
_GPU_KINDS = (
    *("ragged f16", "ragged bf16", "paged f16", "paged bf16", "decode f16", "decode bf16", "decode tensor cores"),
    *("paged soft cap", "mla", "cascade", "pod"),
)


@functools.cache
def kinds(device: str) -> list[Kind]:
    """Return wrappers of several modules; on a GPU also with soft cap, MLA, cascade and POD."""
    torch.manual_seed(0)
    some = [
        *(_ragged(device, F16), _ragged(device, BF16), _paged(device, F16), _paged(device, BF16)),
        *(_decode(device, F16, False), _decode(device, BF16, False), _decode(device, F16, True)),
    ]
    if device == "cuda":
        some += [_paged(device, F16, 30.0), _latent(device), _cascade(device), _pod(device)]
    return some


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _run(kind: Kind, wrapper: Any, which: int) -> list[torch.Tensor]:
    return _tensors(wrapper.run(*kind.inputs[which].run))


def _plan(kind: Kind, wrapper: Any, which: int) -> None:
    given = kind.inputs[which]
    wrapper.plan(*given.plan, **given.options)


@functools.cache
def quiet(device: str) -> dict[tuple[str, int], list[torch.Tensor]]:
    """Return the results of each kind for each batch while nothing else runs."""
    results = {}
    for kind in kinds(device):
        for which in range(2):
            wrapper = kind.make(workspace(device, 8 << 20))
            _plan(kind, wrapper, which)
            results[kind.name, which] = _run(kind, wrapper, which)
    if device == "cuda":
        torch.cuda.synchronize()
    return results


class Calls:
    """Random calls on some wrappers, on streams that are kept busy by sleep kernels."""

    def __init__(self, device: str, seed: int, streams: Sequence[Any]) -> None:
        self.device, self.draw, self.streams = device, random.Random(seed), streams
        self.live: list[list[Any]] = []  # kind, wrapper, index of the planned batch or None
        self.results: list[tuple[str, int, list[torch.Tensor]]] = []

    def on_any(self) -> ContextManager[Any]:
        """Make one of the streams the current one, and let it sleep first now and then."""
        if not self.streams:
            return contextlib.nullcontext()
        stream = self.draw.choice(self.streams)
        if self.draw.random() < 0.3:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
        return torch.cuda.stream(stream)

    def create(self) -> None:
        kind = self.draw.choice(kinds(self.device))
        with self.on_any():
            self.live.append([kind, kind.make(workspace(self.device, 8 << 20)), None])

    def plan(self) -> None:
        entry = self.draw.choice(self.live)
        entry[2] = self.draw.randrange(2)
        with self.on_any():
            _plan(entry[0], entry[1], entry[2])

    def run(self) -> None:
        kind, wrapper, which = self.draw.choice(self.live)
        if which is not None:
            with self.on_any():
                self.results.append((kind.name, which, _run(kind, wrapper, which)))

    def drop(self) -> None:
        del self.live[self.draw.randrange(len(self.live))]
        if self.draw.random() < 0.2:
            gc.collect()

    def fail(self) -> None:
        """Let a plan fail halfway; the wrapper then has no plan."""
        entry = self.draw.choice(self.live)
        kind, wrapper, _ = entry
        if "cascade" in kind.name:
            return
        with self.on_any():
            tiny = torch.empty(16, dtype=torch.uint8, device=self.device)
            wrapper.reset_workspace_buffer(workspace(self.device, 8 << 20), tiny)
            with contextlib.suppress(ArgumentError, RuntimeError):
                _plan(kind, wrapper, 1)
            whole = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)
            wrapper.reset_workspace_buffer(workspace(self.device, 8 << 20), whole)
        entry[2] = None

    def litter(self) -> None:
        """Overwrite memory that was freed, as soon as the allocator hands it out."""
        with self.on_any():
            torch.full((8 << 20,), 255, dtype=torch.uint8, device=self.device)
        torch.empty(8 << 20, dtype=torch.uint8, pin_memory=self.device == "cuda").fill_(255)

    def play(self, steps: int) -> None:
        actions = [self.create, self.plan, self.plan, self.run, self.run, self.run, self.drop, self.fail, self.litter]
        for _ in range(steps):
            (self.draw.choice(actions) if self.live else self.create)()

    def check(self) -> None:
        for name, which, got in self.results:
            for x, expected in zip(got, quiet(self.device)[name, which], strict=True):
                assert torch.equal(x, expected), (name, which)


def test_random_sequences_on_the_cpu():
    for seed in range(20):
        sequence = Calls("cpu", seed, [])
        sequence.play(20)
        sequence.check()


@needs_gpu
def test_random_sequences_on_two_streams():
    quiet("cuda")
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    for seed in range(500):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
        sequence = Calls("cuda", seed, streams)
        sequence.play(20)
        torch.cuda.synchronize()
        sequence.check()


@needs_gpu
@pytest.mark.parametrize("number", range(len(_GPU_KINDS)), ids=_GPU_KINDS)
def test_a_plan_on_another_stream_than_the_run(number):
    """Check that a run waits for the copy of its plan, and the next plan for the run, when either stream is busy."""
    kind, expected = kinds("cuda")[number], quiet("cuda")
    plans, runs = torch.cuda.Stream(), torch.cuda.Stream()
    wrapper = kind.make(workspace("cuda", 8 << 20))
    results = []
    for which, busy in ((0, plans), (1, runs), (0, runs), (1, plans)):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(plans):
            _plan(kind, wrapper, which)
        with torch.cuda.stream(runs):
            results.append((which, _run(kind, wrapper, which)))
    del wrapper
    with torch.cuda.stream(plans):
        torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for which, got in results:
        for x, y in zip(got, expected[kind.name, which], strict=True):
            assert torch.equal(x, y), which


@needs_gpu
@pytest.mark.parametrize("name", ["decode", "mla"])
def test_a_graph_outlives_its_wrapper(name):
    """Check that a replay reads a plan whose wrapper was dropped, also if calls before the capture were recorded."""
    kind = _decode("cuda", F16, False) if name == "decode" else _latent("cuda")
    given = kind.inputs[0]
    if name == "decode":
        buffers = [table.cuda() for table in given.plan[:3]]
        wrapper: Any = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cuda", 8 << 20), *buffers)
    else:
        wrapper = kind.make(workspace("cuda", 8 << 20))
    scratch = wrapper._float_workspace_buffer  # the caller's
    _plan(kind, wrapper, 0)
    for _ in range(2):
        expected = _run(kind, wrapper, 0)
    graph, result = capture(functools.partial(_run, kind, wrapper, 0))
    del wrapper
    gc.collect()
    litter = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    for x in result:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert len(litter) == 64 and scratch.is_cuda
    for x, y in zip(result, expected, strict=True):
        assert torch.equal(x, y)


@needs_gpu
def test_two_streams_call_without_a_plan():
    """Check front doors without ``plan()``: streams of one plan would count finished tiles in the same memory."""
    lens = torch.tensor([900, 4000, 37, 2500], dtype=torch.int32, device="cuda")
    tables = torch.arange(4 * 256, dtype=torch.int32, device="cuda").view(4, 256)
    cache = torch.randn(1024, 2, 2, 16, 64, device="cuda").half()
    q = torch.randn(4, 8, 64, device="cuda").half()
    buffers = [torch.zeros(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]

    def step(i: int) -> torch.Tensor:
        return flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            q, cache, buffers[i], tables, lens, 4096, bmm1_scale=0.125, bmm2_scale=1.0, kv_layout="HND"
        )

    expected = step(2)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append(step(i))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in results)


@needs_gpu
def test_threads_with_wrappers_of_their_own():
    quiet("cuda")
    sequences = [Calls("cuda", seed, [torch.cuda.Stream()]) for seed in range(4)]
    threads = [threading.Thread(target=sequence.play, args=(60,)) for sequence in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for sequence in sequences:
        sequence.check()
        assert sequence.results


@needs_gpu
def test_a_wrapper_that_is_dropped_while_its_copy_waits():
    """Check that the next wrapper, of another module, does not write to memory that a pending copy still reads."""
    cases: list[tuple[torch.dtype, list[int]]] = [(F16, [37] * 60), (BF16, [5000, 3, 9])]
    batches = [Batch(lens, lens, dtype=dtype, device="cuda") for dtype, lens in cases]
    buffers = [workspace("cuda", 128 << 20) for _ in cases]
    offsets = [(batch.qo_indptr.cpu(), batch.kv_indptr.cpu()) for batch in batches]

    def step(i: int) -> torch.Tensor:
        batch = batches[i]
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffers[i])
        wrapper.plan(*offsets[i], *HEADS, 64, causal=True, q_data_type=batch.dtype)
        return wrapper.run(batch.q, batch.k, batch.v)

    expected = []
    for i in range(2):
        expected.append(step(i))
        torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    got = [step(0), step(1)]
    torch.cuda.synchronize()
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


@needs_gpu
def test_no_plan_waits_for_the_device():
    """Check that plans of several modules in turn do not wait for a sleeping stream."""
    quiet("cuda")
    made = [(kind, kind.make(workspace("cuda", 8 << 20))) for kind in kinds("cuda")]
    for kind, wrapper in made:
        _plan(kind, wrapper, 0)
        _run(kind, wrapper, 0)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    done.record()
    for which in (1, 0, 1):
        for kind, wrapper in made:
            _plan(kind, wrapper, which)
            _run(kind, wrapper, which)
    assert not done.query()
    torch.cuda.synchronize()
