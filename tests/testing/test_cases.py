# SPDX-License-Identifier: Apache-2.0
"""The registered benchmark cases: every op has one, and each computes what the op's reference says."""

import pytest
import torch

import flashinfer
from flashinfer.aot import FAMILIES

from .benchmark_path import BENCHMARKS  # isort: skip
import harness
import measure

CASES = harness.load_cases()
SMALLER = {"nnz": 3, "batch_size": 2, "hidden_size": 136, "size": 1000, "num_heads": 2, "seq_len": 256}


def test_every_family_has_a_benchmark():
    assert [family for family in FAMILIES if not (BENCHMARKS / f"bench_{family}.py").exists()] == []


def test_every_norm_function_has_a_case():
    functions = [name for name in flashinfer.norm.__all__ if callable(getattr(flashinfer.norm, name))]
    assert [name for name in functions if "norm" in name and name not in CASES] == []


@pytest.mark.parametrize("name", CASES)
def test_case_agrees_with_the_reference(device, name):
    case = CASES[name]
    if not case.points[device]:
        pytest.skip(f"{name} has no {device} kernel")
    point = {key: SMALLER.get(key, value) for key, value in case.points[device][-1].items()}
    bench = case.make(device, point)
    for backend, run in bench.backends(device).items():
        if backend != "torch":
            measure.check(bench, run, f"{name} {backend}")
    if bench.baseline:
        with torch.device("meta"):  # a tensor made without device= is then on neither device, and shows in a CPU run
            bench.baseline(*bench.args)
    assert bench.bytes > 0
