# SPDX-License-Identifier: Apache-2.0
"""``autotune_v2``: results in a store that processes share."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest
import torch

import flashinfer
from flashinfer import MeasurementPolicy, autotune, autotune_cache, autotune_v2, autotune_v2_reload
from flashinfer._runtime.knobs import knobs
from flashinfer.autotuner import AutoTuner, trials
from flashinfer.autotuner import autotuner as autotuner_module
from flashinfer.jit import env as jit_env

from ..fresh_process import run_python
from .sleeper import Sleeper, calls, choose

HERE = {"flashinfer_version": "1", "gpu": "H200"}
KEY = "('sleep', 'Sleeper', ((4, 3), (-1,), ()), ('torch.float32',))"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    found = dict(HERE)
    monkeypatch.setattr(autotuner_module, "_collect_metadata", lambda: dict(found))
    return found


def files(root) -> list:
    """Return the files of results below a folder, and what is left over; each environment has a manifest besides."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "manifest.json")


def entry(tactic=None) -> str:
    """Return the text of a stored result; one without a tactic is none."""
    return json.dumps({"key": KEY, "runner": "Sleeper", **({"tactic": tactic} if tactic else {})})


def test_results_of_other_processes(tuner, tmp_path):
    """Each result has a file; a tuner that has measured nothing finds all of them, and measures only what is new."""
    with autotune_v2(mode="tune", cache_root=tmp_path):
        assert choose(4)[1] == (1,)
    assert len(files(tmp_path)) == 2, "both buckets of the operator"
    contents = [json.loads(path.read_text()) for path in files(tmp_path)]
    assert json.loads(entry([1])) in contents
    assert {path.parent.name for path in files(tmp_path)} == {"entries"}
    (manifest,) = tmp_path.glob("v2/*/manifest.json")
    text = json.dumps({**HERE, "cache_schema": "v2"}, sort_keys=True, separators=(",", ":"))
    assert json.loads(manifest.read_text()) == json.loads(text)
    assert manifest.parent.name == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert f"{hashlib.sha256(KEY.encode()).hexdigest()[:24]}.json" in {path.name for path in files(tmp_path)}
    tuner.clear_cache()
    calls.clear()
    with autotune_v2(cache_root=str(tmp_path)):
        assert choose(4)[1] == (1,) and calls == []
        choose(4, op="other")
    assert calls and len(files(tmp_path)) == 4
    assert choose(4)[1] == (1,), "known after the context"


def test_looking_up(tuner, tmp_path):
    with autotune_v2(mode="replay", cache_root=tmp_path):
        assert choose(4)[1] == -1 and calls == []
    assert files(tmp_path) == []
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    tuner.clear_cache()
    with autotune_v2(mode="replay", cache_root=tmp_path):
        assert choose(4)[1] == (1,)


def test_the_first_result_stays(tuner, tmp_path):
    """Two processes measure at the same time and differ: after a reload both have what was published first."""
    with autotune_v2(cache_root=tmp_path):
        choose(4, [Sleeper(tactics=(2,))])
    before = [path.read_text() for path in files(tmp_path)]
    other = AutoTuner(warmup=1, repeat=3)
    AutoTuner._instance = other
    with autotune_v2(cache_root=tmp_path / "elsewhere"):
        choose(4)
    other.open_store(tmp_path).publish(other._measured())
    assert choose(4)[1] == (1,), "what was measured here, until the reload"
    assert [path.read_text() for path in files(tmp_path) if "elsewhere" not in path.parts] == before
    autotune_v2_reload()
    assert choose(4)[1] == (2,)
    AutoTuner._instance = tuner
    autotune_v2_reload()
    assert choose(4)[1] == (2,)


def test_reload_finds_what_others_have_added(tuner, tmp_path):
    with autotune_v2(cache_root=tmp_path):
        pass
    AutoTuner._instance = AutoTuner(warmup=1, repeat=3)
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    AutoTuner._instance = tuner
    assert choose(4)[1] == -1
    autotune_v2_reload()
    assert choose(4)[1] == (1,)


def test_without_a_store(tmp_path):
    """The contexts of SGLang: files are its own affair."""
    with knobs.override(autotune_dir=str(tmp_path)):
        with autotune(True, cache=None, skip_ops={"other"}), autotune_v2(mode="tune", persistent_cache=False):
            assert choose(4)[1] == (1,) and choose(4, op="other")[1] == -1
        autotune_v2_reload()
    assert files(tmp_path) == [] and choose(4)[1] == (1,)


