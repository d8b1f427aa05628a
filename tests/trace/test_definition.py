# SPDX-License-Identifier: Apache-2.0
"""Definitions made from a template and arguments: axes, names, dtypes, errors. No op is involved."""

from __future__ import annotations

import json

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.fi_trace import (
    api_name,
    attach_fi_trace,
    build_fi_trace_fn,
    fi_trace,
    register_fi_trace,
    traced_functions,
)
from flashinfer.trace import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var, default_check
from flashinfer.trace.definition import axis_values, definition, definition_name
from flashinfer.trace.template import by_rank

from .schema import validate


def add_reference(x, y, bias=None, factor=1.0):
    return (x + y) * factor if bias is None else (x + y) * factor + bias


ADD = TraceTemplate(
    "add",
    axes={"rows": Var("all of them"), "cols": Const(abbrev="c")},
    inputs={
        "x": Tensor(("rows", "cols"), param="a"),
        "y": Tensor(("rows", "cols"), param="b"),
        "bias": Tensor(("cols",), dtype="float32", optional=True, description="added last"),
        "factor": Scalar(),
    },
    outputs={"out": Tensor(("rows", "cols"), param="out", dtype_from="x")},
    reference=add_reference,
    tags=["status:verified"],
    constraints=["cols % 2 == 0"],
    description="Sum of two.",
)


def add(a, b, bias=None, factor=1.0, out=None):
    raise AssertionError("a trace must not run the function")


attach_fi_trace(add, ADD)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_every_field():
    made = add.fi_trace(a=meta(3, 8), b=meta(3, 8, dtype=torch.float16))
    validate(made)
    assert list(made) == [
        "name",
        "description",
        "op_type",
        "tags",
        "axes",
        "constraints",
        "inputs",
        "outputs",
        "reference",
    ]
    assert made["name"] == "add_c8"
    assert made["description"] == "Sum of two."
    assert made["op_type"] == "add"
    assert made["tags"] == [f"fi_api:{__name__}.add", "status:verified"]
    assert made["axes"] == {
        "rows": {"type": "var", "description": "all of them"},
        "cols": {"type": "const", "value": 8},
    }
    assert made["constraints"] == ["cols % 2 == 0"]
    assert made["inputs"] == {
        "x": {"shape": ["rows", "cols"], "dtype": "bfloat16"},
        "y": {"shape": ["rows", "cols"], "dtype": "float16"},
        "bias": {"shape": ["cols"], "dtype": "float32", "optional": True, "description": "added last"},
        "factor": {"shape": None, "dtype": "float32"},
    }
    assert made["outputs"] == {"out": {"shape": ["rows", "cols"], "dtype": "bfloat16", "param": "out"}}


def test_three_ways_to_ask(tmp_path):
    arguments = {"a": meta(3, 8), "b": meta(3, 8)}
    attribute = add.fi_trace(**arguments)
    assert fi_trace(add, **arguments) == attribute
    assert add.fi_trace(*arguments.values()) == attribute
    assert fi_trace(add, save_dir=tmp_path / "new", **arguments) == attribute
    assert json.loads((tmp_path / "new" / "add_c8.json").read_text()) == attribute
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["add_c8.json"]


def test_name_can_be_chosen(tmp_path):
    add.fi_trace(meta(3, 8), meta(3, 8), name="mine", save_dir=str(tmp_path))
    assert json.loads((tmp_path / "mine.json").read_text())["name"] == "mine"


@pytest.mark.parametrize("name", ["", "a/b", "../a", 5])
def test_a_name_is_that_of_a_file(tmp_path, name):
    with pytest.raises(ArgumentError, match=r"fi_trace: name must be a file name .*, got"):
        add.fi_trace(meta(3, 8), meta(3, 8), name=name, save_dir=tmp_path / "inner")
    assert list(tmp_path.iterdir()) == []


def test_attached_functions_are_listed():
    assert traced_functions[f"{__name__}.add"] is add
    assert add._trace_template is ADD
    assert not hasattr(add, "fi_init")


def test_functions_of_two_modules_have_two_names(monkeypatch):
    def other(a, b): ...

    monkeypatch.setattr(other, "__module__", "flashinfer.recurrent.gdn_step")
    monkeypatch.setattr(other, "__qualname__", "gated_delta_rule_mtp")
    monkeypatch.setitem(traced_functions, api_name(other), add)
    with pytest.raises(ArgumentError, match=r"gdn_decode.gated_delta_rule_mtp: names of APIs must differ, got one in"):
        attach_fi_trace(other, ADD)


