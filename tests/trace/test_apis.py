# SPDX-License-Identifier: Apache-2.0
"""Every public API against its template: present, consistent with the signature, and as committed in fi_trace_out."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch

import flashinfer
from flashinfer.aot import FAMILIES
from flashinfer.dump import replay
from flashinfer.trace import Const, TraceTemplate

from . import example
from .schema import validate

PACKAGE = Path(flashinfer.__file__).parent


def public_apis() -> Iterator[Callable[..., Any]]:
    for family in FAMILIES:
        module = importlib.import_module(f"flashinfer.{family}")
        yield from (f for f in (getattr(module, name) for name in module.__all__) if inspect.isfunction(f))


def templates(api: Callable[..., Any]) -> list[TraceTemplate]:
    template = api._trace_template
    return [template] if isinstance(template, TraceTemplate) else list(template.templates)


PAIRS = [
    pytest.param(api, template, id=template.prefix)
    for api in public_apis()
    if hasattr(api, "fi_trace")
    for template in templates(api)
]


def test_every_public_api_has_a_trace():
    apis = list(public_apis())
    assert len(apis) >= 14
    assert [api.__name__ for api in apis if not hasattr(api, "fi_trace")] == []


def test_every_decorator_names_a_template():
    """Also of functions that no family lists, by reading the source."""
    bare = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                called = isinstance(decorator, ast.Call)
                target = decorator.func if called else decorator
                keywords = [keyword.arg for keyword in decorator.keywords] if called else []
                if getattr(target, "id", None) == "flashinfer_api" and "trace" not in keywords:
                    bare.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert bare == []


def test_logs_and_dumps_name_what_users_call():
    """The log says ``Wrapper.plan``, not the name of a helper behind it."""
    names = [name.rpartition(".")[2] for module, name in replay._apis if module.startswith("flashinfer.")]
    assert [name for name in names if name.startswith("_") and name != "__init__"] == []


@pytest.mark.parametrize("api, template", PAIRS)
def test_parameters_exist(api, template):
    signature = inspect.signature(api).parameters
    assert set(template.parameters()) <= signature.keys()
    outputs = {value.dtype_from for value in template.outputs.values()} - {None}
    assert outputs <= {*template.inputs, *signature}


@pytest.mark.parametrize("api, template", PAIRS)
def test_reference_takes_the_inputs_and_shares_the_defaults(api, template):
    signature, reference = inspect.signature(api).parameters, inspect.signature(template.reference).parameters
    assert list(template.inputs) == [name for name in reference if name in template.inputs]
    fixed = {axis for axis, kind in template.axes.items() if isinstance(kind, Const)}
    fixed |= {f"{output}_dtype" for output in template.outputs}
    assert reference.keys() - template.inputs.keys() <= fixed
    for name in reference.keys() & signature.keys():
        assert reference[name].default == signature[name].default, name


@pytest.mark.parametrize("api, template", PAIRS)
def test_required_parameters_are_described(api, template):
    """Anyone can make the call from the definition: what it needs is an input, an output buffer or a const axis."""
    known = {*template.parameters(), *template.axes}
    required = [p.name for p in inspect.signature(api).parameters.values() if p.default is p.empty]
    assert set(required) <= known


def test_names_tell_templates_apart():
    prefixes = [template.prefix for api in public_apis() for template in templates(api)]
    assert len(prefixes) == len(set(prefixes))


def test_example_writes_the_committed_files(tmp_path):
    example.main(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in example.OUT.iterdir()}
    assert sorted(written) == sorted(committed)
    assert [name for name in written if written[name] != committed[name]] == []


def test_example_docstring_lists_the_files():
    listed = [line.strip() for line in example.__doc__.splitlines() if line.strip().endswith(".json")]
    assert listed == sorted(path.name for path in example.OUT.iterdir())


def test_example_calls_every_api():
    assert {api.__name__ for api, _ in example.calls()} == {api.__name__ for api in public_apis()}


@pytest.mark.parametrize("path", sorted(example.OUT.glob("*.json")), ids=lambda path: path.stem)
def test_committed_file_is_valid(path):
    definition = json.loads(path.read_text())
    validate(definition)
    assert definition["name"] == path.stem
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    assert list(inspect.signature(scope["run"]).parameters) == list(definition["inputs"])


def test_import_reads_no_source():
    """Turning functions into text is slow and needs the files; it waits for the first trace."""
    code = (
        "import inspect, flashinfer.fi_trace\n"
        "def refuse(*_): raise SystemExit('inspect.getsource was called')\n"
        "inspect.getsource = inspect.getsourcelines = refuse\n"
        "import flashinfer.trace.templates.norm, flashinfer.trace.templates.scale\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_definition_of_a_cuda_call_needs_no_gpu():
    made = flashinfer.scale.fi_trace(torch.empty(4, 8, device="meta"), 2.0)
    assert made["name"] == "scale_2d"
