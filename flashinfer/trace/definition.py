# SPDX-License-Identifier: Apache-2.0
"""A template and the arguments of one call become a definition in the schema of flashinfer-bench.

Only shapes, dtypes and Python numbers are read, so tensors may live on any device, ``meta`` included.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional

import torch

from .._runtime.errors import ArgumentError
from .check import default_check
from .function_text import function_source
from .source import run_source
from .template import Axis, Const, Scalar, Tensor, TraceTemplate, Value

__all__ = ["axis_values", "definition", "definition_name", "input_value", "output_dtype"]

Arguments = Mapping[str, Any]

_FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1")
_SCHEMA_DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "bool")
# The schema has no word for these: the nearest one is written, and the truth in the description.
_SUBSTITUTES = {
    "float64": "float32",
    "float4_e2m1fn_x2": "float4_e2m1",
    "uint8": "int8",
    "uint16": "int16",
    "uint32": "int32",
    "uint64": "int64",
    "float8_e8m0fnu": "int8",
}


def definition(
    template: TraceTemplate, arguments: Arguments, *, api: str, name: Optional[str] = None
) -> dict[str, Any]:
    """The definition of a call.

    Parameters
    ----------
    template
        What the API computes.
    arguments
        Arguments of the call by parameter name; also values of axes that no argument tells.
    api
        ``module.qualname`` of the API, kept as a tag.
    name
        Overrides the name made of the const axes.
    """
    values = axis_values(template, arguments)
    inputs = {key: _input_entry(template, key, arguments) for key in template.inputs}
    outputs = {key: _output_entry(template, key, arguments) for key in template.outputs}
    fixed: dict[str, Any] = {axis: values[axis] for axis, kind in template.axes.items() if isinstance(kind, Const)}
    fixed |= {f"{key}_dtype": output_dtype(template, key, arguments) for key in template.outputs}
    result = {
        "name": name or template.definition_name(values),
        "description": template.description,
        "op_type": template.op_type,
        "tags": [f"fi_api:{api}", *(template.tags or ())],
        "axes": {axis: _axis_entry(kind, values.get(axis)) for axis, kind in template.axes.items()},
        "constraints": list(template.constraints or ()),
        "inputs": inputs,
        "outputs": outputs,
        "reference": run_source(template, fixed),
    }
    if template.check is not default_check:
        result["check"] = function_source(template.check, "check")
    if template.init is not None:
        result["init"] = function_source(template.init, "init", *_known_as(template, "init"))
    return result


def _known_as(template: TraceTemplate, what: str) -> list[str]:
    return [] if template.stem is None else [f"_{template.stem}_{what}"]


def definition_name(template: TraceTemplate, arguments: Arguments) -> str:
    return template.definition_name(axis_values(template, arguments))


def axis_values(template: TraceTemplate, arguments: Arguments) -> dict[str, int]:
    """Values of the axes, each from the first that knows it: a required tensor, an optional one, a number of the axis'
    name among the inputs, any argument of that name, the template, other axes. Variable axes may stay unknown.

    Tensors must agree; what else tells a size yields to them, as in published definitions: the op checks its arguments.
    """
    known: dict[str, tuple[int, str]] = {}

    def learn(axis: str, value: int, source: str) -> None:
        if value < 0:  # the call is refused, too, and the schema has no such size
            raise ArgumentError(f"{template.prefix}: {source} must be a size of at least 0, got {value}")
        expected, origin = known.setdefault(axis, (value, source))
        if value != expected:
            raise ArgumentError(f"{template.prefix}: {source} must be {axis} = {expected} (from {origin}), got {value}")

    def learn_tensors(optional: bool) -> None:
        for name, spec, value in _tensors(template, arguments):
            if spec.optional == optional and not spec.unread:
                for i, (axis, size) in enumerate(zip(spec.dim_names, _fit(template, name, spec, value), strict=True)):
                    learn(axis, int(size), f"{name}.shape[{i}]")

    learn_tensors(optional=False)
    learn_tensors(optional=True)
    for name, spec in template.inputs.items():
        number = input_value(name, spec, arguments)
        if isinstance(spec, Scalar) and name in template.axes and name not in known and number is not None:
            learn(name, int(number), name)
    for axis, kind in template.axes.items():
        number = arguments.get(axis)
        if axis not in known and isinstance(number, int):
            learn(axis, number, axis)
        if axis not in known and isinstance(kind, Const) and kind.value is not None:
            known[axis] = (kind.value, "the template")
        if axis not in known and isinstance(kind, Const) and kind.of is not None:
            known[axis] = (kind.of({name: value for name, (value, _) in known.items()}), "other axes")
        if axis not in known and isinstance(kind, Const):
            raise ArgumentError(f"{template.prefix}: an argument must tell the size of {axis}, got {sorted(arguments)}")
    return {axis: value for axis, (value, _) in known.items()}


def input_value(name: str, spec: Value, arguments: Arguments) -> Any:
    """Return the argument of a call that is the input ``name``; None if the call lacks it."""
    value = arguments.get(spec.param or name)
    if isinstance(spec, Tensor) and isinstance(value, (tuple, list)):
        index = spec.tuple_idx or 0
        return value[index] if index < len(value) else None  # an optional element may be missing
    return value


def _tensors(template: TraceTemplate, arguments: Arguments) -> Iterator[tuple[str, Tensor, Any]]:
    """The tensor inputs that the call has. A number may stand for a 0-d tensor."""
    for name, spec in template.inputs.items():
        if isinstance(spec, Tensor):
            value = input_value(name, spec, arguments)
            if value is not None:
                yield name, spec, value
            elif not spec.optional:
                raise ArgumentError(f"{template.prefix}: {spec.param or name} must be a tensor, got None")


def _fit(template: TraceTemplate, name: str, spec: Tensor, value: Any) -> tuple[int, ...]:
    """Shape without the leading dimensions of size one that the template does not have, and with the one that a call
    may lack."""
    shape = tuple(getattr(value, "shape", ()))
    extra = len(shape) - len(spec.dim_names)
    if extra == 1 and spec.half and shape[1] == 2:
        return (shape[0], *shape[2:])
    if extra == -1 and spec.may_lack is not None:
        at = list(spec.dim_names).index(spec.may_lack)
        return (*shape[:at], 1, *shape[at:])
    if extra < 0 or any(size != 1 for size in shape[:extra]):
        raise ArgumentError(f"{template.prefix}: {name} must have shape ({', '.join(spec.dim_names)}), got {shape}")
    return shape[extra:]


def _axis_entry(kind: Axis, value: Optional[int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "const", "value": value} if isinstance(kind, Const) else {"type": "var"}
    return entry | ({"description": kind.description} if kind.description else {})


def _input_entry(template: TraceTemplate, name: str, arguments: Arguments) -> dict[str, Any]:
    spec = template.inputs[name]
    if isinstance(spec, Scalar):
        return _entry(None, spec.dtype, spec)
    dtype = getattr(input_value(name, spec, arguments), "dtype", None) or spec.dtype
    return _entry(spec.dim_names, dtype or _neighbour_dtype(template, spec, arguments), spec)


def _output_entry(template: TraceTemplate, name: str, arguments: Arguments) -> dict[str, Any]:
    spec = template.outputs[name]
    shape = spec.dim_names if isinstance(spec, Tensor) else None
    entry = _entry(shape, output_dtype(template, name, arguments), spec)
    return entry | ({"param": spec.param} if spec.param else {})


def output_dtype(template: TraceTemplate, output: str, arguments: Arguments) -> torch.dtype:
    """Return the dtype that an output of the call has."""
    spec = template.outputs[output]
    if isinstance(spec, Scalar):
        return getattr(torch, spec.dtype)
    overwritten = output if output in template.inputs and spec.dtype is None else None
    for name in filter(None, (spec.dtype_from, spec.param, overwritten)):
        source = template.inputs.get(name)
        value = input_value(name, source, arguments) if source else arguments.get(name)
        dtype = value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)
        if dtype is not None:
            return dtype
    return getattr(torch, spec.dtype) if spec.dtype else _neighbour_dtype(template, spec, arguments)


def _neighbour_dtype(template: TraceTemplate, spec: Tensor, arguments: Arguments) -> torch.dtype:
    """Return the dtype of the first input that shares an axis with the output."""
    for _, other, value in _tensors(template, arguments):
        if set(other.dim_names) & set(spec.dim_names):
            return value.dtype
    return torch.float32


def _entry(shape: Any, dtype: Any, spec: Value) -> dict[str, Any]:
    spelled = str(dtype).removeprefix("torch.")
    word = spelled if spelled in _SCHEMA_DTYPES else _SUBSTITUTES.get(spelled)
    if word is None:
        raise ArgumentError(f"fi_trace: dtype must be one of {_SCHEMA_DTYPES}, got {spelled}")
    entry: dict[str, Any] = {"shape": None if shape is None else list(shape), "dtype": word}
    if spec.optional:
        entry["optional"] = True
    notes = [spec.description] if spec.description else []
    if word != spelled:
        notes.append(f"really {spelled}")
    return entry | ({"description": "; ".join(notes)} if notes else {})
