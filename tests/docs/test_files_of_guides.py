# SPDX-License-Identifier: Apache-2.0
"""Files that the founding guides tell to read, to import or to run exist under that very name."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "benchmarks/bench_batch_decode.py",
    "csrc/batch_decode.cu",
    "csrc/batch_decode_jit_binding.cu",
    "csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_custom.cu",
    "flashinfer/activation.py",
    "flashinfer/sampling.py",
    "include/flashinfer/attention/decode_params.cuh",
    "tests/attention/test_batch_decode.py",
    "tests/attention/test_hopper.py",
]
MODULES = [
    *(f"jit.{name}" for name in ("core", "cpp_ext", "env", "cubin_loader", "attention.fmha_v2.fmha_library")),
    *("api_logging", "artifacts", "attention.cute_dsl.fmha", "autotuner", "decode", "fi_trace", "mla._core", "norm"),
    *("fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch", "topk"),
    *(f"trace.templates.{name}" for name in ("norm", "activation", "cascade", "gdn")),
]


@pytest.mark.parametrize("path", FILES)
def test_files(path):
    as_folder = path.removesuffix(".py")  # a module that has grown is a folder of the same name
    assert (ROOT / path).is_file() or (ROOT / as_folder / "__init__.py").is_file()


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    importlib.import_module(f"flashinfer.{name}")


TREE = [
    *(f"include/flashinfer/{name}" for name in ("attention", "gemm", "comm", "mma.cuh", "utils.cuh")),
    *("csrc", "flashinfer/comm", "flashinfer/jit/core.py", "flashinfer/jit/cpp_ext.py", "flashinfer/jit/env.py"),
    *(f"flashinfer/jit/{name}" for name in ("attention", "gemm", "fused_moe")),
    *(f"tests/{name}" for name in ("attention", "gemm", "moe", "comm", "utils")),
]


def test_tree_of_the_guide():
    """Check folders of the guide; a generator with one file is a module of that name."""
    missing = [path for path in TREE if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()]
    assert missing == []


def test_third_party_code_is_explained():
    """Check that `git submodule update` succeeds, and that each folder says where its contents come from."""
    for name in ("cutlass", "spdlog"):
        assert len((ROOT / "3rdparty" / name / "README.md").read_text()) > 100
    if shutil.which("git") and (ROOT / ".git").exists():
        subprocess.run(["git", "submodule", "update", "--init", "--recursive"], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["add-cuda-kernel", "benchmark-kernel", "debug-cuda-crash"])
def test_skills_under_both_spellings(name):
    folder = ROOT / ".claude" / "skills" / name
    assert (folder / "SKILL.md").read_text() == (folder / "skill.md").read_text()


def test_the_test_that_the_guide_runs():
    assert "def test_single_prefill(" in (ROOT / "tests/attention/test_hopper.py").read_text()