def test_function_without_template():
    def plain(a, b): ...

    with pytest.raises(ValueError, match="must be a function with a trace template, got"):
        fi_trace(plain, a=meta(1, 2), b=meta(1, 2))
    register_fi_trace(f"{__name__}.{plain.__qualname__}", ADD)
    assert fi_trace(plain, a=meta(1, 2), b=meta(1, 2))["name"] == "add_c2"


def test_specification_alone_takes_keywords():
    assert build_fi_trace_fn(ADD)(a=meta(1, 2), b=meta(1, 2))["tags"][0] == "fi_api:add"


def test_methods_of_a_template(tmp_path):
    assert ADD.definition_name({"rows": 3, "cols": 8}) == "add_c8"
    trace = ADD.build_fi_trace_fn("package.module.add")
    made = trace(a=meta(1, 2), b=meta(1, 2), save_dir=tmp_path, name="mine")
    assert made["tags"][0] == "fi_api:package.module.add"
    assert json.loads((tmp_path / "mine.json").read_text()) == made
    assert ADD.build_fi_trace_fn(add)(meta(1, 2), meta(1, 2)) == add.fi_trace(meta(1, 2), meta(1, 2))


def test_check_is_never_none():
    assert ADD.check is default_check
    assert TraceTemplate("op", {}, {}, {}, check=None).check is default_check


def test_method_of_an_object():
    class Wrapper:
        def run(self, a, b):
            raise AssertionError("a trace must not run the method")

    attach_fi_trace(Wrapper.run, ADD)
    assert fi_trace(Wrapper().run, a=meta(1, 2), b=meta(1, 2))["name"] == "add_c2"


def test_unknown_arguments_are_ignored():
    made = add.fi_trace(meta(1, 2), meta(1, 2))
    assert add.fi_trace(meta(1, 2), meta(1, 2), skip_check=True, workspace=meta(2)) == made
    assert ADD.build_fi_trace_fn("package.add")(a=meta(1, 2), b=meta(1, 2), workspace=meta(2))["name"] == "add_c2"


def test_axis_lookup_order():
    template = TraceTemplate(
        "op",
        axes={"fixed": Const(value=7), "a": Const(), "b": Const(), "c": Const(), "d": Const(), "e": Var()},
        inputs={
            "late": Tensor(("c", "a"), optional=True),
            "x": Tensor(("a",)),
            "b": Scalar("int32"),
        },
        outputs={"out": Tensor(("a",))},
    )
    arguments = {"x": meta(2), "late": meta(5, 2), "b": 3, "d": 6}
    assert axis_values(template, arguments) == {"fixed": 7, "a": 2, "b": 3, "c": 5, "d": 6}
    assert definition_name(template, arguments) == "op_fixed7_a2_b3_c5_d6"
    with pytest.raises(ArgumentError, match="an argument must tell the size of c, got"):
        axis_values(template, arguments | {"late": None})


def test_sizes_are_not_negative():
    """Check that k = -1 is rejected; its definition would not validate."""
    template = TraceTemplate("op", {"k": Const(abbrev="k")}, {"k": Scalar("int32")}, {})
    with pytest.raises(ArgumentError, match="op: k must be a size of at least 0, got -1"):
        axis_values(template, {"k": -1})


@pytest.mark.parametrize("abbrev, name", [(None, "op_cols4"), ("", "op"), ("h", "op_h4")])
def test_abbreviation(abbrev, name):
    template = TraceTemplate("op", {"cols": Const(abbrev=abbrev)}, {"x": Tensor(("cols",))}, {})
    assert definition_name(template, {"x": meta(4)}) == name


def test_sizes_must_agree():
    with pytest.raises(ValueError, match=r"add: y.shape\[1\] must be cols = 8 \(from x.shape\[1\]\), got 6"):
        add.fi_trace(meta(3, 8), meta(3, 6))


def test_leading_ones_are_ignored():
    assert add.fi_trace(meta(3, 8), meta(3, 8), bias=meta(1, 8))["inputs"]["bias"]["shape"] == ["cols"]
    with pytest.raises(ValueError, match=r"x must have shape \(rows, cols\), got \(3, 3, 8\)"):
        add.fi_trace(meta(3, 3, 8), meta(3, 8))
    with pytest.raises(ValueError, match=r"x must have shape .*, got \(8,\)"):
        add.fi_trace(meta(8), meta(3, 8))


@pytest.mark.parametrize("value", [meta(dtype=torch.float32), meta(1, dtype=torch.float32), 0.5])
def test_one_value_in_three_forms(value):
    template = TraceTemplate("op", {}, {"scale": Tensor((), dtype="float32")}, {"out": Tensor(())})
    entry = definition(template, {"scale": value}, api="op")["inputs"]["scale"]
    assert entry == {"shape": [], "dtype": "float32"}