@pytest.mark.parametrize("is_named", [False, True])
def test_where_the_store_is(tmp_path, monkeypatch, is_named):
    monkeypatch.setattr(jit_env, "FLASHINFER_CACHE_DIR", tmp_path / "cache", raising=False)
    with knobs.override(autotune_dir=str(tmp_path / "named") if is_named else ""), autotune_v2(skip_ops="other"):
        choose(4)
        choose(4, op="other")
    assert len(files(tmp_path / ("named" if is_named else "cache/autotune"))) == len(files(tmp_path)) == 2


def test_other_environments(tuner, tmp_path, environment):
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    first = files(tmp_path)
    environment["gpu"] = "H100"
    tuner.clear_cache()
    calls.clear()
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    assert calls and len(files(tmp_path)) == 4 and set(first) < set(files(tmp_path))


def test_damaged_files(tuner, tmp_path, caplog):
    """Check that the other result is used, whatever the damage."""
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    broken, *_ = files(tmp_path)
    for content in ("{", "[]", '{"_metadata": {}}', entry()):
        broken.write_text(content)
        tuner.clear_cache()
        with autotune_v2(mode="lookup", cache_root=tmp_path):
            assert len(tuner._file_configs) == 1
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"_metadata": {}}', "\0", "no result"])
def test_damaged_files_are_replaced(tuner, tmp_path, content):
    """Check that a process measures again once, not each process for ever."""
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    (path,) = (path for path in files(tmp_path) if KEY in path.read_text())
    good = path.read_text()
    path.write_text(entry() if content == "no result" else content)
    for has_to_measure in (True, False):
        tuner.clear_cache()
        calls.clear()
        with autotune_v2(cache_root=tmp_path):
            assert choose(4)[1] == (1,)
        assert bool(calls) == has_to_measure
    assert path.read_text() == good


def test_tactics_of_the_store_that_do_not_exist(tuner, tmp_path, caplog):
    """Check that the file of such a result is replaced, and that of another is not."""
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    (path,) = (path for path in files(tmp_path) if KEY in path.read_text())
    good = path.read_text()
    path.write_text(entry([47]))
    tuner.clear_cache()
    with autotune_v2(mode="lookup", cache_root=tmp_path):
        assert choose(4)[1] == -1
    assert f"{path} has the tactic (47,) for sleep, which is none of the 3 that exist" in caplog.text
    tuner.clear_cache()
    with autotune_v2(cache_root=tmp_path):
        assert choose(4)[1] == (1,)
    assert path.read_text() == good


