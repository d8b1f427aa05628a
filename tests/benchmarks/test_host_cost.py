# SPDX-License-Identifier: Apache-2.0
"""Measurement of the host time of calls (benchmarks/host_cost.py)."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest

import flashinfer
from flashinfer import gemm
from flashinfer._runtime.arch import capability_of
from flashinfer.autotuner import AutoTuner
from flashinfer.gemm import bf16, fp8, launch

from ..gemm.stand_ins import Native

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "host_cost.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_time_of_a_call(script):
    low, median = script.measure(lambda: time.sleep(0.002), 30, "cpu")
    assert 2000 <= low <= median


@pytest.mark.parametrize("family", ["dense", "grouped", "moe", "tuned"])
def test_calls_run(script, family, device, monkeypatch):
    monkeypatch.setattr(AutoTuner, "_instance", None)  # what a test tunes is forgotten
    monkeypatch.setattr(AutoTuner, "was_used", False)
    calls = script.FAMILIES[family](device)
    assert len(calls) >= 2
    for call in calls.values():
        call()


def test_own_entries_run_our_kernels(script, monkeypatch):
    """Check on CPU tensors that pass for those of a Hopper: the rule takes our kernel for "own", torch for others."""
    native = Native()
    monkeypatch.setitem(capability_of, -1, 90)
    for kind in ("bf16", "fp8"):
        monkeypatch.setitem(launch.ordinary_product, kind, native)
    calls = script.FAMILIES["dense"]("cpu")
    for name in ("mm_bf16 own", "mm_bf16 own out=", "bmm_bf16 own", "bmm_bf16 auto", "bmm_fp8 own", "bmm_fp8 own out="):
        calls[name]()  # the checked way, which keeps the launch
        native.calls.clear()
        calls[name]()
        assert len(native.calls) == 1, name
    for name in ("mm_bf16 through torch", "mm_bf16 through torch out=", "bmm_bf16 through torch"):
        native.calls.clear()
        calls[name]()
        assert not native.calls, name
    for launches in (bf16._mm_launches, bf16._bmm_launches, fp8._launches):
        launches.clear()  # they stand for CPU tensors


def test_every_product_has_an_entry(script):
    """Check that each public product is measured as it is called by default, and with "auto" where it has backends."""
    names = [name for family in ("dense", "grouped") for name in script.FAMILIES[family]("cpu")]
    products = {name: getattr(gemm, name) for name in gemm.__all__}
    products |= {"grouped_mm_bf16": flashinfer.grouped_mm_bf16, "grouped_mm_fp8": flashinfer.grouped_mm_fp8}
    for product in ("mm_fp4", "mm_mxfp8"):  # torch multiplies, on Blackwell alone
        del products[product]
    for product, function in products.items():
        entries = [name for name in names if product.startswith(name.replace(".", " ").split()[0])]
        assert any(" auto" not in name for name in entries), product
        if getattr(function, "has_backend_choices", lambda: False)():
            assert any(" auto" in name for name in entries), product