def test_missing_tensor():
    with pytest.raises(ValueError, match="add: b must be a tensor, got None"):
        add.fi_trace(a=meta(3, 8))


def test_tuple_argument():
    template = TraceTemplate(
        "op",
        axes={"k_size": Const(), "v_size": Const()},
        inputs={
            "k": Tensor(("k_size",), param="cache", tuple_idx=0),
            "v": Tensor(("v_size",), param="cache", tuple_idx=1),
        },
        outputs={"out": Tensor(("v_size",))},
    )
    made = definition(template, {"cache": (meta(4), meta(6, dtype=torch.float16))}, api="op")
    validate(made)
    assert made["name"] == "op_k_size4_v_size6"
    assert made["outputs"]["out"]["dtype"] == "float16"  # dtype of the input with the common axis


@pytest.mark.parametrize(
    "dtype, word",
    [
        (torch.uint8, "int8"),
        (torch.uint32, "int32"),
        (torch.float64, "float32"),
        (torch.float8_e8m0fnu, "int8"),
        (torch.float4_e2m1fn_x2, "float4_e2m1"),
        (torch.bool, "bool"),
    ],
)
def test_dtype_outside_the_schema(dtype, word):
    template = TraceTemplate("op", {"n": Const()}, {"x": Tensor(("n",), description="bytes")}, {"out": Tensor(("n",))})
    made = definition(template, {"x": meta(4, dtype=dtype)}, api="op")
    validate(made)
    assert made["inputs"]["x"]["dtype"] == word
    truth = str(dtype).removeprefix("torch.")
    assert made["inputs"]["x"]["description"] == ("bytes" if word == truth else f"bytes; really {truth}")


def test_dtype_without_a_word():
    with pytest.raises(ArgumentError, match="got complex64"):
        add.fi_trace(meta(1, 2, dtype=torch.complex64), meta(1, 2))


def test_output_dtype_of_a_given_buffer():
    template = TraceTemplate(
        "op",
        {"n": Const()},
        {"x": Tensor(("n",))},
        {"out": Tensor(("n",), param="out", dtype_from="out", dtype="float8_e4m3fn")},
    )
    for out, word in [(None, "float8_e4m3fn"), (meta(4, dtype=torch.float8_e5m2), "float8_e5m2")]:
        assert definition(template, {"x": meta(4), "out": out}, api="op")["outputs"]["out"]["dtype"] == word


def test_dispatch_on_arguments():
    vector = TraceTemplate("op", {"n": Const()}, {"x": Tensor(("n",))}, {"out": Tensor(("n",))}, name_prefix="v")
    trace = build_fi_trace_fn(by_rank("x", {1: vector}))
    assert trace(x=meta(4))["name"] == "v_n4"
    with pytest.raises(ArgumentError, match=r"x must have rank \[1\], got 2"):
        trace(x=meta(4, 4))
    with pytest.raises(ArgumentError, match=r"x must be a tensor of rank \[1\], got 'four'"):
        trace(x="four")
    assert build_fi_trace_fn(lambda **_: vector)(x=meta(4))["name"] == "v_n4"


def test_template_checks_itself():
    with pytest.raises(ArgumentError, match=r"axes of .* must be known, got \['m'\]"):
        TraceTemplate("op", {"n": Var()}, {"x": Tensor(("n", "m"))}, {})


def test_an_output_may_have_the_name_of_the_input_that_it_overwrites():
    both = {"x": Tensor(("n",))}
    made = TraceTemplate("op", {"n": Var()}, both, both).build_fi_trace_fn("op")(x=meta(4))
    assert made["inputs"] == made["outputs"] == {"x": {"shape": ["n"], "dtype": "bfloat16"}}


def _pages_init(*, num_pages, device="cuda", seed=0):
    return {"pages": num_pages}


def _tokens_init(*, num_tokens, top_k=4, device="cuda", seed=0):
    return {"tokens": num_tokens * top_k}


def test_init_of_a_dispatch_is_chosen_by_its_arguments():
    templates = [TraceTemplate("op", {}, {}, {}, init=init) for init in (_pages_init, _tokens_init)]
    dispatch = TraceDispatch(lambda **_: templates[0], templates)
    assert dispatch.init(num_pages=3) == {"pages": 3}
    assert dispatch.init(num_tokens=3, top_k=2, device="cpu") == {"tokens": 6}
    with pytest.raises(ArgumentError, match=r"fi_init: arguments must be the axes of one template, got \['num_rows'\]"):
        dispatch.init(num_rows=3)
    assert TraceDispatch(lambda **_: templates[0], templates[:1]).init is _pages_init
