# SPDX-License-Identifier: Apache-2.0
"""A committed definition is enough to make a call and to judge it: the emitted text agrees with the op."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.fi_trace import traced_functions
from flashinfer.trace import default_check

from . import example

# Sizes of variable axes and values of numbers without a default; seq_len = ppf * pph * ppw.
SIZES = {"batch_size": 2, "seq_len": 24, "num_tokens": 48, "num_heads": 3, "dim0": 3, "dim1": 129}
NUMBERS = {"ppf": 2, "pph": 3, "ppw": 4, "factor": 3.14}
CUDA_ONLY = {"scale", "fused_rmsnorm_silu", "fused_qk_rmsnorm_rope"}


class Call:
    """One call made from a definition alone."""

    def __init__(self, definition: dict[str, Any], device: str) -> None:
        self.definition, self.device = definition, device
        self.api = traced_functions[definition["tags"][0].removeprefix("fi_api:")]
        self.name = self.api.__name__
        self.text = self._function("reference", "run")
        self.axes = {name: axis.get("value", SIZES.get(name)) for name, axis in definition["axes"].items()}
        self.inputs = self._inputs()

    def _function(self, field: str, name: str) -> Any:
        scope: dict[str, Any] = {}
        exec(self.definition[field], scope)
        return scope[name]

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        shape = [self.axes[axis] for axis in entry["shape"]]
        return torch.rand(shape, device=self.device).add(0.5).to(getattr(torch, entry["dtype"]))

    def _inputs(self) -> dict[str, Any]:
        defaults = inspect.signature(self.text).parameters
        made: dict[str, Any] = {}
        if "init" in self.definition:
            made = self._function("init", "init")(
                batch_size=self.axes["batch_size"], seq_len=self.axes["seq_len"], device=self.device
            )
        for name, entry in self.definition["inputs"].items():
            if name not in made and entry["shape"] is not None:
                made[name] = self._tensor(entry)
            elif name not in made:
                made[name] = (
                    NUMBERS[name] if defaults[name].default is inspect.Parameter.empty else defaults[name].default
                )
        return {name: made[name] for name in self.definition["inputs"]}

    def expected(self) -> dict[str, torch.Tensor]:
        outputs = self.text(*self.inputs.values())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(self.definition["outputs"], outputs, strict=True))

    def actual(self) -> dict[str, torch.Tensor]:
        parameters = inspect.signature(self.api).parameters
        arguments = {
            name: value.clone() if name in self._overwritten() else value for name, value in self.inputs.items()
        }
        arguments |= {name: self.axes[name] for name in self.axes if name in parameters and name not in arguments}
        for entry in self.definition["outputs"].values():
            buffer = entry.get("param")
            if buffer and buffer not in arguments and parameters[buffer].default is inspect.Parameter.empty:
                arguments[buffer] = self._tensor(entry)
        result = self.api(**arguments)
        if result is None:
            return {name: arguments[entry["param"]] for name, entry in self.definition["outputs"].items()}
        result = result if isinstance(result, tuple) else (result,)
        return dict(zip(self.definition["outputs"], result, strict=True))

    def _overwritten(self) -> set[str]:
        return {entry.get("param") for entry in self.definition["outputs"].values()}


def load(path: Path, device: str) -> Call:
    return Call(json.loads(path.read_text()), device)


FILES = pytest.mark.parametrize("path", sorted(example.OUT.glob("*.json")), ids=lambda path: path.stem)


@FILES
def test_text_returns_what_the_definition_says(path, device):
    call = load(path, device)
    for name, value in call.expected().items():
        entry = call.definition["outputs"][name]
        assert list(value.shape) == [call.axes[axis] for axis in entry["shape"]]
        assert value.dtype == getattr(torch, entry["dtype"])


@FILES
def test_text_is_the_reference(path, device):
    call = load(path, device)
    template = call.api._trace_template
    reference = template.reference
    fixed = {name: call.axes[name] for name in inspect.signature(reference).parameters if name in call.axes}
    dtypes = {f"{n}_dtype": getattr(torch, e["dtype"]) for n, e in call.definition["outputs"].items()}
    fixed |= {name: dtypes[name] for name in inspect.signature(reference).parameters if name in dtypes}
    outputs = reference(**call.inputs, **fixed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for expected, actual in zip(call.expected().values(), outputs, strict=True):
        assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))


@FILES
def test_op_agrees_with_the_text(path, device):
    call = load(path, device)
    if device == "cpu" and call.name in CUDA_ONLY:
        pytest.skip(f"{call.name} needs a GPU")
    expected = call.expected()
    check = call._function("check", "check") if "check" in call.definition else default_check
    assert check(expected, call.actual())
