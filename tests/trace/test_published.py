# SPDX-License-Identifier: Apache-2.0
"""Templates against the published set: names, axes, inputs, outputs, arguments of ``init`` and of references.

Data sets of workloads and solutions are keyed by these names. ``published.json`` holds them as facts, one template per
line: ``var`` are its variable axes, ``hidden`` the const ones without a part in the name.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.fi_trace import traced_functions
from flashinfer.trace import Const, Tensor, TraceTemplate

from .schema import validate

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
EVERY = pytest.mark.parametrize("entry", PUBLISHED, ids=[entry["trace"] for entry in PUBLISHED])
WITH_INIT = pytest.mark.parametrize(
    "entry", [e for e in PUBLISHED if e["init"]], ids=[e["trace"] for e in PUBLISHED if e["init"]]
)


def template_of(entry: dict[str, Any]) -> TraceTemplate:
    """Return the template that the module exports, or the first if an API has several."""
    found = getattr(importlib.import_module(f"flashinfer.trace.templates.{entry['module']}"), entry["trace"])
    return found if isinstance(found, TraceTemplate) else found.templates[0]


@EVERY
def test_name_and_axes(entry):
    template = template_of(entry)
    shown = re.findall(r"{(\w+)}", entry["name"])
    assert template.op_type == entry["op_type"]
    const = {axis for axis, kind in template.axes.items() if isinstance(kind, Const)}
    assert const == {*shown, *entry["hidden"]}
    assert template.axes.keys() - const == set(entry["var"])
    assert template.definition_name({axis: f"{{{axis}}}" for axis in const}) == entry["name"]
    assert list(template.constraints or ()) == entry["constraints"]


@EVERY
def test_inputs_and_outputs(entry):
    template = template_of(entry)
    for values, published in ((template.inputs, entry["inputs"]), (template.outputs, entry["outputs"])):
        assert list(values) == list(published)
        for name, fact in published.items():
            spec = values[name]
            if isinstance(spec, Tensor):
                assert list(spec.dim_names) == fact["dims"], name
                assert values is template.outputs or spec.tuple_idx == fact.get("index"), name
            else:
                assert spec.dtype == fact["scalar"], name
            if "param" in fact or values is template.inputs:
                assert (spec.param or name) == fact.get("param", name), name
            assert spec.optional == fact.get("optional", False), name


@EVERY
def test_api_has_the_template(entry):
    found = traced_functions[entry["api"]]._trace_template
    assert template_of(entry) in ([found] if isinstance(found, TraceTemplate) else found.templates)


@EVERY
def test_reference_takes_the_published_arguments(entry):
    if entry["reference"] is None:
        return  # the published set has no reference; ours may
    names = list(inspect.signature(template_of(entry).reference).parameters)
    assert names[: len(entry["reference"])] == entry["reference"]


@WITH_INIT
def test_init_takes_the_axes(entry):
    parameters = dict(inspect.signature(template_of(entry).init).parameters)
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert (parameters.pop("device").default, parameters.pop("seed").default) == ("cuda", 0)
    defaults = {name: "" if p.default is p.empty else repr(p.default) for name, p in parameters.items()}
    assert defaults == {name: value or "" for name, value in entry["init"]["args"].items()}


@EVERY
def test_texts_define_the_published_names(entry):
    """Check that data sets find ``_<stem>_init`` and ``_<stem>_reference``, besides ``init`` and ``run``."""
    stem = entry["trace"].removeprefix("_").removesuffix("_trace")
    template = template_of(entry)
    texts = {"init": template.init, "reference": template.reference if entry["reference"] else None}
    for what, function in texts.items():
        if function is not None:
            assert f"_{stem}_{what}" in (function.__name__, f"_{template.stem}_{what}"), what


SMALL = {"vocab_size": 128, "workspace_size": 1024, "max_seq_len": 64, "num_heads": 4, "num_heads_qo": 4}
NEEDED = {
    "batch_size": 2,
    "batch_size_plus_1": 3,
    "num_states": 3,
    "num_pages": 8,
    "q_len_per_request": 1,
    "M": 3,
    "B": 2,
}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}
DTYPES |= {"int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8, "uint32": torch.uint32}


def made_by(entry: dict[str, Any]) -> dict[str, Any]:
    arguments = entry["init"]["args"]
    sizes = {name: NEEDED.get(name, 6) for name, default in arguments.items() if default is None}
    small = {name: value for name, value in SMALL.items() if arguments.get(name) not in (None, "0")}
    return template_of(entry).init(**(small | sizes), device="cpu")


def words_of(value: Any) -> str:
    """Return a value in the notation of published.json."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} {words_of(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(words_of(part) for part in value) + ")"
    if isinstance(value, (torch.Tensor, torch.dtype)):
        dtype = value if isinstance(value, torch.dtype) else value.dtype
        return next(word for word, known in DTYPES.items() if known == dtype)
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, bool) else type(value).__name__


