# SPDX-License-Identifier: Apache-2.0
"""``flashinfer.warmup``: later calls compile nothing."""

from __future__ import annotations

import sys

import pytest
import torch

import flashinfer
from flashinfer import aot
from flashinfer.norm import modules


@pytest.fixture
def families(workshop, monkeypatch):
    """Replace norm and scale by modules that compile quickly."""

    def generator(*names):
        return lambda backend="cuda": (workshop.spec(name) for name in names if backend == "cpu")

    monkeypatch.setattr(aot, "FAMILIES", ("scale", "norm"))
    monkeypatch.setattr(aot, "gen_norm_modules", generator("one", "two"))
    monkeypatch.setattr(aot, "gen_scale_modules", generator("three"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return workshop


def test_everything_is_built_once(families, monkeypatch):
    report = flashinfer.warmup(progress=False)
    assert set(report.modules) == {"one", "two", "three"}
    assert set(report.built) == set(report.modules)
    assert report.seconds > 0
    assert len(families.calls) == 6
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    again = flashinfer.warmup(device="cpu")
    assert again.modules == report.modules
    assert again.built == ()
    assert len(families.calls) == 6


@pytest.mark.parametrize(
    "names, expected",
    [
        ("norm", ("one", "two")),
        (["norm"], ("one", "two")),
        (["two", "scale"], ("two", "three")),
        (["two", "norm"], ("two", "one")),
    ],
)
def test_names(families, names, expected):
    assert flashinfer.warmup(names, device=torch.device("cpu")).modules == expected
    assert len(families.calls) == 2 * len(expected)


@pytest.mark.parametrize("device", ["meta", "tpu"])
def test_other_devices(families, device):
    with pytest.raises(ValueError, match=f"warmup: device must be cpu or cuda, got '{device}'"):
        flashinfer.warmup("norm", device=device)


def test_unknown_name(families):
    with pytest.raises(ValueError, match=r"warmup: name must be one of scale, norm, .*, got 'nrom'") as caught:
        flashinfer.warmup(["nrom"])
    assert "flashinfer list-modules" in str(caught.value)
    assert len(str(caught.value)) < 300, "not the name of every module"
    assert families.calls == []


def test_progress_bar(families, capfd):
    flashinfer.warmup(["norm"], device="cpu")
    assert "building 2 modules" in capfd.readouterr().err
    flashinfer.warmup(["norm"], device="cpu")
    assert capfd.readouterr().err == ""


def test_cpu_family_end_to_end(monkeypatch):
    """Warm up a real family, in the cache that the op tests use."""
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    report = flashinfer.warmup("norm", device="cpu", progress=False)
    assert {"norm_cpu", "dit_layernorm_cpu"} <= set(report.modules)
    modules.get_norm_module.cache_clear()
    sys.modules["flashinfer.norm.rmsnorm"]._native_rmsnorm.clear()
    modules.get_dit_layernorm_module.cache_clear()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert flashinfer.rmsnorm(torch.ones(2, 64), torch.ones(64)).sum().item() == pytest.approx(128, rel=1e-3)
    assert modules.get_dit_layernorm_module("cpu") is modules.get_dit_layernorm_module("cpu")
