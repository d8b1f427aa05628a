# SPDX-License-Identifier: Apache-2.0
"""scripts/columns.py, the file map: it knows every module, and each gap that it shows is real."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

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
    """``scale``, ``qk_rmsnorm_rope`` and the Hopper modules of ``gemm``, ``recurrent`` and ``indexer`` are CUDA only;
    ``api_log_stats`` is a part of the log and no operator. All else is a column without gaps."""
    gaps = [
        (stem, layer)
        for family in FAMILIES
        for stem in columns.stems(family)
        for layer in columns.LAYERS
        if not columns.files(family, stem, layer)
    ]
    of_the_log = [("api_log_stats", layer) for layer in ("CPU", "trace", "bench")]
    for_sm90 = [("gemm_sm90", "CPU"), ("gemm_w4_sm90", "CPU")]
    for_sm90 += [("kda_prefill", "CPU"), ("mqa_logits_sm90", "CPU")]
    assert gaps == [("scale", "CPU"), ("scale", "shared"), ("qk_rmsnorm_rope", "CPU"), *for_sm90, *of_the_log]


def test_parts_of_a_family_are_counted_once(columns):
    cpu, shared = (columns.files("decode", "batch_decode", layer) for layer in ("CPU", "shared"))
    assert "tile.h" in {path.name for path in cpu} and "planner.h" in {path.name for path in shared}
    assert not set(cpu) & set(shared)
    kernels = {path.name for path in columns.files("page", "page", "CUDA")}
    assert "page.cuh" in kernels and "page_nvfp4.cuh" not in kernels


def test_kernels_are_those_that_are_included(columns):
    """Check that decode lists its own kernels and those that it shares, and none of the Hopper kernels of others."""
    kernels = {str(path.relative_to(columns.HEADERS)) for path in columns.files("decode", "batch_decode", "CUDA")}
    assert any("decode" in name and "producer" in name for name in kernels)
    assert not [name for name in kernels if "sm90" in name or "mla" in name]
    assert len(kernels) <= 21
    assert any("mono" in path.as_posix() for path in columns.files("fused_moe", "fused_moe", "CUDA"))


def test_it_needs_no_package(tmp_path):
    """Run it as on a fresh clone: no site-packages, no environment."""
    script = str(ROOT / "scripts" / "columns.py")
    done = subprocess.run([sys.executable, "-I", "-S", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("family") and "batch_decode" in done.stdout
