# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_serve.py: its limits are those of the weights, and each case runs on a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .benchmark_path import BENCHMARKS as BENCHMARKS  # isort: skip
import bench_serve
from bench_serve import MODELS, active_parameters, limit
from serve.experts import Experts
from serve.model import shapes_of

_FEW = Experts(8, 2, 64, True, "mlp", ("gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("experts", [None, _FEW])
def test_weights_that_are_read(experts):
    config = replace(MODELS["tiny"], experts=experts)
    shapes = {name: torch.Size(shape).numel() for name, shape in shapes_of(config).items() if len(shape) > 1}
    layers = sum(count for name, count in shapes.items() if ".layers." in name)
    of_token, read = active_parameters(config, tokens=10_000)
    assert read == pytest.approx(layers)
    if experts is None:
        assert of_token == layers
    else:
        idle = sum(count for name, count in shapes.items() if ".experts." in name) * 6 / 8
        assert of_token == layers - idle
        assert active_parameters(config, tokens=1)[1] == pytest.approx(layers - idle)


def test_limit_of_a_known_model():
    """A decode step of Llama-3.1-8B reads 15.0 GB of weights, and 64 requests of 2048 tokens 17.2 GB of pages."""
    seconds = limit(MODELS["llama-3.1-8b"], torch.bfloat16, requests=64, tokens=1, keys=2048)
    assert seconds * 4.25e12 == pytest.approx(15.0e9 + 17.2e9, rel=0.01)


def test_cases_run(monkeypatch, capsys):
    monkeypatch.setattr(bench_serve, "MIXED_REQUESTS", 3)
    monkeypatch.setattr(bench_serve, "MIXED_TOKENS", 2)
    words = ["--device", "cpu", "--cases", "decode2,prefill,mixed", "--keys", "24", "--steps", "2", "--interval", "0"]
    results = bench_serve.main(words)
    assert 0 < results["decode2"]["of_limit"] < 1 and 0 < results["prefill"]["of_limit"] < 1
    assert results["mixed"]["tokens_per_s"] == pytest.approx(6 / results["mixed"]["seconds"], rel=0.01)
    assert "decode2" in capsys.readouterr().out


def test_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_serve.parse(["--cases", "decode"])
    assert "must be prefill, mixed or decodeN, got 'decode'" in capsys.readouterr().err