@pytest.mark.parametrize("root", ["x" * 300, "nul\0", "~no-such-user-37/store", "file"])
def test_unusable_folders(tmp_path, caplog, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with autotune_v2(cache_root=root):
        assert choose(4)[1] == (1,), "results are used in this process"
    assert "cannot be written" in caplog.text or (tmp_path / root).is_dir()


def test_a_store_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with autotune_v2(cache_root=tmp_path / "file"):
        assert choose(4)[1] == (1,)
    assert "results cannot be written" in caplog.text and choose(4)[1] == (1,)


def test_results_survive_an_error(tmp_path):
    with pytest.raises(KeyError), autotune_v2(cache_root=tmp_path):
        choose(4)
        raise KeyError
    assert len(files(tmp_path)) == 2


def test_wrong_mode():
    wrong_mode = pytest.raises(ValueError, match="autotune_v2: mode must be 'tune' or 'replay', got 'fast'")
    with wrong_mode, autotune_v2(mode="fast"):
        pass
    wrong_budget = pytest.raises(ValueError, match="time_budget must be 0 seconds or more, got -1")
    with wrong_budget, autotune_v2(time_budget=-1, persistent_cache=False):
        pass


def test_many_publish_at_once(tmp_path):
    """Threads with tuners of their own publish the same keys: each file is whole, and one of theirs."""
    stores = [AutoTuner().open_store(tmp_path) for _ in range(8)]
    keys = [f"key {i}" for i in range(20)]
    threads = [
        threading.Thread(target=store.publish, args=(dict.fromkeys(keys, ("R", (i,))),))
        for i, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stores[0].read()
    assert set(found) == set(keys) and all(runner == "R" and 0 <= i < 8 for runner, (i,) in found.values())
    assert len(files(tmp_path)) == len(keys), "no temporary file is left"


def test_a_product_tuned_by_another_process(tmp_path):
    """A second process takes the choice of the first one, without measuring."""
    program = f"""
import torch, flashinfer
from flashinfer.autotuner import AutoTuner
a, b = torch.ones(16, 64).bfloat16(), torch.ones(64, 32).bfloat16()
with flashinfer.autotune_v2(cache_root={str(tmp_path)!r}, tuning_buckets=(16,)):
    flashinfer.mm_bf16(a, b, backend="auto")
print(len(AutoTuner.get().profiling_cache), len(AutoTuner.get()._file_configs))
"""
    assert [run_python(["-c", program], check=True).stdout.split() for _ in range(2)] == [["1", "0"], ["0", "1"]]


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="persistent_cache must be a bool"), autotune_v2("tune", str(tmp_path)):
        pass
    with autotune_v2("replay", False), autotune():
        nested = pytest.raises(RuntimeError, match="nested autotune_v2 contexts are unsupported")
        with nested, autotune_v2(persistent_cache=False):
            pass
    with autotune(), autotune_v2("tune", True, tmp_path):
        choose(4)
    assert len(files(tmp_path)) == 2
    for bad, text in (
        ({"execution_mode": "fast"}, "MeasurementPolicy.execution_mode must be"),
        ({"_timer": "sun"}, "MeasurementPolicy._timer must be"),
        ({"execution_mode": "eager", "_timer": "cupti"}, "rejects"),
    ):
        with pytest.raises(ValueError, match=text):
            MeasurementPolicy(**bad)


def test_policies(tuner, tmp_path, monkeypatch):
    """Check that a policy decides how trials are made, and that stores of different policies do not mix."""
    seen = []
    monkeypatch.setattr(trials, "median_ms", lambda call, lists, **how: seen.append(how) or 1.0)
    policy = MeasurementPolicy("cuda_graph", cold_l2=True, _timer="events_no_delay")
    assert policy.manifest_fields() == {
        "measure_execution_mode": "cuda_graph",
        "measure_cold_l2": True,
        "measure_timer": "events_no_delay",
    }
    assert MeasurementPolicy().manifest_fields() == {} and MeasurementPolicy().use_cuda_graph is None
    with autotune(cuda_graph_profile_replays=7), autotune_v2("tune", True, tmp_path, policy):
        choose(4)
    wanted = {"use_cuda_graph": True, "is_cold": True, "delay_us": 0, "uses_events": True, "repeat": 7}
    assert all(how.items() >= wanted.items() for how in seen) and seen
    tuner.clear_cache()
    with autotune_v2("replay", True, tmp_path):
        assert choose(4)[1] == -1, "another policy"
    with autotune_v2("replay", True, tmp_path, policy):
        assert choose(4)[1] != -1


def test_the_store_by_key(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_DIR", str(tmp_path / "old"))
    assert autotune_cache.get_default_cache_root() == tmp_path / "old"
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
    assert autotune_cache.get_default_cache_root() == tmp_path
    store = autotune_cache.ManagedAutotuneCache(HERE)
    assert store.lookup("key") is None and store.preload() == (0, 0, 0)
    fields = {"dtype": torch.bfloat16, "profile": ((4, 3), ())}
    store.publish("key", "Sleeper", (1, "a"), fields, {"execution_mode": "eager"})
    (path,) = files(tmp_path)
    assert json.loads(path.read_text())["key_fields"] == {
        "dtype": {"__dtype__": "bfloat16"},
        "profile": {"__tuple__": [{"__tuple__": [4, 3]}, {"__tuple__": []}]},
    }
    other = autotune_cache.ManagedAutotuneCache(HERE, tmp_path)
    found = autotune_cache.ManagedCacheEntry("Sleeper", (1, "a"), {"execution_mode": "eager"})
    assert other.lookup("key") == found and other.preload() == (1, 1, 0)
    path.write_text("{")
    assert other.lookup("key") == found
    other.clear_memo()
    assert other.lookup("key") is None and other.preload() == (0, 1, 1)
    assert autotune_cache.ManagedAutotuneCache({**HERE, "gpu": "H100"}, tmp_path).lookup("key") is None


def test_runners_compile_before_trials():
    """Check that what a runner compiles for its tactics is asked for once per profile, before the first trial."""
    order = []

    class Compiling(Sleeper):
        def precompile_tactics(self, inputs, tactics, profile, **kwargs):
            order.append(list(tactics))

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            order.append("run")
            return super().forward(inputs, tactic, do_preparation, **kwargs)

    with autotune_v2("tune", False):
        choose(4, [Compiling()])
    assert order[0] != "run" and sum(one != "run" for one in order) == 2, "two buckets"


def test_names_of_the_published_module():
    names = "round_to_nearest_bucket make_bucket_mapper DynamicTensorSpec ConstraintSpec ValueProfileArena StaticDim "
    names += "DynamicDim autotune is_in_profile_measurement set_autotune_process_group get_autotune_process_group"
    for name in names.split():
        assert getattr(autotuner_module, name) is getattr(flashinfer.autotuner, name)


def test_names():
    assert flashinfer.autotune_v2 is flashinfer.autotuner.autotune_v2
    assert flashinfer.autotune_v2_reload is flashinfer.autotuner.autotune_v2_reload


def test_file_systems_without_links(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    assert len(files(tmp_path)) == 2 and len(AutoTuner.get().open_store(tmp_path).read()) == 2
