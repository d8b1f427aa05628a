# SPDX-License-Identifier: Apache-2.0
"""Tactics that are never tried."""

from __future__ import annotations

import json

import pytest

import flashinfer
from flashinfer._runtime.knobs import knobs
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.autotuner import _collect_metadata as collect_metadata
from flashinfer.tactics_blocklist import TacticsBlocklist

from ..fresh_process import run_python
from .sleeper import CONFIG, Sleeper, calls, choose


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "blocked.json"


def test_a_list_is_written_and_read(path):
    TacticsBlocklist.save(path, {"sleep::Sleeper": [(1, [2]), 5], "other::Sleeper": [1]})
    content = json.loads(path.read_text())
    assert content["invalid_tactics"] == {"sleep::Sleeper": [[1, [2]], 5], "other::Sleeper": [1]}
    metadata = content["_metadata"]
    assert metadata["generator_version"] == "1.0" and metadata["generated_at"].startswith("20")
    assert metadata["flashinfer_version"] == flashinfer.__version__
    blocklist = TacticsBlocklist()
    assert not blocklist.is_loaded and blocklist.loaded_path is None and blocklist.summary() == {}
    assert blocklist.load(path) and blocklist.is_loaded and blocklist.loaded_path == str(path)
    assert blocklist.summary() == {"sleep::Sleeper": 2, "other::Sleeper": 1}
    for runner in (Sleeper(), Sleeper, "Sleeper"):
        assert blocklist.filter("sleep", runner, [[1, [2]], (1, (2,)), (1, 2), 5, 6]) == [(1, 2), 6]
    assert blocklist.filter("third", Sleeper(), (1, 5)) == [1, 5]
    TacticsBlocklist.save(path, {"sleep::Sleeper": [6]})
    assert blocklist.load(path) and blocklist.filter("sleep", Sleeper(), [5, 6, 7]) == [7]


@pytest.mark.parametrize(
    "metadata, fits",
    [({"gpu": "another"}, False), ({"gpu": "*"}, True), ({}, False), (None, True)],
)
def test_environments(path, metadata, fits):
    TacticsBlocklist.save(path, {"a::B": [1]}, metadata and {**collect_metadata(), **metadata})
    blocklist = TacticsBlocklist()
    assert blocklist.load(path) is fits and blocklist.is_loaded is fits and bool(blocklist.summary()) is fits


def test_files_that_are_no_lists(path):
    blocklist = TacticsBlocklist()
    with pytest.raises(FileNotFoundError):
        blocklist.load(path)
    path.parent.mkdir()
    for text, error in (("{", json.JSONDecodeError), ("[]", ValueError), ('{"invalid_tactics": 3}', ValueError)):
        path.write_text(text)
        with pytest.raises(error):
            blocklist.load(path)


def test_the_tuner_leaves_them_out(path, monkeypatch):
    TacticsBlocklist.save(path, {"sleep::Sleeper": [[1], [3]], "all::Sleeper": [[1], [2], [3]]})
    with knobs.override(tactics_blocklist=str(path)):
        monkeypatch.setattr(AutoTuner, "_instance", AutoTuner(warmup=1, repeat=1))
    with autotune():
        assert choose(4)[1] == (2,) and choose(4, op="other")[1] == (1,)
        assert {tactic for _, tactic, *_ in calls[:3]} == {-1, (2,)}
        calls.clear()
        assert choose(4, op="all")[1] == -1 and calls == []
    known = AutoTuner.get()
    key = known._get_cache_key("all", Sleeper(), ((4, 3), (8,), ()), CONFIG, ("torch.float32",))
    known._file_configs[key.file_key] = ("Sleeper", (1,))
    assert choose(4, op="all")[1] == (1,)  # known results are not filtered


@pytest.mark.parametrize(
    "content, text",
    [
        ('{"invalid_tactics": {"op::Runner": 5}}', "must have a list of tactics for 'op::Runner', got 5"),
        ('{"invalid_tactics": {"a::B": [1], "op::Runner": "abc"}}', "'op::Runner', got 'abc'"),
        ('{"invalid_tactics": {"op::Runner": null}}', "got None"),
        ("[" * 100_000, "nested too deep"),
        ('{"invalid_tactics": ' + "[" * 80 + "]" * 80 + "}", "nested deeper than 64 levels"),
        ("\0", "cannot be read"),
    ],
)
def test_a_damaged_list(path, caplog, content, text):
    """Check that the tuner is made, which every tuned op needs, and that nothing of the list is taken."""
    path.parent.mkdir()
    path.write_text(content)
    with knobs.override(tactics_blocklist=str(path)):
        assert AutoTuner()._blocklist.summary() == {}
    assert f"FLASHINFER_TACTICS_BLOCKLIST is {path}, which cannot be read" in caplog.text and text in caplog.text


def test_a_list_that_cannot_be_read(path, caplog):
    with knobs.override(tactics_blocklist=str(path)):
        assert AutoTuner()._blocklist.is_loaded is False
    assert "FLASHINFER_TACTICS_BLOCKLIST is" in caplog.text and "which cannot be read" in caplog.text


@pytest.mark.parametrize("module", ["flashinfer.tactics_blocklist", "flashinfer.autotuner.trials"])
def test_either_module_may_come_first(module):
    code = f"import {module}, flashinfer; flashinfer.tactics_blocklist.TacticsBlocklist(); flashinfer.autotune"
    run_python(["-c", code], check=True)


def test_names_that_programs_replace(path, monkeypatch):
    """Check that the published module looks its names up in itself."""
    TacticsBlocklist.save(path, {"a::B": [1]}, {"gpu": "H200"})
    monkeypatch.setattr("flashinfer.tactics_blocklist._collect_metadata", lambda: {"gpu": "H200"})
    assert TacticsBlocklist().load(path)
    monkeypatch.setattr("flashinfer.tactics_blocklist._collect_metadata", lambda: {"gpu": "H200", "cuda": "13"})
    assert not TacticsBlocklist().load(path)
    module = flashinfer.tactics_blocklist
    assert module._METADATA_KEY == "_metadata" and module._tactic_to_json((1, 2)) == [1, 2]
    assert module._tactic_to_json_hashable([1, [2]]) == (1, (2,))
    TacticsBlocklist.save(path, {}, {"gpu": "*", "cuda": "*"})
    empty = TacticsBlocklist()
    assert empty.load(path) and not empty.is_loaded
