# SPDX-License-Identifier: Apache-2.0
"""Functions as text: copied functions, imports, and the arguments that ``run`` binds."""

from __future__ import annotations

import functools
import math
from typing import Any, Optional

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.trace import Const, Scalar, Tensor, TraceTemplate, Var, default_check
from flashinfer.trace.function_text import function_source
from flashinfer.trace.source import run_source
from flashinfer.trace.template import _render_init_source, _render_reference_source

LIMIT = 3.0


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def quarter(x: torch.Tensor) -> torch.Tensor:
    return halve(halve(x))


def area(x: torch.Tensor, bias: Optional[torch.Tensor] = None, eps: float = 1e-6) -> torch.Tensor:
    def limited(y: torch.Tensor) -> torch.Tensor:  # uses the global LIMIT, which the outer function does not
        return y.clamp(max=LIMIT)

    y = limited(quarter(x)) * math.pi + eps
    return y if bias is None else y + bias


def repeated(x: torch.Tensor, width: int, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return x.repeat_interleave(width).to(out_dtype)


def close(reference: Any, actual: Any) -> bool:
    return default_check(reference, actual, rtol=0.5)


def template(reference, inputs, axes=None, outputs=None) -> TraceTemplate:
    return TraceTemplate("op", axes or {"n": Var()}, inputs, outputs or {"out": Tensor(("n",))}, reference=reference)


def executed(text: str) -> dict[str, Any]:
    """Return the names that the text defines, executed without access to this module."""
    scope: dict[str, Any] = {"__name__": "text"}
    exec(compile(text, "<text>", "exec"), scope)
    return scope


def test_run_brings_helpers_constants_and_imports():
    inputs = {"x": Tensor(("n",)), "bias": Tensor(("n",), optional=True), "eps": Scalar()}
    text = run_source(template(area, inputs), {})
    x = torch.arange(20.0)
    run = executed(text)["run"]
    assert torch.equal(run(x, x, 0.5), area(x, x, 0.5))
    assert torch.equal(run(x), area(x))
    assert text.count("def halve(") == 1
    assert text.index("def halve(") < text.index("def quarter(") < text.index("def area(") < text.index("def run(")


def test_run_binds_what_the_definition_fixes():
    axes = {"n": Var(), "width": Const()}
    t = template(repeated, {"x": Tensor(("n",))}, axes, {"out": Tensor(("n", "width"))})
    run = executed(run_source(t, {"width": 3, "out_dtype": torch.bfloat16}))["run"]
    assert torch.equal(run(torch.ones(2)), torch.ones(6, dtype=torch.bfloat16))


def test_default_before_a_required_input_is_dropped():
    t = template(area, {"eps": Scalar(), "x": Tensor(("n",)), "bias": Tensor(("n",), optional=True)})
    assert "def run(eps, x, bias=None):" in run_source(t, {})


def test_without_reference_run_says_so():
    run = executed(run_source(template(None, {"x": Tensor(("n",))}), {}))["run"]
    with pytest.raises(RuntimeError, match="op has no reference"):
        run(torch.ones(1))


def test_reference_must_get_what_it_needs():
    with pytest.raises(ArgumentError, match=r"must be inputs or const axes, got \['width'\]"):
        run_source(template(repeated, {"x": Tensor(("n",)), "y": Scalar()}), {})


def scaled_pair(pair: tuple[torch.Tensor, torch.Tensor], workspace_buffer: Any, scale: float = 1.0, **_: Any) -> Any:
    return (pair[0] - pair[1]) * scale


def test_inputs_are_passed_by_the_names_of_the_reference_or_of_the_api():
    """Check that tuples are restored, scratch memory is None, and inputs unknown to the reference are ignored."""
    inputs = {
        "a": Tensor(("n",), param="pair", tuple_idx=0),
        "b": Tensor(("n",), param="pair", tuple_idx=1),
        "factor": Scalar(param="scale"),
        "flag": Scalar("int32", optional=True),
    }
    run = executed(run_source(template(scaled_pair, inputs), {}))["run"]
    assert torch.equal(run(torch.ones(2), torch.zeros(2), 3.0), torch.full((2,), 3.0))
    assert torch.equal(run(torch.ones(2), torch.zeros(2)), torch.ones(2))


def test_functions_of_other_packages_are_imported():
    text = function_source(close, "check")
    assert "from flashinfer.trace.check import default_check" in text
    assert executed(text)["check"](torch.ones(1), torch.tensor([1.4]))


@pytest.mark.parametrize("render", [_render_reference_source, _render_init_source])
def test_text_under_its_own_name(render):
    x = torch.arange(4.0)
    assert torch.equal(executed(render(area))["area"](x), area(x))


def test_partial_keeps_its_arguments():
    text = function_source(functools.partial(repeated, width=2, out_dtype=torch.int32), "init")
    assert torch.equal(executed(text)["init"](torch.ones(1)), torch.ones(2, dtype=torch.int32))


def test_local_function_is_refused():
    with pytest.raises(ArgumentError, match="must be a function of a module, got"):
        function_source(lambda x: x, "check")
