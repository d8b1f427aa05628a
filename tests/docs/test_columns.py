# SPDX-License-Identifier: Apache-2.0
"""scripts/columns.py, the file map: it knows every module, and each gap that it shows is real."""

from __future__ import annotations

import importlib.util

import pytest

from flashinfer.aot import FAMILIES

from .documents import ROOT


@pytest.fixture(scope="module")
def columns():
    spec = importlib.util.spec_from_file_location("columns", ROOT / "scripts" / "columns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_module_is_in_one_family(columns):
    named = [stem for family in FAMILIES for stem in columns.stems(family)]
    assert sorted(named) == columns.known_stems()


def test_only_cpu_kernels_and_what_they_share_are_missing(columns):
    """``scale``, ``qk_rmsnorm_rope`` and so on are CUDA only by contract; ``api_log_stats`` is a part of the log and no
    operator. All else is a column without gaps."""
    gaps = [
        (stem, layer)
        for family in FAMILIES
        for stem in columns.stems(family)
        for layer in columns.LAYERS
        if not columns.files(family, stem, layer)
    ]
    of_the_log = [("api_log_stats", layer) for layer in ("CPU", "trace", "bench")]
    assert gaps == [("scale", "CPU"), ("scale", "shared"), ("qk_rmsnorm_rope", "CPU"), *of_the_log]


def test_parts_of_a_family_are_counted_once(columns):
    cpu, shared = (columns.files("decode", "batch_decode", layer) for layer in ("CPU", "shared"))
    assert "tile.h" in {path.name for path in cpu} and "planner.h" in {path.name for path in shared}
    assert not set(cpu) & set(shared)
    kernels = {path.name for path in columns.files("page", "page", "CUDA")}
    assert "page.cuh" in kernels and "page_nvfp4.cuh" not in kernels
