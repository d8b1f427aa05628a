# SPDX-License-Identifier: Apache-2.0
"""The case registry and the measurement of one case, on fake ops."""

import json

import pytest
import torch

from flashinfer.testing import BenchTime, cold_cache

from .benchmark_path import BENCHMARKS  # isort: skip
import harness
import measure
import report
from harness import Bench, bf16, case, empty, fp32, grid, nbytes, rand

assert harness.__file__.startswith(str(BENCHMARKS))
SMALL = measure.Settings("cpu", dry_run_iters=1, num_iters=3)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Set an empty registry, a small cache to flush, and fixed peaks: 1 GB/s, 1 GFLOP/s."""
    monkeypatch.setattr(cold_cache, "_FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(harness, "CASES", {})
    monkeypatch.setattr(measure.Peak, "bytes_per_sec", 1e9)
    monkeypatch.setattr(measure.Peak, "flops_per_sec", lambda self, dtype: 1e9)


def test_grid_is_a_product_and_adds():
    points = grid(rows=[1, 2], cols=[3, 4]) + grid(rows=[5], cols=[6])
    assert [(p["rows"], p["cols"]) for p in points] == [(1, 3), (1, 4), (2, 3), (2, 4), (5, 6)]


def test_case_registers_points_per_device():
    @case("negate", grid(n=[1]), cuda=grid(n=[2, 3]))
    def negate(n, dtype=fp32):
        return Bench(run=lambda: None)

    found = harness.CASES["negate"]
    assert found.points == {"cpu": [{"n": 1}], "cuda": [{"n": 2}, {"n": 3}]}
    assert list(found.parameters) == ["n", "dtype"] and found.parameters["dtype"] is fp32


def test_case_names_are_not_taken_twice():
    def first():
        return Bench(run=lambda: None)

    def second():
        return Bench(run=lambda: None)

    second.__module__ = "bench_other"
    case("same")(first)
    with pytest.raises(ValueError, match="'same', expected one that"):
        case("same")(second)


def test_inputs_live_on_the_device_and_repeat(device):
    @case("inputs", grid(n=[4]))
    def build(n):
        return Bench(run=lambda: None, args=(rand(n, 2, bf16), empty(n, bf16), rand(3)))

    made = [harness.CASES["inputs"].make(device, {"n": 4}).args for _ in range(2)]
    x, y, z = made[0]
    assert x.shape == (4, 2) and x.dtype == bf16 and x.device.type == device
    assert y.shape == (4,) and z.dtype == fp32
    assert torch.equal(x, made[1][0])
    assert nbytes(x, y) == 4 * 2 * 2 + 4 * 2


def _copy_bench(**changes):
    x, y = torch.ones(500), torch.empty(500)
    fields = {"run": lambda x, y: y.copy_(x), "args": (x, y), "bytes": nbytes(x, y)}
    return Bench(**{**fields, **changes})


def test_measure_reports_rate_fraction_and_ratio(monkeypatch):
    times = iter([2e-6, 3e-6])
    monkeypatch.setattr(measure, "time_run", lambda *a, **k: BenchTime(next(times), 0.0))
    result = measure.measure("copy", {"n": 500, "dtype": fp32}, _copy_bench(baseline=lambda x, y: None), SMALL)
    assert result.backend == "cpu"
    assert result.tb_per_sec == pytest.approx(4000 / 2e-6 / 1e12)
    assert result.fraction == pytest.approx(4000 / 2e-6 / 1e9)
    assert result.speedup == pytest.approx(1.5)
    assert report.line(result) == "copy n=500 fp32   2.0 us   2.0 GB/s   200 % peak   1.50x torch"


def test_the_binding_ceiling_counts(monkeypatch):
    monkeypatch.setattr(measure, "time_run", lambda *a, **k: BenchTime(1.0, 0.0))
    result = measure.measure("op", {}, Bench(run=lambda: None, bytes=int(1e8), flops=int(5e8)), SMALL)
    assert result.fraction == 0.5
    assert measure.measure("op", {}, Bench(run=lambda: None), SMALL).fraction is None


def test_measure_times_for_real(device):
    settings = measure.Settings(device, dry_run_iters=1, num_iters=3)
    x = torch.ones(1000, device=device)
    bench = Bench(run=torch.neg, args=(x,), baseline=torch.neg, bytes=2 * nbytes(x))
    result = measure.measure("neg", {}, bench, settings)
    assert 0 < result.time.median < 1 and result.speedup > 0
    assert (result.host_us is None) == (device == "cpu")


def test_backends_are_named():
    bench = Bench(run={"fa2": min, "fa3": max}, baseline=sum)
    assert list(bench.backends("cuda")) == ["fa2", "fa3", "torch"]
    assert list(Bench(run=min).backends("cpu")) == ["cpu"]


def test_check_compares_returned_values():
    good = _copy_bench(reference=lambda x, y: x)
    measure.check(good, good.run, "copy")
    with pytest.raises(AssertionError, match="copy wrong"):
        measure.check(good, lambda x, y: x + 1, "copy wrong")


def test_check_compares_in_place_results_and_spares_the_inputs():
    x, r = torch.full((4,), 2.0), torch.ones(4)

    def double_and_add(x, r):
        r += x
        x *= 2

    bench = Bench(run=double_and_add, args=(x, r), results=(0, 1), reference=lambda x, r: (2 * x, r + x))
    measure.check(bench, bench.run, "double_and_add")
    assert torch.equal(x, torch.full((4,), 2.0)) and torch.equal(r, torch.ones(4))


def test_main_prints_a_line_per_point_and_writes_json(tmp_path, capsys, monkeypatch):
    import flashinfer

    monkeypatch.setattr(flashinfer, "__version__", "0.0.0", raising=False)

    @case("copy", grid(n=[8, 16], dtype=[bf16]))
    def copy(n, dtype):
        x, y = rand(n, dtype), empty(n, dtype)
        return Bench(run=lambda x, y: y.copy_(x), args=(x, y), bytes=nbytes(x, y))

    @case("gpu_only", cuda=grid(n=[1]))
    def gpu_only(n):
        raise AssertionError("not built on the CPU")

    @case("other", grid(n=[1]))
    def other(n):
        raise AssertionError("not selected")

    path = tmp_path / "out.json"
    results = harness.main(["-k", "copy,gpu", "--device", "cpu", "--num_iters", "3", "--json", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# ") and "host clock" in lines[0] and "1.0 GB/s" in lines[0]
    assert [line.split("   ")[0] for line in lines[1:]] == [
        "copy n=8 bf16", "copy n=16 bf16", "gpu_only: no cpu kernel, skipped",
    ]  # fmt: skip
    assert [r.point["n"] for r in results] == [8, 16]
    with pytest.raises(SystemExit):
        harness.main(["-k", "nothing", "--device", "cpu"])
    assert "-k is 'nothing', expected a part of one of copy, gpu_only, other" in capsys.readouterr().err
    written = json.loads(path.read_text())
    assert written["timer"] == "host clock"
    first = written["results"][0]
    assert (
        first["routine"] == "copy"
        and first["dtype"] == "bf16"
        and first["n"] == 8
        and first["us"] > 0
        and "peak_fraction" in first
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-k", "none"], "-k is 'none', expected a part of one of"),
        (["--json", "nowhere/x.json"], "--json is nowhere/x.json, expected a file in a folder that exists"),
        (["--num_iters", "0"], "'0' is not a number of runs, expected 1 or more"),
        (["--device", "cuda"], "--device is cuda, expected cpu (torch sees no GPU)"),
    ],
)
def test_main_explains_mistakes_before_it_measures(capsys, monkeypatch, words, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    case("one", grid(n=[4]))(lambda n: Bench(run=lambda x: x, args=(rand(n),)))
    with pytest.raises(SystemExit):
        harness.main(words)
    out, err = capsys.readouterr()
    assert out == "" and text in err


def test_peak_is_measured(monkeypatch):
    monkeypatch.undo()
    asked = []

    def fake(run, args, settings, cold):
        asked.append((run.__name__, tuple(args[0].shape)))
        return BenchTime(1.0, 0.0)

    monkeypatch.setattr(measure, "time_run", fake)
    peak = measure.Peak("cpu")
    assert peak.bytes_per_sec == peak.bytes_per_sec == 512 << 20
    assert peak.flops_per_sec(bf16) == 2 * 1024**3
    assert peak.flops_per_sec(torch.float8_e4m3fn) == 2 * peak.flops_per_sec(bf16)
    assert [name for name, _ in asked] == ["copy_", "mm"]  # each once
