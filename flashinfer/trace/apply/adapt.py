# SPDX-License-Identifier: Apache-2.0
"""Call a candidate with the inputs of a definition, and give its outputs back as the API would."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Mapping, Optional

import torch

from ..._runtime.errors import ArgumentError
from ..definition import axis_values, input_value, output_dtype
from ..template import Tensor, TraceTemplate

__all__ = [
    "adapt_and_call",
    "build_candidate_kwargs",
    "candidate_parameters",
    "extract_input_dtypes",
    "ordered_input_values",
    "output_dests",
    "returns_list",
    "returns_what",
]

#: Parameter of an API -> the output that the API returns only if the argument is true.
_ASKED_FOR = {"return_lse": "lse"}


def build_candidate_kwargs(template: TraceTemplate, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the definition, in its order; an optional one that the call lacks is None."""
    return {name: input_value(name, spec, namespace) for name, spec in template.inputs.items()}


def ordered_input_values(template: TraceTemplate, namespace: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of the definition in its order, as a function by position takes them."""
    return list(build_candidate_kwargs(template, namespace).values())


def extract_input_dtypes(template: TraceTemplate, namespace: Mapping[str, Any]) -> dict[str, str]:
    """Return the dtypes of the tensors of a call by input, spelled as in definitions (``"bfloat16"``)."""
    values = build_candidate_kwargs(template, namespace)
    return {name: str(x.dtype).removeprefix("torch.") for name, x in values.items() if isinstance(x, torch.Tensor)}


def output_dests(template: TraceTemplate) -> dict[str, Optional[str]]:
    """Return, for each output, the parameter of the API that the result is written to; None if it is only returned."""
    return {name: spec.param for name, spec in template.outputs.items()}


def returns_what(original: Callable[..., Any]) -> Optional[int]:
    """Return how many values an API returns: 0 for None, the length of a tuple, None where arguments decide."""
    annotation = inspect.signature(original).return_annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if text in ("None", "NoneType"):
        return 0
    if text.endswith("Tensor"):
        return 1
    if text.startswith("tuple[") and "..." not in text:
        return text.count(",") + 1 if text.count("[") == 1 + text.count("Optional[") else None
    return None


def returns_list(original: Callable[..., Any]) -> bool:
    """Return True for an API that gives its outputs as a list, even where there is one."""
    return str(inspect.signature(original).return_annotation).startswith("list[")


@functools.cache
def candidate_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of a candidate that have a default: it takes them if the API has them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a native function has no signature
        return ()
    return tuple(p.name for p in parameters if p.default is not p.empty)


def _allocate(template: TraceTemplate, name: str, namespace: Mapping[str, Any]) -> torch.Tensor:
    """Return an uninitialised tensor for an output."""
    spec = template.outputs[name]
    sizes = axis_values(template, namespace)
    missing = [axis for axis in getattr(spec, "dim_names", ()) if axis not in sizes]
    if not isinstance(spec, Tensor) or missing:
        raise ArgumentError(f"trace_apply: {template.prefix}: arguments must tell the shape of {name}, got {missing}")
    device = next(x.device for x in build_candidate_kwargs(template, namespace).values() if isinstance(x, torch.Tensor))
    shape = [sizes[axis] for axis in spec.dim_names]
    return torch.empty(shape, dtype=output_dtype(template, name, namespace), device=device)


def _destination(namespace: Mapping[str, Any], template: TraceTemplate, name: str, param: Optional[str]) -> Any:
    value = None if param is None else namespace.get(param)
    index = getattr(template.outputs[name], "tuple_idx", None)
    return value[index or 0] if isinstance(value, (tuple, list)) else value


def _wanted(template: TraceTemplate, namespace: Mapping[str, Any]) -> list[str]:
    """Return the outputs that this call returns."""
    unwanted = {output for flag, output in _ASKED_FOR.items() if flag in namespace and not namespace[flag]}
    return [name for name in template.outputs if name not in unwanted]


def adapt_and_call(
    *,
    template: TraceTemplate,
    fn: Callable[..., Any],
    namespace: Mapping[str, Any],
    dps: bool,
    is_inplace: bool,
    dests: Mapping[str, Optional[str]],
    positional: bool = False,
) -> Any:
    """Call a candidate in place of an API.

    Parameters
    ----------
    template : TraceTemplate
        Template of the definition.
    fn : Callable
        Candidate; takes the inputs of the definition, and parameters of the API that it names with a default.
    namespace : Mapping[str, Any]
        Arguments of the API by name.
    dps : bool
        True if the candidate takes its outputs as further arguments and returns nothing.
    is_inplace : bool
        True if the API returns None.
    dests : Mapping[str, Optional[str]]
        Parameter of the API that each output is written to, as :func:`output_dests` returns them.
    positional : bool
        True if the candidate takes its arguments by position, as native functions do.

    Returns
    -------
    Any
        What the API returns: None, a tensor, or a tuple of tensors.
    """
    inputs = build_candidate_kwargs(template, namespace)
    more = {} if positional else {name: namespace[name] for name in candidate_parameters(fn) if name in namespace}
    more = {name: value for name, value in more.items() if name not in inputs}
    buffers = {name: _destination(namespace, template, name, dests.get(name)) for name in template.outputs}
    if dps:
        outputs = {
            name: buffer if isinstance(buffer, torch.Tensor) else _allocate(template, name, namespace)
            for name, buffer in buffers.items()
        }
        # An output that overwrites an input of the same name is one argument, which the candidate changes.
        added = {name: tensor for name, tensor in outputs.items() if name not in inputs}
        if positional:
            fn(*inputs.values(), *added.values())
        else:
            fn(**inputs, **more, **added)
    else:
        result = fn(*inputs.values()) if positional else fn(**inputs, **more)
        outputs = _by_name(template, result)
        for name, buffer in buffers.items():
            if isinstance(buffer, torch.Tensor) and name in outputs and outputs[name] is not buffer:
                buffer.copy_(outputs[name])
                outputs[name] = buffer
    if is_inplace:
        return None
    returned = tuple(outputs[name] for name in _wanted(template, namespace) if name in outputs)
    return returned[0] if len(returned) == 1 else returned


def _by_name(template: TraceTemplate, result: Any) -> dict[str, Any]:
    """Return the results of a candidate by output: a dict has the names, a tuple or list the order."""
    names = list(template.outputs)
    if isinstance(result, dict):
        missing = [name for name in names if name not in result and not template.outputs[name].optional]
        if missing:
            raise ArgumentError(f"trace_apply: {template.prefix}: results must have {missing}, got {sorted(result)}")
        return dict(result)
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    needed = sum(not spec.optional for spec in template.outputs.values())
    if not needed <= len(values) <= len(names) or any(value is None for value in values[:needed]):
        got = "None" if result is None else f"{len(values)} values"
        raise ArgumentError(f"trace_apply: {template.prefix}: a candidate must return {names}, got {got}")
    return dict(zip(names, values, strict=False))
