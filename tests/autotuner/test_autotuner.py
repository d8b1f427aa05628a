# SPDX-License-Identifier: Apache-2.0
"""Choice of tactics: by size, by context, by runner."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer.autotuner import (
    AutoTuner,
    DynamicTensorSpec,
    TuningConfig,
    autotune,
    initializers,
    make_bucket_mapper,
    round_to_nearest_bucket,
)

from .sleeper import BUCKETS, CONFIG, TO_BUCKET, Sleeper, calls, choose, inputs_of


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
        assert choose(9, factor=2)[1] == (1,)  # bucket of 4 rows
        tried = len(calls)
        assert choose(100)[1] == (2,) and len(calls) == tried  # bucket of 16 rows was tried too
    assert not tuner.is_tuning_mode
    assert [choose(rows)[1] for rows in (1, 15, 16)] == [(1,), (1,), (2,)] and len(calls) == tried
    assert {rows for rows, *_ in calls} == {4, 16}
    assert [c for c in calls if c[2]] == [(16, -1, True, False, {"factor": 2}), (4, -1, True, False, {"factor": 2})]
    assert all(measured and kwargs == {"factor": 2} for _, tactic, _, measured, kwargs in calls if tactic != -1)
    assert tuner.stats.failed_tactics == {"sleep::Sleeper": {(3,)}} and tuner.stats.cache_misses == 0
    assert tuner.stats.tuned_op_successful_configs["sleep"] == tuner.stats.tuned_op_total_configs["sleep"] == 2
    assert choose(4, dtype=torch.float16)[1] == -1  # another extra key
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
        tensor_initializers=((1, initializers.autotuner_initializer_zeros),),
        inputs_pre_hook=lambda inputs: [*inputs[:2], "hooked"],
    )
    with autotune():
        choose(5, [Look(tactics=(1,))], config=config)
    assert [(8, 3), (16,), "hooked"] in seen and [(5, 3), (10,), "hooked"] in seen
    assert initializers.autotuner_initializer_rand_scaled((9,), torch.uint8, "cpu").dtype is torch.uint8
    assert set(initializers.autotuner_initializer_rand_scaled((99,), torch.bool, "cpu").tolist()) == {True, False}


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
    assert choose(7)[1] == -1  # 7 belongs to bucket 4 here, which was not tried
    for wrong, text in (
        ((), "tuning_buckets must have at least one size"),
        ((4, -1), "tuning_buckets must be .* 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=text), autotune(tuning_buckets=wrong):
            pass


@pytest.mark.parametrize("buckets", [["a"], [1.5], [None, 4]])
def test_buckets_are_whole_numbers(buckets):
    with (
        pytest.raises(ValueError, match=r"autotune: tuning_buckets must be whole numbers, got .*"),
        autotune(tuning_buckets=buckets),
    ):
        pass


def test_no_trial_inside_a_capture(tuner, monkeypatch):
    with autotune():
        choose(4)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose(4)[1] == (1,)
        with autotune(skip_ops="skipped"):
            assert choose(4, op="skipped")[1] == -1
        made = []
        config = TuningConfig(dynamic_tensor_specs=CONFIG.dynamic_tensor_specs, inputs_pre_hook=made.append)
        with pytest.raises(RuntimeError, match="active outer CUDA Graph capture"):
            choose(4, op="other", config=config)
        assert made == []


def test_time_budget(tuner, monkeypatch, caplog):
    """Check that no further size is measured once the budget is spent, and that what is known by then is used."""
    with autotune(time_budget=0):
        assert choose(100)[1] == -1 and calls == []
    seconds = iter([0.0, 9.9, 10.0, 10.0])  # entry, before the bucket of 16 rows, before that of 4 rows, again
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(seconds))
        with autotune(), autotune(time_budget=10):
            assert choose(100)[1] == (2,)
            assert choose(4)[1] == -1
    assert {rows for rows, *_ in calls} == {16}
    assert "time_budget is spent; using defaults of sleep for" in caplog.text
    with autotune():
        assert choose(4)[1] == (1,)


@pytest.mark.parametrize("budget", [-1, float("nan")])
def test_time_budgets_that_mean_nothing(tuner, budget):
    with (
        pytest.raises(ValueError, match="autotune: time_budget must be 0 seconds or more, got"),
        autotune(time_budget=budget),
    ):
        pass


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


@pytest.mark.parametrize("generated", [False, True])
def test_round_up_without_buckets(tuner, generated):
    """Check that sizes between two buckets of the operator use the larger one, also in later lookups."""
    buckets = (lambda rows: (4, 16)) if generated else BUCKETS
    config = TuningConfig(
        dynamic_tensor_specs=(DynamicTensorSpec(0, 0, buckets, TO_BUCKET),), constraint_specs=CONFIG.constraint_specs
    )
    with autotune(round_up=True):
        to_bucket = tuner.get_effective_map_to_tuning_buckets(config)
        sizes = (3, 4, 5, 16, 99)
        assert [to_bucket(x) for x in sizes] == ([4, 4, 8, 16, 16] if generated else [4, 4, 16, 16, 16])
        assert choose(9, config=config)[1] == (2,)
        tried = len(calls)
        assert choose(99, config=config)[1] == (2,) and choose(3, config=config)[1] == (1,) and len(calls) == tried
    assert choose(9, config=config)[1] == (1,)  # the operator's own rule
    with autotune(False, round_up=True):
        assert choose(9, config=config)[1] == (2,)


def test_contexts_inherit_each_setting(tuner):
    def at(x):
        return tuner.get_effective_map_to_tuning_buckets(CONFIG)(x)

    with autotune(round_up=True):
        with autotune(tuning_buckets=(2, 8)):
            assert at(3) == 8
            with autotune(round_up=False):
                assert at(3) == 2
        with autotune(round_up=False):
            assert at(5) == 4
        assert at(5) == 16
    with autotune(tuning_buckets=(2, 8)):
        assert at(3) == 2
        with autotune(round_up=True):
            assert at(3) == 8


def test_tuning_ends_with_the_last_context(tuner):
    """Contexts of all threads are counted: one that ends leaves the others tuning."""
    entered, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with autotune(True):
            entered.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with autotune(True):
        thread.start()
        assert entered.wait(10)
        with autotune(False):
            assert tuner.is_tuning_mode, "a context that looks up does not stop those around it"
    assert tuner.is_tuning_mode
    may_end.set()
    thread.join()
    assert not tuner.is_tuning_mode


def test_the_mode_can_be_assigned(tuner):
    tuner.is_tuning_mode = True
    assert choose(4)[1] == (1,)
    tuner.is_tuning_mode = False
    assert choose(4, op="other")[1] == -1


def test_what_search_cache_tells(tuner):
    def search(runners, rows=4):
        shapes = [x.shape if isinstance(x, torch.Tensor) else () for x in inputs_of(rows)]
        return tuner.search_cache("sleep", runners, shapes, CONFIG, inputs_of(rows))

    slow, fast = Sleeper("slow", (2,)), Sleeper("fast", (1,))
    assert search([slow, fast]) == (False, 0, -1, None)
    with autotune():
        choose(4, [slow, fast])
    is_hit, i, tactic, profile = search([slow, fast])
    assert (is_hit, i, tactic) == (True, 1, (1,)) and profile.get_opt_shapes() == ((4, 3), (8,), ())
    assert search([fast])[1] == 0 and search([slow], rows=4)[0] is False
    (known,) = {key: value for key, value in tuner.profiling_cache.items() if key.nearest_profile[0][0] == 4}.values()
    assert known == ((1,), profile)
    key = tuner._get_cache_key("sleep", slow, ((4, 3), (8,), ()), CONFIG, ("torch.float32",))
    tuner._file_configs[key.file_key] = ("Sleeper", (2,))
    assert search([slow, fast])[1:3] == (1, (1,))  # measured results take priority, whichever runner they belong to
    assert search([slow]) == (True, 0, (2,), None)


def test_runners_with_attributes_that_have_no_hash(tuner):
    class Holder(Sleeper):
        def __init__(self, values):
            super().__init__(tactics=(1,))
            self.values, self.plan_cache = values, {}

    values = [torch.ones(2)]
    one = Holder(values)
    assert hash(one) == hash(Holder(values)) and one == Holder(values) != Holder([torch.ones(2)])
    assert Holder(values[0]) == Holder(values[0]) != Holder(torch.ones(2))
    with autotune():
        choose(4, [one])
        one.plan_cache["filled"] = 1
    assert choose(4, [one])[1] == (1,) and choose(4, [Holder([])])[1] == -1


def test_tactics_that_are_lists(tuner):
    class Lists(Sleeper):
        def get_valid_tactics(self, inputs, profile):
            return [[1, [2]], [3, [4]]]

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            if tactic == [3, [4]]:
                raise RuntimeError("no such tactic")

    with autotune():
        assert choose(4, [Lists()])[1] == [1, [2]]
    assert tuner.stats.failed_tactics["sleep::Lists"] == {(3, (4,))}


def test_names_that_other_code_looks_at(tuner):
    from flashinfer.autotuner import autotuner as module

    assert module.ProfilingCacheKey is flashinfer.autotuner.ProfilingCacheKey and module.logger.name == "flashinfer"
    assert module._json_to_tactic(module._tactic_to_json((1, ["a"]))) == (1, ("a",))
    profiles = tuner._generate_optimization_profiles(CONFIG, inputs_of(9))
    assert [p.get_opt_shapes()[0][0] for p in profiles] == [4, 16]
    with autotune(tuning_buckets=(2, 8), round_up=True, skip_ops="one"), autotune(skip_ops="two"):
        assert tuner._override_tuning_buckets == (2, 8) and tuner._override_round_up is True
        assert tuner._effective_skip_ops == {"one", "two"} and tuner._active_tuning_contexts == 2
    before = tuner._find_nearest_profile_cached.cache_info().hits
    shapes = [x.shape if isinstance(x, torch.Tensor) else () for x in inputs_of(9)]
    for cold in (False, True):  # options that are not sizes do not affect the lookup
        config = TuningConfig(
            dynamic_tensor_specs=CONFIG.dynamic_tensor_specs,
            constraint_specs=CONFIG.constraint_specs,
            use_cold_l2_cache=cold,
        )
        assert tuner._find_nearest_profile(shapes, config) == ((4, 3), (-1,), ())
    assert tuner._find_nearest_profile_cached.cache_info().hits > before


def test_the_example_of_the_guide():
    text = (Path(flashinfer.__file__).parents[1] / "docs" / "autotuner.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Sum" in block)
    names: dict = {}
    exec(code, names)
    assert names["tactic"] in (0, 1)
    torch.testing.assert_close(names["y"], names["x"].sum(0), rtol=1e-4, atol=1e-4)
