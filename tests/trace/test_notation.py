# SPDX-License-Identifier: Apache-2.0
"""The notation of templates: each part of a value, and texts that are refused."""

from __future__ import annotations

import pytest

from flashinfer._runtime.errors import ArgumentError
from flashinfer.trace import Const, Scalar, Tensor, Var
from flashinfer.trace.notation import template_of_text


def described(inputs: str, outputs: str = "out[n]", **rest):
    return template_of_text(
        "some_op_h{h}_d_qk{d}", "op", var="n m", hidden="one", inputs=inputs, outputs=outputs, **rest
    )


def test_name_and_axes():
    template = described("x[n, h, d]", notes={"n": "rows", "h": "heads"})
    assert template.axes == {
        "h": Const("heads", abbrev="h"),
        "d": Const(abbrev="d_qk"),
        "one": Const(abbrev=""),
        "n": Var("rows"),
        "m": Var(),
    }
    assert template.prefix == "some_op"
    assert template.definition_name({"h": 8, "d": 64}) == "some_op_h8_d_qk64"


def test_tensors():
    template = described(
        "a[n, (m)]; b[n]<-pair[1]:int32?; c[m]!; e[n, m]*; s[]", "y[n]<-out:float32=a; z[]", notes={"b": "why"}
    )
    assert template.inputs == {
        "a": Tensor(("n", "m"), may_lack="m"),
        "b": Tensor(("n",), param="pair", tuple_idx=1, dtype="int32", optional=True, description="why"),
        "c": Tensor(("m",), unread=True),
        "e": Tensor(("n", "m"), half=True),
        "s": Tensor(()),
    }
    assert template.outputs == {
        "y": Tensor(("n",), param="out", dtype="float32", dtype_from="a"),
        "z": Tensor(()),
    }


def test_numbers():
    template = described("a:int32; b:float32?; count<-n:int32; c")
    assert template.inputs == {
        "a": Scalar("int32"),
        "b": Scalar("float32", optional=True),
        "count": Scalar("int32", param="n"),
        "c": Scalar("float32"),
    }


@pytest.mark.parametrize("text", ["a[n", "a b", "a?:int32", "a[n]<-"])
def test_what_is_no_value_is_refused(text):
    with pytest.raises(ArgumentError, match=r"template_of_text: a value must be NAME.*, got "):
        described(text)
