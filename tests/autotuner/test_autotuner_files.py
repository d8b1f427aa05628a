# SPDX-License-Identifier: Apache-2.0
"""Result files of this and of other processes and machines."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import flashinfer
from flashinfer._runtime.knobs import knobs
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.autotuner import autotuner as autotuner_module

from .sleeper import Sleeper, calls, choose

HERE = {"flashinfer_version": "1", "cuda_version": "12.8", "gpu": "H200"}
KEY = "('sleep', 'Sleeper', ((4, 3), (-1,), ()), ('torch.float32',))"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(autotuner_module, "_collect_metadata", lambda: dict(HERE))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "tuned.json"


def write(path, results=None, **special):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**special, **(results or {})}))


def read(path):
    return json.loads(path.read_text())


def tune(tuner, op="sleep"):
    with autotune():
        choose(4, op=op)


def test_metadata(monkeypatch):
    found = flashinfer.autotuner._collect_metadata()
    assert found["flashinfer_version"] == flashinfer.__version__ and "none" not in found.values()
    here = ["gpu"] if torch.cuda.is_available() else ["gpu", "cpu"]  # results of a CPU must not serve every other
    assert list(found)[1:] == ["cuda_version", "cublas_version", "cudnn_version", "cudnn_frontend_version", *here]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert autotuner_module._get_cudnn_backend_version() == "91002"


def test_results_in_a_file(tuner, path):
    with autotune(cache=path):
        choose(4)
    content = read(path)
    assert content[KEY] == ["Sleeper", [1]]
    assert content["_metadata"] == HERE and list(content) == sorted(content)
    tuner.clear_cache()
    calls.clear()
    written = path.stat().st_mtime_ns
    with autotune(cache=path):
        assert choose(4)[1] == (1,) and calls == []  # converted back to a tuple
    assert path.stat().st_mtime_ns == written
    with knobs.override(autotuner_load_from_file="1"), autotune(cache=path):
        assert choose(4)[1] == (1,) and choose(4, op="other")[1] == -1 and calls == []


@pytest.mark.parametrize("changed", ["13.0", "unknown", "None", None, "missing", "no dict"])
@pytest.mark.parametrize("way", ["context", "save"])
def test_files_of_other_environments(tuner, path, changed, way, caplog):
    """Check that a file with another value is kept, and that a file without the value is replaced."""
    metadata = {**HERE, "cuda_version": changed}
    if changed == "missing":
        del metadata["cuda_version"]
    write(path, {"theirs": ["R", 1]}, _metadata=metadata if changed != "no dict" else "12.8")
    before = read(path)
    assert tuner.load_configs(path) is False and tuner._file_configs == {}
    if way == "context":
        with autotune(cache=path):
            choose(4)
    else:
        tune(tuner)
        tuner.save_configs(path)
    assert tuner._dirty == (changed == "13.0")
    if changed == "13.0":
        assert read(path) == before
    else:
        assert read(path)["_metadata"] == HERE and KEY in read(path) and "theirs" not in read(path)
    assert caplog.text.count("different environment") == 1


@pytest.mark.parametrize("gpu", ["H200", "*", None])
def test_files_that_fit_are_merged(tuner, path, gpu):
    """Check files that another process saved meanwhile: all their results are kept; results of this process win."""
    special = {} if gpu is None else {"_metadata": {**HERE, "gpu": gpu, "note": "kept"}}
    write(path, {"old": ["R", 0]}, **special)
    assert tuner.load_configs(path)
    write(path, {"theirs": ["R", [2]], KEY: ["Sleeper", [7]]}, _unknown=3, **special)
    tune(tuner)
    tuner.save_configs(path)
    content = read(path)
    assert content["old"] == ["R", 0] and content["theirs"] == ["R", [2]] and content[KEY] == ["Sleeper", [1]]
    assert content["_metadata"] == special.get("_metadata", HERE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_several_that_save_at_once(path):
    """Check concurrent saves: each merges what the others wrote. Threads use separate locks, as processes do."""

    def save_often(name):
        tuner = AutoTuner()
        for i in range(10):
            tuner._file_configs = {f"{name} {i}": ("R", i)}
            tuner.save_configs(path)

    threads = [threading.Thread(target=save_often, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(path)["_generation"] == 40 and len(read(path)) == 2 + 40


def test_loading(tuner, path):
    with pytest.raises(FileNotFoundError):
        tuner.load_configs(path)
    write(path, {"a": ["R", [1, [2]]], "_b": ["R", 1]})
    assert tuner.load_configs(str(path)) and tuner._file_configs == {"a": ("R", (1, (2,)))}
    write(path, {"c": ["R", None]}, _metadata=HERE)
    assert tuner.load_configs(path) and set(tuner._file_configs) == {"a", "c"}
    with autotune(False, cache=path):
        assert set(tuner._file_configs) == {"c"}
    with autotune(False, cache=path.with_name("none.json")):
        assert tuner._file_configs == {}
    path.write_text("{")
    with pytest.raises(json.JSONDecodeError):
        tuner.load_configs(path)
    with autotune(cache=path):
        choose(4)
    assert KEY in read(path)


def test_each_kind_of_mismatch_is_said_once(tuner, path, caplog):
    for gpu, count in (("A100", 1), ("B200", 1), ("unknown", 2), (None, 2)):
        write(path, _metadata={**HERE, "gpu": gpu})
        assert not tuner.load_configs(path)
        assert caplog.text.count("different environment") == count


def test_what_was_not_saved_yet_is_written(tuner, path):
    tune(tuner)
    with autotune(False, cache=path):
        choose(4, op="other")
    assert not path.exists() and tuner._dirty
    with autotune(cache=path):
        pass
    assert KEY in read(path) and not tuner._dirty


def test_results_that_cannot_be_written(tuner, tmp_path, caplog):
    """Check that a failed write is only logged, and that an exception of the program itself is still raised."""
    (tmp_path / "file").touch()
    with autotune(cache=tmp_path / "file" / "results.json"):
        choose(4)
    assert "results cannot be written to" in caplog.text and "File exists" in caplog.text
    with pytest.raises(KeyError), autotune(cache=tmp_path):
        choose(4, op="other")
        raise KeyError
    assert choose(4, op="other")[1] == (1,)


def test_records_of_a_product(tuner, path):
    assert tuner.get_namespaced_records("product") == {}
    tuner.publish_namespaced_records("product", {"a": (1, 2)})
    tuner.get_namespaced_records("product")["a"].append(3)  # changes a copy
    with autotune(cache=path):
        pass
    assert read(path)["_records"] == {"product": {"a": [1, 2]}}
    tuner.publish_namespaced_records("other", {"b": 1})
    tuner.save_configs(path)

    later = AutoTuner()
    assert later.load_configs(path) and later.get_namespaced_records("product") == {"a": [1, 2]}
    tuner.publish_namespaced_records("product", {"c": 1})
    tuner.save_configs(path)
    later.publish_namespaced_records("product", {"d": 1})
    before = read(path)
    with pytest.raises(RuntimeError, match="must have generation 2, got 3"):
        later.save_configs(path)
    assert read(path) == before and before["_records"] == {"product": {"c": 1}, "other": {"b": 1}}
    assert later.load_configs(path) and later.get_namespaced_records("product") == {"d": 1}
    later.save_configs(path)
    assert read(path)["_records"] == {"product": {"d": 1}, "other": {"b": 1}}
    with pytest.raises(ValueError, match="records must be a dict"):
        later.publish_namespaced_records("product", [1])


def test_tactics_that_json_has_no_word_for(tuner, path, caplog):
    class Objects(Sleeper):
        def get_valid_tactics(self, inputs, profile):
            return [torch.float16]

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            pass

    with autotune(cache=path):
        assert choose(4, [Objects()])[1] is torch.float16
    assert not path.exists() and "lists and tuples of them, got torch.float16" in caplog.text