@WITH_INIT
def test_init_makes_the_published_arguments(entry):
    made = made_by(entry)
    assert words_of(made)[1:-1] == entry["init"]["gives"]
    parameters = inspect.signature(traced_functions[entry["api"]]).parameters
    assert set(made.get("run", made)) <= set(parameters)


@WITH_INIT
def test_definition_of_what_init_makes(entry):
    """Check what a call is recorded as: the published template, with dtypes that the benchmark schema has."""
    made = made_by(entry)
    definition = traced_functions[entry["api"]].fi_trace(**made.get("run", made))
    pattern = re.sub(r"{\w+}", r"\\d+", entry["name"])
    assert re.fullmatch(pattern, definition["name"])
    assert {axis for axis, fact in definition["axes"].items() if fact["type"] == "var"} == set(entry["var"])
    for name, fact in entry["outputs"].items():
        found = definition["outputs"][name]
        assert found["shape"] == fact.get("dims")
        if "dtype" in fact:
            assert found["dtype"] == fact["dtype"].replace("uint8", "int8")
    validate(definition)


@WITH_INIT
def test_init_repeats_itself(entry):
    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        return [tensor for part in parts for tensor in tensors(part)]

    template = template_of(entry)
    buffers = {spec.param for spec in template.outputs.values()} | {"workspace_buffer", "semaphores", "output"}
    first, second = ({k: v for k, v in made_by(entry).items() if k not in buffers} for _ in range(2))
    for one, other in zip(tensors(first), tensors(second), strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


WRAPPERS = {
    "gqa_paged_decode_trace": flashinfer.BatchDecodeWithPagedKVCacheWrapper,
    "gqa_paged_prefill_trace": flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    "gqa_ragged_prefill_trace": flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    "mla_paged_decode_trace": flashinfer.mla.BatchMLAPagedAttentionWrapper,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_runs_what_init_makes(name, device):
    """Compare the wrapper with the reference, which gets the page table of the plan."""
    template = template_of(next(entry for entry in PUBLISHED if entry["trace"] == name))
    rows = {"batch_size": 3} if "decode" in name else {"total_q": 11, "batch_size": 3}
    sizes = {} if "mla" in name else {"num_kv_heads": 2, "head_dim": 64}
    made = template.init(**rows, num_qo_heads=4, **sizes, device=device)
    options = ("NHD",) if sizes else ()
    wrapper = WRAPPERS[name](torch.zeros(32 << 20, dtype=torch.uint8, device=device), *options)
    wrapper.plan(**made["plan"])
    actual = wrapper.run(**made["run"], return_lse=True)
    arguments = {key.removeprefix("paged_"): value for key, value in made["plan"].items()}
    arguments |= {f"kv_{key}": value for key, value in arguments.items() if key in ("indptr", "indices")}
    cache = made["run"].get("paged_kv_cache", ())
    halves = dict(zip(("k_cache", "v_cache"), cache, strict=bool(cache)))
    expected = template.reference(**arguments, **made["run"], **halves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    traced = wrapper.run.fi_trace(wrapper, **made["run"])
    assert traced["name"].startswith(template.prefix)
    assert set(traced["inputs"]) == set(template.inputs)
