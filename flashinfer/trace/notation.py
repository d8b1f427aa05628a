# SPDX-License-Identifier: Apache-2.0
"""A compact notation for templates: names, axes, inputs and outputs as one line of text each.

``name`` is that of the definitions, with const axes in braces: ``rope_h{num_q_heads}_d{head_dim}``. Values are
separated by semicolons, and each reads

    NAME[AXES]<-PARAMETER[INDEX]:DTYPE?     a tensor
    NAME<-PARAMETER:DTYPE?                  a number

with these parts, all but the name and ``[AXES]`` optional:

    (axis)          among the axes: one that a call may leave out, see ``Tensor.may_lack``
    *               after the axes: one half of a cache, see ``Tensor.half``
    !               after the axes: they are not read from the call, see ``Tensor.unread``
    <-PARAMETER     of the API, when it is called otherwise; of an output, the argument that it is written to
    [INDEX]         which element, when the parameter is a tuple
    :DTYPE          of a number; of a tensor that a call may lack; of an output
    =INPUT          of an output: the input or argument that has its dtype
    ?               optional
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Optional

from .._runtime.errors import ArgumentError
from .template import Axis, Const, Scalar, Tensor, TraceTemplate, Value, Var

__all__ = ["template_of_text"]

_VALUE = re.compile(
    r"(?P<name>\w+)(?P<dims>\[[^]]*\])?(?P<half>\*)?(?P<unread>!)?(?:<-(?P<param>\w+)(?:\[(?P<index>\d+)\])?)?"
    r"(?::(?P<dtype>\w+))?(?:=(?P<dtype_from>\w+))?(?P<optional>\?)?"
)


def template_of_text(
    name: str,
    op_type: str,
    *,
    var: str,
    inputs: str,
    outputs: str,
    hidden: str = "",
    notes: Optional[Mapping[str, str]] = None,
    **rest: Any,
) -> TraceTemplate:
    """Return the template that a few lines describe.

    Parameters
    ----------
    name
        Name of the definitions, with the const axes in braces.
    op_type
        Category of the op.
    var, hidden
        Variable axes, and const axes without a part in the name; separated by spaces.
    inputs, outputs
        Values in the notation of this module, separated by semicolons.
    notes
        Descriptions of axes, inputs and outputs, by name.
    **rest
        Further parameters of :class:`TraceTemplate`.
    """
    notes = notes or {}
    prefix, consts = _parts_of_name(name)
    axes: dict[str, Axis] = {axis: Const(notes.get(axis, ""), abbrev=abbrev) for axis, abbrev in consts.items()}
    axes |= {axis: Const(notes.get(axis, ""), abbrev="") for axis in hidden.split()}
    axes |= {axis: Var(notes.get(axis, "")) for axis in var.split()}
    return TraceTemplate(op_type, axes, _values(inputs, notes), _values(outputs, notes), name_prefix=prefix, **rest)


def _parts_of_name(name: str) -> tuple[str, dict[str, str]]:
    """Return what comes before the const axes, and the abbreviation of each."""
    pieces = re.split(r"{(\w+)}", name)
    prefix, _, first = pieces[0].rpartition("_")
    abbreviations = [first, *(piece.removeprefix("_") for piece in pieces[2:-1:2])]
    return prefix, dict(zip(pieces[1::2], abbreviations, strict=True))


def _values(text: str, notes: Mapping[str, str]) -> dict[str, Value]:
    return dict(_value(part.strip(), notes) for part in text.split(";") if part.strip())


def _value(text: str, notes: Mapping[str, str]) -> tuple[str, Value]:
    match = _VALUE.fullmatch(text)
    if match is None:
        raise ArgumentError(f"template_of_text: a value must be NAME[AXES] or NAME:DTYPE, got {text!r}")
    name, dims, index = match["name"], match["dims"], match["index"]
    common: dict[str, Any] = {
        "param": match["param"],
        "optional": match["optional"] is not None,
        "description": notes.get(name, ""),
    }
    if dims is None:
        return name, Scalar(match["dtype"] or "float32", **common)
    axes = [axis.strip() for axis in dims[1:-1].split(",") if axis.strip()]
    missing = [axis.strip("()") for axis in axes if axis.startswith("(")]
    return name, Tensor(
        tuple(axis.strip("()") for axis in axes),
        tuple_idx=None if index is None else int(index),
        may_lack=missing[0] if missing else None,
        half=match["half"] is not None,
        unread=match["unread"] is not None,
        dtype=match["dtype"],
        dtype_from=match["dtype_from"],
        **common,
    )
