# SPDX-License-Identifier: Apache-2.0
"""Tactics of a file are compared with those that exist: a file may be damaged, or of a build with other tiles."""

from __future__ import annotations

import json

import pytest
import torch

import flashinfer.fused_moe
from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig, autotune

from .sleeper import CONFIG, Sleeper, calls, choose, inputs_of

BAD = [47, 3.5, "x", None, [48, 1], [[48]], {}, {"a": [1]}, True]


def spoil(path, tactic):
    """Replace the tactic of every result of a file."""
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({key: value if key[0] == "_" else [value[0], tactic] for key, value in saved.items()}))


@pytest.mark.parametrize("tactic", BAD, ids=str)
@pytest.mark.parametrize("tunes", [False, True])
def test_tactics_that_do_not_exist(tuner, tmp_path, caplog, tactic, tunes):
    """Check that the default is used, or that tuning measures again and mends the file; one warning for each size."""
    path = tmp_path / "tuned.json"
    with autotune(cache=path):
        choose(4)
    good = json.loads(path.read_text())
    spoil(path, tactic)
    tuner.clear_cache()
    calls.clear()
    with autotune(tunes, cache=path):
        assert [choose(4)[1] for _ in range(3)] == 3 * [(1,) if tunes else -1]
    warnings = [
        record.getMessage() for record in caplog.records if "which is none of the 3 that exist" in record.message
    ]
    assert len(warnings) == (2 if tunes else 1) and all(f"{path} has the tactic" in text for text in warnings)
    assert "for sleep" in warnings[0] and bool(calls) == tunes
    mended = {key: value for key, value in json.loads(path.read_text()).items() if key[0] != "_"}
    assert (mended == {key: value for key, value in good.items() if key[0] != "_"}) == tunes


def test_tactics_are_looked_at_once_for_each_load(tuner, tmp_path, monkeypatch):
    path, asked = tmp_path / "tuned.json", []
    with autotune(cache=path):
        choose(4)
    real = Sleeper.get_valid_tactics
    monkeypatch.setattr(Sleeper, "get_valid_tactics", lambda *arguments: asked.append(1) or real(*arguments))
    for loads in (1, 2):
        tuner.clear_cache()
        with autotune(False, cache=path):
            assert [choose(rows)[1] for rows in (4, 3, 4, 1)] == 4 * [(1,)]
        assert len(asked) == loads


def test_tactics_of_a_bucket_count(tuner, tmp_path):
    """Check that a call of 3 rows takes the tactic of 4 rows, which does not exist for 3."""

    class OfFour(Sleeper):
        def get_valid_tactics(self, inputs, profile):
            assert profile.get_opt_shapes()[0] == inputs[0].shape and inputs[0].dtype == torch.float32
            return [(1,)] if inputs[0].shape[0] % 4 == 0 else [(2,)]

    path = tmp_path / "tuned.json"
    with autotune(cache=path):
        choose(4, [OfFour()])
    tuner.clear_cache()
    with autotune(False, cache=path):
        assert choose(3, [OfFour()])[1] == (1,)


def test_numbers_are_those_of_the_runner(tuner):
    """Check 48.0 for 48, which compares equal, but is no index."""

    class Tiles(TunableRunner):
        def get_valid_tactics(self, inputs, profile):
            return [16, 48]

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            return range(100)[tactic]

    key = tuner._get_cache_key("tiles", Tiles(), [(2,)], TuningConfig())
    tuner._file_configs[key.file_key] = ("Tiles", 48.0)
    runner, tactic = tuner.choose_one("tiles", [Tiles()], TuningConfig(), [torch.ones(2)])
    assert runner([], tactic=tactic) == 48 and type(tactic) is int


def test_search_with_inputs(tuner):
    key = tuner._get_cache_key("sleep", Sleeper(), ((4, 3), (8,), ()), CONFIG, ("torch.float32",))
    tuner._file_configs[key.file_key] = ("Sleeper", (47,))
    shapes = [(4, 3), (8,), ()]
    assert tuner.search_cache("sleep", [Sleeper()], shapes, CONFIG, inputs_of(4)) == (False, 0, -1, None)


@pytest.mark.parametrize("tactic", [47, "x", None, [48, 1], {}], ids=str)
def test_layers_of_experts_run(tuner, tmp_path, caplog, tactic):
    bf16 = torch.bfloat16
    x, ids = torch.ones(16, 64, dtype=bf16), torch.zeros(16, 2, dtype=torch.int32)
    w1, w2 = torch.ones(4, 128, 64, dtype=bf16), torch.ones(4, 64, 64, dtype=bf16)
    path = tmp_path / "tuned.json"

    def call():
        return flashinfer.fused_moe.cutlass_fused_moe(x, ids, None, w1, w2, bf16, [], tune_max_num_tokens=16)[0]

    with autotune(cache=path):
        want = call()
    spoil(path, tactic)
    for tunes in (False, True):
        AutoTuner.get().clear_cache()
        with autotune(tunes, cache=path):
            assert torch.equal(call(), want)
    assert f"{path} has the tactic" in caplog.text
    caplog.clear()
    AutoTuner.get().clear_cache()
    with autotune(False, cache=path):
        assert torch.equal(call(), want)
    assert "has the tactic" not in caplog.text, "tuning has mended the file"


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ["R", ' + "[" * 500 + "]" * 500 + "]}", "\0", "", "[]"])
def test_files_that_are_no_results(tuner, tmp_path, caplog, content):
    path = tmp_path / "tuned.json"
    path.write_text(content)
    with autotune(cache=path):
        assert choose(4)[1] == (1,)
    assert "cannot be read" in caplog.text or "not used" in caplog.text
    assert "Sleeper" in path.read_text(), "replaced"
