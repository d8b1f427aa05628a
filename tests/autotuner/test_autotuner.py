# SPDX-License-Identifier: Apache-2.0
"""Tuning of runners whose times are known: they turn the clock of the measurement on."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import torch

import flashinfer
from flashinfer.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
    autotune,
    is_in_profile_measurement,
    make_bucket_mapper,
    round_to_nearest_bucket,
)
from flashinfer.autotuner import profiles as autotuner_profiles
from flashinfer.knobs import knobs
from flashinfer.testing import timers

BUCKETS = (4, 16)
TO_BUCKET = make_bucket_mapper(BUCKETS)


class Sleeper(TunableRunner):
    """Tactic ``(n,)`` of rows up to 4 takes 4 n ms, of more 4 (4 - n); n = 3 fails."""

    def __init__(self, name="one", tactics=(1, 2, 3)):
        self.name, self.tactics = name, tactics

    def get_valid_tactics(self, inputs, profile):
        assert profile.get_opt_shapes()[0] == inputs[0].shape
        return [(n,) for n in self.tactics]

    def get_cache_key_extras(self, inputs):
        return (str(inputs[0].dtype),)

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        calls.append((inputs[0].shape[0], tactic, do_preparation, is_in_profile_measurement(), kwargs))
        if tactic == -1:
            return inputs[0]
        if tactic == (3,):
            raise RuntimeError("no such tactic")
        clock.seconds += (tactic[0] if inputs[0].shape[0] <= 4 else 4 - tactic[0]) / 250
        return inputs[0]


calls: list = []
clock = SimpleNamespace(seconds=0.0)
CONFIG = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), BUCKETS, TO_BUCKET),),
    constraint_specs=(ConstraintSpec(1, 0, lambda shapes: 2 * shapes[0][0]),),
)


def inputs_of(rows, dtype=torch.float32):
    return [torch.ones(rows, 3, dtype=dtype), torch.ones(2 * rows), "no tensor"]


def choose(rows, runners=None, op="sleep", config=CONFIG, dtype=torch.float32, **kwargs):
    return AutoTuner.get().choose_one(op, runners or [Sleeper()], config, inputs_of(rows, dtype), **kwargs)


@pytest.fixture(autouse=True)
def tuner(monkeypatch):
    tuner = AutoTuner(warmup=1, repeat=3)
    monkeypatch.setattr(AutoTuner, "_instance", tuner)
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    calls.clear()
    return tuner


def test_names():
    assert flashinfer.autotune is autotune and flashinfer.autotuner.AutoTuner is AutoTuner
    with pytest.raises(AttributeError, match="module 'flashinfer' has no attribute 'autotuned'"):
        _ = flashinfer.autotuned


def test_buckets():
    assert [round_to_nearest_bucket(x, BUCKETS) for x in (0, 4, 15, 16, 99)] == [4, 4, 4, 16, 16]
    assert [round_to_nearest_bucket(x, BUCKETS, True) for x in (0, 4, 5, 16, 99)] == [4, 4, 16, 16, 16]
    assert make_bucket_mapper((16, 4, 4), True)(5) == 16 and make_bucket_mapper(BUCKETS) is TO_BUCKET


def test_nothing_is_tried_without_autotune(tuner):
    runner, tactic = choose(4)
    assert runner == Sleeper() and tactic == -1 and calls == []
    assert tuner.stats.cache_misses == 1 and not tuner.is_tuning_mode
    with autotune(False):
        assert choose(4)[1] == -1 and calls == []


def test_the_fastest_tactic_of_each_bucket(tuner):
    with autotune():
        assert tuner.is_tuning_mode
        assert choose(9, factor=2)[1] == (1,)  # the bucket of 4
        tried = len(calls)
        assert choose(100)[1] == (2,) and len(calls) == tried  # that of 16 was tried, too
    assert not tuner.is_tuning_mode
    assert [choose(rows)[1] for rows in (1, 15, 16)] == [(1,), (1,), (2,)] and len(calls) == tried
    assert {rows for rows, *_ in calls} == {4, 16}
    assert [c for c in calls if c[2]] == [(16, -1, True, False, {"factor": 2}), (4, -1, True, False, {"factor": 2})]
    assert all(measured and kwargs == {"factor": 2} for _, tactic, _, measured, kwargs in calls if tactic != -1)
    assert tuner.stats.failed_tactics == {"sleep::Sleeper": [(3,), (3,)]} and tuner.stats.cache_misses == 0
    assert tuner.stats.tuned_op_successful_configs["sleep"] == tuner.stats.tuned_op_total_configs["sleep"] == 2
    assert choose(4, dtype=torch.float16)[1] == -1  # another extra
    assert choose(4, op="other")[1] == -1
    assert choose(4, [Sleeper("two")])[1] == -1  # a runner with other attributes
    tuner.clear_cache()
    assert choose(4)[1] == -1


def test_inputs_of_a_trial(tuner):
    seen = []

    class Look(Sleeper):
        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            seen.append([x.shape if isinstance(x, torch.Tensor) else x for x in inputs])

    config = TuningConfig(
        dynamic_tensor_specs=(DynamicTensorSpec(0, 0, lambda rows: (rows, 8), lambda rows: rows),),
        constraint_specs=CONFIG.constraint_specs,
        tensor_initializers=(None, autotuner_profiles.autotuner_initializer_zeros),
        inputs_pre_hook=lambda inputs: [*inputs[:2], "hooked"],
    )
    with autotune():
        choose(5, [Look(tactics=(1,))], config=config)
    assert [(8, 3), (16,), "hooked"] in seen and [(5, 3), (10,), "hooked"] in seen
    assert autotuner_profiles.autotuner_initializer_rand_scaled((9,), torch.uint8, "cpu").dtype is torch.uint8
    assert set(autotuner_profiles.autotuner_initializer_rand_scaled((99,), torch.bool, "cpu").tolist()) == {True, False}


def test_several_runners_and_none_that_works(tuner):
    slow, fast = Sleeper("slow", (2,)), Sleeper("fast", (1,))
    with autotune():
        assert choose(4, [slow, fast]) == (fast, (1,))
        assert choose(4, [Sleeper("broken", (3,))], op="broken")[1] == -1
        tried = len(calls)
        assert choose(4, [Sleeper("broken", (3,))], op="broken")[1] == -1 and len(calls) == tried
    assert tuner.stats.failed_profiling_count["broken"]


def test_buckets_and_operators_of_a_context(tuner):
    with autotune(tuning_buckets=[7, 2, 7], round_up=True, skip_ops="skipped"):
        assert tuner.get_effective_map_to_tuning_buckets(CONFIG)(3) == 7
        with autotune(skip_ops={"others"}):
            assert choose(3, op="skipped")[1] == choose(3, op="others")[1] == -1 and calls == []
            assert choose(3)[1] == (2,)
        assert {rows for rows, *_ in calls} == {2, 7}
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(tuner.get_effective_map_to_tuning_buckets(CONFIG)(3)))
        thread.start()
        thread.join()
        assert elsewhere == [4]
    assert choose(7)[1] == -1  # 7 is of the bucket 4 here, which was not tried
    for wrong, text in (((), "tuning_buckets is empty"), ((4, -1), "tuning_buckets has -1")):
        with pytest.raises(ValueError, match=text), autotune(tuning_buckets=wrong):
            pass


def test_results_in_a_file(tuner, tmp_path, monkeypatch):
    path = tmp_path / "new" / "tuned.json"
    with autotune(cache=path):
        choose(4)
    content = json.loads(path.read_text())
    assert content["('sleep', 'Sleeper', ((4, 3), (-1,), ()), ('torch.float32',))"] == ["Sleeper", [1]]
    assert content["_metadata"]["flashinfer_version"] == flashinfer.__version__ and list(content) == sorted(content)
    tuner.clear_cache()
    calls.clear()
    written = path.stat().st_mtime_ns
    with autotune(cache=path):
        assert choose(4)[1] == (1,) and calls == []  # a tuple again
    assert path.stat().st_mtime_ns == written
    with knobs.override(autotuner_load_from_file="1"), autotune(cache=path):
        assert choose(4)[1] == (1,) and choose(4, op="other")[1] == -1 and calls == []

    for changed, is_kept in (("9.9", True), ("unknown", False), (None, False)):
        content["_metadata"]["cuda_version"] = changed
        if changed is None:
            del content["_metadata"]["cuda_version"]
        path.write_text(json.dumps(content))
        tuner.clear_cache()
        assert not tuner.load_configs(path)
        with autotune(cache=path):
            assert choose(4, [Sleeper(tactics=(1,))])[1] == (1,)
        assert (json.loads(path.read_text())["_metadata"].get("cuda_version") == changed) == is_kept
    content["_metadata"]["cuda_version"] = "*"
    path.write_text(json.dumps(content))
    assert tuner.load_configs(path)
    path.write_text("{")
    assert not tuner.load_configs(path)


def test_results_that_cannot_be_written(tuner, tmp_path, caplog):
    """A server that has tuned goes on; an error of its own is the one that is raised."""
    (tmp_path / "file").touch()
    with autotune(cache=tmp_path / "file" / "results.json"):
        choose(4)
    assert "results cannot be written to" in caplog.text and "File exists" in caplog.text
    with pytest.raises(KeyError), autotune(cache=tmp_path):
        choose(4, op="other")
        raise KeyError
    assert choose(4, op="other")[1] == (1,)


@pytest.mark.parametrize("buckets", [["a"], [1.5], [None, 4]])
def test_buckets_are_whole_numbers(buckets):
    with (
        pytest.raises(ValueError, match=r"autotune: tuning_buckets is .*, expected whole numbers"),
        autotune(tuning_buckets=buckets),
    ):
        pass


def test_no_trial_inside_a_capture(tuner, monkeypatch):
    with autotune():
        choose(4)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose(4)[1] == (1,)
        with pytest.raises(
            RuntimeError, match="other is being captured in a CUDA graph with sizes that were not tuned"
        ):
            choose(4, op="other")


def test_errors_inside_end_the_context(tuner):
    with pytest.raises(ZeroDivisionError), autotune():
        _ = 1 / 0
    assert not tuner.is_tuning_mode


def test_on_a_gpu(tuner):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.ones(1 << 20, device="cuda")

    class Adder(Sleeper):
        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            for _ in range(1 if tactic == -1 else 8 * tactic[0]):
                inputs[0].add(1)

    for options in ({}, {"use_cuda_graph": True}, {"use_cold_l2_cache": True}):
        with autotune():
            adder = Adder(str(options), (3, 1, 2))
            assert tuner.choose_one("add", [adder], TuningConfig(**options), [x])[1] == (1,)
