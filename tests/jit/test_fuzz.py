# SPDX-License-Identifier: Apache-2.0
"""Texts and files from elsewhere, made by hypothesis: each is read, or refused with an error that names it."""

from __future__ import annotations

import json
import os
import re
import string
import warnings
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer._runtime.errors import ArgumentError
from flashinfer._runtime.knobs import Knob, Knobs, knobs
from flashinfer.autotuner.files import read_content, results_in
from flashinfer.compilation_context import CompilationContext
from flashinfer.dump import replay_from_dump
from flashinfer.dump.files import METADATA, read_record
from flashinfer.jit import manifest
from flashinfer.jit.prebuilt import _covers, read_index
from flashinfer.trace.apply.solutions import Definition, load
from flashinfer.trace.solution import Solution

QUICK = settings(max_examples=60)

#: What an environment variable can hold: no NUL, no lone surrogates.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@QUICK
@given(text=TEXTS | st.text("0123456789.,; af+PTX\t", max_size=24))
def test_arch_lists(text):
    """Check that a list gives flags that nvcc takes, or an error that quotes what is wrong with it."""
    with mock.patch.dict(os.environ, {"FLASHINFER_CUDA_ARCH_LIST": text}):
        context = CompilationContext()
        try:
            targets = context.TARGET_CUDA_ARCHS
        except ValueError as error:
            assert str(error).startswith("FLASHINFER_CUDA_ARCH_LIST: target must be ")
            return
        flags = context.get_nvcc_flags_list() if targets else []
    for flag in flags:
        if not flag.startswith("-D"):
            assert re.fullmatch(r"-gencode=arch=compute_([0-9]{2,3}[af]?),code=sm_\1", flag)


ALL_KNOBS = [knob for knob in vars(Knobs).values() if isinstance(knob, Knob)]


@QUICK
@given(knob=st.sampled_from(ALL_KNOBS), text=TEXTS | st.text(string.digits + "-+.e_ ", max_size=400))
def test_variables(knob, text):
    """Check that a value gives a setting, or an error that names the variable, the known values and the text."""
    with mock.patch.dict(os.environ, {knob.variable: text}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quotes that are never closed warn
        try:
            getattr(knobs, knob.attribute)
        except ArgumentError as error:
            assert str(error).startswith(f"{knob.variable} must be ") and str(error).endswith(f", got {text!r}")


@pytest.fixture
def library(workshop):
    """A module that is built, with its manifest."""
    spec = workshop.spec()
    spec.build()
    return spec, spec.get_library_path()


@QUICK
@given(damage=st.dictionaries(st.sampled_from(["files", "compilers", "library", "flags", "units"]), JSON, min_size=1))
def test_manifests(library, damage):
    """Check that a damaged manifest means a build, not an exception."""
    spec, path = library
    record = manifest.manifest_path(path)
    whole = record.read_text()
    try:
        record.write_text(json.dumps({**json.loads(whole), **damage}))
        reason = manifest.staleness(spec, path)
        assert reason is None or isinstance(reason, str)
        assert reason is not None or not damage.keys() & {"library", "flags", "units"}
    finally:
        record.write_text(whole)
    assert manifest.staleness(spec, path) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"files": {"a\\u0000b": ""}, "compilers": {}, "library": ""}', "\xff"]
)
def test_manifests_that_hypothesis_rarely_makes(library, text):
    spec, path = library
    manifest.manifest_path(path).write_text(text, encoding="latin-1")
    assert manifest.staleness(spec, path) == "not built"


@QUICK
@given(facts=JSON, targets=JSON)
def test_index_of_prebuilt_modules(tmp_path, monkeypatch, facts, targets):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    for modules in (facts, {"op/op.so": facts}, {"op/op.so": {"targets": targets}}):
        read_index.__globals__["_parse_index"].cache_clear()  # its key is the mtime, which two quick writes share
        (tmp_path / "index.json").write_text(json.dumps({"schema": 1, "modules": modules}))
        assert _covers(tmp_path / "op" / "op.so", [(9, "0a")]) in (True, False)


@QUICK
@given(content=JSON)
def test_files_of_the_autotuner(tmp_path, content):
    (tmp_path / "tuned.json").write_text(json.dumps(content))
    assert isinstance(results_in(read_content(tmp_path / "tuned.json")), dict)


@QUICK
@given(lines=st.lists(st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()), max_size=4))
def test_records_of_dumps(tmp_path, lines):
    """Check that a record is a JSON object, the last one of the file, or that its absence is reported."""
    (tmp_path / METADATA).write_bytes(b"\n".join(lines))
    try:
        assert isinstance(read_record(tmp_path), dict)
    except RuntimeError as error:
        assert "must have the record of a call, got no complete line" in str(error)


NAMES = st.sampled_from(["os.system", "flashinfer.rmsnorm", "flashinfer.norm:rmsnorm", "builtins:eval", "../x", ""])


@QUICK
@given(record=st.dictionaries(st.sampled_from(["function_name", "module", "api", "inputs", "args"]), NAMES | JSON))
def test_dumps_call_nothing_else(tmp_path, record):
    """Check that replaying a dump of anybody runs no function but those of the API."""
    (tmp_path / METADATA).write_text(json.dumps(record) + "\n")
    with mock.patch("os.system") as system, mock.patch("builtins.eval") as evaluate:
        try:
            replay_from_dump(tmp_path, device="cpu", run=True)
        except (RuntimeError, ValueError, FileNotFoundError, KeyError, TypeError, AttributeError) as error:
            assert str(error)
    assert not system.called and not evaluate.called


#: Source that would leave a file behind if reading a solution ran it.
SOURCE = "open('ran', 'w')"
PATHS = st.sampled_from(["main.py", "../main.py", "/tmp/main.py", "", "main.py::run", "a::b::c"])
SPEC = st.fixed_dictionaries(
    {"language": st.sampled_from(["python", "triton", "cuda", "none"]) | JSON, "entry_point": PATHS | JSON},
    optional={"target_hardware": JSON, "dependencies": JSON, "binding": JSON, "destination_passing_style": JSON},
)
SOLUTION = st.fixed_dictionaries(
    {
        "name": st.text(max_size=8) | JSON,
        "definition": st.text(max_size=8) | JSON,
        "spec": SPEC | JSON,
        "sources": st.lists(st.fixed_dictionaries({"path": PATHS, "content": st.just(SOURCE)}), max_size=2) | JSON,
    },
    optional={"author": JSON, "description": JSON},
)


@QUICK
@given(content=SOLUTION | JSON, damage=st.sampled_from(["", "[", '{"sources": ', "\\"]))
def test_solutions_of_traces(tmp_path, monkeypatch, content, damage):
    """Check that a file of a solution is read, or refused by name, and that reading it runs nothing of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solution.json").write_text(damage + json.dumps(content))
    try:
        assert all(isinstance(solution, Solution) for solution in load(tmp_path).values())
    except ValueError as error:
        assert str(error).startswith(f"trace_apply: {tmp_path / 'solution.json'} must hold a solution, got ")
    assert not (tmp_path / "ran").exists()


@QUICK
@given(content=JSON | st.dictionaries(st.sampled_from(["name", "op_type", "axes", "inputs", "outputs", "tags"]), JSON))
def test_definitions_of_traces(content):
    try:
        assert isinstance(Definition.from_dict(content), Definition)
    except ValueError as error:
        assert str(error).startswith("Definition: ")
