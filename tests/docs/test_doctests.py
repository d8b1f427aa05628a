# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run on the CPU, and public functions have one."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.aot import FAMILIES

from .documents import ROOT

spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)

#: Functions without an example on the API pages, by the reason for it.
WITHOUT = {
    "runs on CUDA alone": {
        "bench_gpu_time_with_cuda_event",
        "bench_gpu_time_with_cudagraph",
        "bench_gpu_time_with_cupti",
        "cudnn_batch_decode_with_kv_cache",
        "fused_qk_rmsnorm_rope",
        "fused_rmsnorm_silu",
        "xqa",
    },
}


def things() -> dict[str, Any]:
    """Return the public functions and classes of each API page, once each."""
    found: dict[str, Any] = {}
    for place in site.api_modules():
        for name, thing in site.public_things(importlib.import_module(f"flashinfer.{place}")):
            found.setdefault(name, (place, thing))
    return found


THINGS = things()


def examples(name: str, thing: Any) -> list[doctest.DocTest]:
    """Return the examples of a function, or of a class and its methods."""
    parser, found = doctest.DocTestParser(), []
    texts = {name: inspect.getdoc(thing)}
    if inspect.isclass(thing):
        texts |= {f"{name}.{k}": inspect.getdoc(v) for k, v in vars(thing).items() if inspect.isfunction(v)}
    for title, text in texts.items():
        if ">>>" in (text or ""):
            names = {"torch": torch, "flashinfer": flashinfer}
            found.append(parser.get_doctest(text, names, title, None, None))
    return found


WITH_EXAMPLES = {name: found for name, (_, thing) in THINGS.items() if (found := examples(name, thing))}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name):
    """Run the examples with CPU tensors. Their output counts: an example that prints nothing must raise nothing."""
    report: list[str] = []
    for example in WITH_EXAMPLES[name]:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
        runner.run(example, out=report.append)
    assert not report, "\n".join(report)


def bare() -> dict[str, str]:
    """Return the public functions without an example, and their pages."""
    functions = {name: place for name, (place, thing) in THINGS.items() if inspect.isfunction(thing)}
    return {name: place for name, place in functions.items() if name not in WITH_EXAMPLES and name[0] != "_"}


def test_functions_of_every_family_have_an_example():
    excused = set().union(*WITHOUT.values())
    found = {name for name, place in bare().items() if place in FAMILIES}
    assert found - excused == set(), "write an example that runs on the CPU"
    assert excused & set(WITH_EXAMPLES) == set(), "has an example: delete it from the list"


def test_functions_of_services_have_an_example():
    excused = set().union(*WITHOUT.values())
    found = sorted(name for name, place in bare().items() if place not in FAMILIES and name not in excused)
    assert found == [], "write an example that runs on the CPU"
