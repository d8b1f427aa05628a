# SPDX-License-Identifier: Apache-2.0
"""scripts/model_comm.py: the model of communication chooses as the package does, and fits what was measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from flashinfer.comm.reduce import call

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("model_comm", ROOT / "scripts" / "model_comm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_changes_protocol_where_the_model_does(model):
    for ranks, limit in call._ONE_SHOT_BYTES.items():
        if ranks > 2:
            assert 0.6 < limit / model.crossing(ranks) < 1.6
    assert model.crossing(2) == float("inf")


def test_ranks_of_one_card_take_what_was_measured(model):
    measured = json.loads((ROOT / "benchmarks/results/h200.json").read_text())["allreduce_us"]["0, 1"]
    for ranks, us in zip((2, 4, 8), measured, strict=True):
        assert model.single_card(7168 * 2, ranks) == pytest.approx(us, rel=0.1)


def test_times_grow_with_bytes_and_ranks(model):
    for ranks in range(2, 73):
        times = [model.all_reduce(size, ranks).us for size in model.SIZES]
        assert times == sorted(times) and times[0] > 3
    for ranks in (2, 4, 8, 16, 64):
        assert model.exchange(128, 7168, ranks, 8) > model.exchange(1, 7168, ranks, 8)


def test_tables_and_picture(model, capsys, tmp_path):
    model.main([])
    text = capsys.readouterr().out
    assert text.count("| 8 |") == 2 and "(model)" in text
    model.main(["--svg", str(tmp_path / "picture.svg")])
    assert "model, not measured" in (tmp_path / "picture.svg").read_text()
