# SPDX-License-Identifier: Apache-2.0
"""bench_gpu_time: result forms, iteration counts, cache state and the choice of clock."""

import inspect
import statistics

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.testing import bench_cpu_time, bench_gpu_time, sleep_after_kernel_run, summarize, timers, timing
from flashinfer.testing import utils as testing_utils

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")


class Counter:
    """Function to time that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1


def test_seed_spelling_returns_median_and_std_in_seconds(device):
    x = torch.ones(256, 256, device=device)
    median, std = bench_gpu_time(torch.mm, args=(x, x), dry_run_iters=2, repeat_iters=5)
    assert 1e-7 < median < 1 and std >= 0


def test_num_iters_alone_selects_the_pair():
    fn = Counter()
    result = bench_gpu_time(fn, num_iters=7, dry_run_iters=3, cold_l2_cache=False)
    assert isinstance(result, timing.BenchTime) and len(result) == 2
    assert fn.calls == 1 + 3 + 7  # one call to build modules, then the two counts


def test_upstream_spelling_returns_milliseconds_per_iteration(device):
    x = torch.ones(64, 64, device=device)
    times = bench_gpu_time(torch.add, input_args=(x,), input_kwargs={"other": x}, dry_run_iters=1, repeat_iters=6)
    assert isinstance(times, list) and len(times) == 6
    assert all(0 < t < 1e3 for t in times)


def test_no_argument_keyword_returns_the_list():
    assert len(bench_gpu_time(lambda: None, dry_run_iters=1, repeat_iters=4, cold_l2_cache=False)) == 4


def test_the_two_units_agree():
    assert summarize([1.0, 2.0, 9.0]) == (2e-3, pytest.approx(statistics.pstdev([1, 2, 9]) / 1e3))


def test_arguments_reach_the_function():
    seen = []
    bench_gpu_time(lambda *a, **k: seen.append((a, k)), args=(1, 2), kwargs={"c": 3}, num_iters=1, dry_run_iters=0)
    assert seen[-1] == ((1, 2), {"c": 3})


@pytest.mark.parametrize(
    "both",
    [
        {"args": (1,), "input_args": (1,)},
        {"kwargs": {"a": 1}, "input_kwargs": {"a": 1}},
        {"num_iters": 3, "repeat_iters": 3},
    ],
)
def test_both_spellings_of_one_argument_are_an_error(both):
    with pytest.raises(ArgumentError, match=r"must be given .*, got both"):
        bench_gpu_time(lambda *a, **k: None, **both)


@pytest.mark.parametrize("spelling", ["args", "input_args"])
def test_arguments_are_a_tuple(spelling):
    with pytest.raises(ArgumentError, match="args must be a tuple"):
        bench_gpu_time(torch.stack, **{spelling: torch.ones(2, 2)})


@pytest.mark.parametrize("counts", [{"repeat_iters": 0}, {"dry_run_iters": -1}])
def test_impossible_counts_are_an_error(counts):
    with pytest.raises(ValueError, match="must be at least"):
        bench_gpu_time(lambda: None, **counts)


def test_counts_follow_the_time_budget():
    plan = timers.Plan(dry_run_time_ms=10, repeat_time_ms=100)
    assert plan.counts(lambda: 2.0) == (5, 50)
    assert plan.counts(lambda: 1e4) == (1, 5)  # at least five iterations for a median, however slow
    fixed = timers.Plan(dry_run_iters=3, repeat_iters=4)
    assert fixed.counts(lambda: pytest.fail("nothing to estimate")) == (3, 4)


def test_deprecated_flush_arguments_warn_and_decide():
    with pytest.warns(DeprecationWarning, match="cold_l2_cache"):
        plan = timing._plan(None, None, 25, 100, False, 64, None, False, True, max)
    assert not plan.cold and plan.flush_bytes == 64 << 20


def test_cpu_timer_starts_cold(monkeypatch):
    log = []
    monkeypatch.setattr(timers, "CacheFlush", lambda device, size: lambda: log.append("flush"))
    bench_cpu_time(lambda: log.append("call"), dry_run_iters=1, repeat_iters=3)
    assert log == ["call", "call"] + ["flush", "call"] * 3
    log.clear()
    bench_cpu_time(lambda: log.append("call"), dry_run_iters=0, repeat_iters=2, cold_cache=False)
    assert log == ["call"] * 3


@no_cuda
@pytest.mark.parametrize("option", [{"enable_cupti": True}, {"use_cuda_graph": True}])
def test_gpu_only_options_warn_on_the_cpu(option):
    with pytest.warns(UserWarning, match="host clock"):
        bench_gpu_time(lambda: None, args=(), num_iters=2, dry_run_iters=1, cold_l2_cache=False, **option)


@no_cuda
@pytest.mark.parametrize("name", ["cuda_event", "cudagraph", "cupti"])
def test_gpu_timers_need_a_gpu(name):
    with pytest.raises(RuntimeError, match=f"bench_gpu_time_with_{name} needs a CUDA device"):
        getattr(testing_utils, f"bench_gpu_time_with_{name}")(lambda: None)


def test_cpu_tensors_are_timed_on_the_host_even_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert timing._runs_on_cpu((torch.ones(1), [torch.ones(1)]), None)
    assert not timing._runs_on_cpu((), None)  # a closure: its device is unknown


def test_a_missing_cupti_warns_and_uses_events(monkeypatch):
    monkeypatch.setattr(timing, "_require_cuda", lambda name: None)
    monkeypatch.setattr(timing, "cupti_problem", lambda: "cupti-python is not installed")
    monkeypatch.setattr(timing, "event_times", lambda call, plan, flush: ["events"])
    monkeypatch.setattr(timing, "graph_times", lambda *a: ["graph"])
    monkeypatch.setattr(timers.Plan, "flush", lambda self, device=None: None)
    with pytest.warns(UserWarning, match="cupti-python is not installed; timing with CUDA events"):
        assert timing.bench_gpu_time_with_cupti(lambda: None) == ["events"]
    with pytest.warns(UserWarning, match="timing with a CUDA graph"):
        assert timing.bench_gpu_time_with_cupti(lambda: None, use_cuda_graph=True) == ["graph"]


def test_sleep_is_bounded(monkeypatch):
    naps = []
    monkeypatch.setattr(timers.time, "sleep", naps.append)
    for execution_time in (0.0, 5.0, 1e9, float("inf"), -1.0):
        sleep_after_kernel_run(execution_time)
    assert naps == [0.0, 0.005, 1.0, 1.0, 0.0]


def test_ranks_are_reduced_element_by_element(monkeypatch):
    assert timers.aggregate_gpu_time_across_ranks([1.0, 2.0], max) == [1.0, 2.0]  # no process group
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def gather(out, mine):
        out[:] = [mine, [5.0, 0.5]] if isinstance(mine, list) else [mine, 7.0]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert timers.aggregate_gpu_time_across_ranks([1.0, 2.0], max) == [5.0, 2.0]
    assert timers.aggregate_gpu_time_across_ranks(3.0, min) == 3.0


def test_signature_starts_with_the_published_parameters():
    published = [
        "fn", "dry_run_iters", "repeat_iters", "dry_run_time_ms", "repeat_time_ms", "l2_flush", "l2_flush_size_mb",
        "l2_flush_device", "sleep_after_run", "enable_cupti", "use_cuda_graph", "num_iters_within_graph",
        "input_args", "input_kwargs", "cold_l2_cache", "aggregate_op",
    ]  # fmt: skip
    parameters = inspect.signature(bench_gpu_time).parameters
    assert list(parameters)[: len(published)] == published
    assert parameters["args"].kind is inspect.Parameter.KEYWORD_ONLY


@needs_cuda
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("inputs", ["arguments", "closure"])
@pytest.mark.alone
def test_graph_and_event_times_agree(inputs, cold):
    x = torch.randn(4096, 4096, device="cuda")
    y = torch.empty_like(x)
    fn, args = (torch.neg, (x,)) if inputs == "arguments" else ((lambda: torch.neg(x, out=y)), ())
    common = {"input_args": args, "dry_run_iters": 5, "repeat_iters": 20, "cold_l2_cache": cold}
    events = statistics.median(bench_gpu_time(fn, **common))
    graph = statistics.median(bench_gpu_time(fn, use_cuda_graph=True, **common))
    assert 0.3 < graph / events < 3  # 134 MB moved: long enough that launch times hardly matter


@needs_cuda
def test_cupti_request_gives_a_time():
    x = torch.randn(1024, 1024, device="cuda")
    median, std = bench_gpu_time(torch.neg, args=(x,), enable_cupti=True, num_iters=30)
    assert 0 < median < 1e-2 and std >= 0
