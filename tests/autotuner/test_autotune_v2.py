# SPDX-License-Identifier: Apache-2.0
"""``autotune_v2``: results in a store that processes share."""

from __future__ import annotations

import json
import threading

import pytest

import flashinfer
from flashinfer import autotune, autotune_v2, autotune_v2_reload
from flashinfer._runtime.knobs import knobs
from flashinfer.autotuner import AutoTuner
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
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_results_of_other_processes(tuner, tmp_path):
    """Each result has a file; a tuner that has measured nothing finds all of them, and measures only what is new."""
    with autotune_v2(mode="tune", cache_root=tmp_path):
        assert choose(4)[1] == (1,)
    assert len(files(tmp_path)) == 2, "both buckets of the operator"
    contents = [json.loads(path.read_text()) for path in files(tmp_path)]
    assert {"_metadata": HERE, KEY: ["Sleeper", [1]]} in contents
    tuner.clear_cache()
    calls.clear()
    with autotune_v2(cache_root=str(tmp_path)):
        assert choose(4)[1] == (1,) and calls == []
        choose(4, op="other")
    assert calls and len(files(tmp_path)) == 4
    assert choose(4)[1] == (1,), "known after the context"


def test_looking_up(tuner, tmp_path):
    with autotune_v2(mode="lookup", cache_root=tmp_path):
        assert choose(4)[1] == -1 and calls == []
    assert files(tmp_path) == []
    with autotune_v2(cache_root=tmp_path):
        choose(4)
    tuner.clear_cache()
    with autotune_v2(mode="lookup", cache_root=tmp_path):
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
    del other._stores[tmp_path / "elsewhere"]
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
    for content in ("{", "[]", '{"_metadata": {}}', json.dumps({"_metadata": HERE, KEY: ["Sleeper"]})):
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
    path.write_text(json.dumps({"_metadata": HERE, KEY: ["Sleeper"]}) if content == "no result" else content)
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
    path.write_text(json.dumps({"_metadata": HERE, KEY: ["Sleeper", [47]]}))
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
    wrong_mode = pytest.raises(ValueError, match="autotune_v2: mode must be 'tune' or 'lookup', got 'fast'")
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
