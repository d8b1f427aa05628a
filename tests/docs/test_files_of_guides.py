# SPDX-License-Identifier: Apache-2.0
"""Files that the founding guides tell to read, to import or to run exist under that very name."""

from __future__ import annotations

import importlib
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


def test_the_test_that_the_guide_runs():
    assert "def test_single_prefill(" in (ROOT / "tests/attention/test_hopper.py").read_text()
