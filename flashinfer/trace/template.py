# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of trace templates: what an API takes and returns, in named axes.

A template is data. ``definition.py`` turns it and the arguments of one call into a benchmark definition, ``source.py``
writes its functions as text, and its ``reference`` is the oracle that tests and benchmarks compare with.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Union

from ..errors import ArgumentError

__all__ = ["Axis", "Const", "Scalar", "Tensor", "TraceDispatch", "TraceTemplate", "Value", "Var", "by_rank"]


@dataclass(frozen=True)
class Var:
    """An axis that differs from call to call."""

    description: str = ""


@dataclass(frozen=True)
class Const:
    """An axis fixed by the model; its value is part of the definition's name.

    ``abbrev`` is written before the value in that name: ``None`` means the axis name, ``""`` keeps the axis out.
    ``value`` fixes the axis in the template itself; otherwise it is read from the call.
    """

    description: str = ""
    abbrev: Optional[str] = None
    value: Optional[int] = None


@dataclass(frozen=True)
class Tensor:
    """A tensor whose dimensions are axes; ``()`` is a 0-d tensor.

    Parameters
    ----------
    dim_names
        One axis name per dimension. A call may add leading dimensions of size one.
    param
        Parameter of the API; the name in the definition when omitted. For an output, the buffer or the input it
        overwrites.
    tuple_idx
        Which element, when the parameter is a tuple of tensors.
    dtype
        Fixed dtype, used when no tensor of the call tells another one.
    may_lack
        An axis that a call may leave out, which is one then; the definition has it.
    dtype_from
        Outputs: the input or parameter whose dtype is taken when it is there, or that is a dtype. Next comes ``param``.
    """

    dim_names: Sequence[str]
    _: KW_ONLY
    param: Optional[str] = None
    tuple_idx: Optional[int] = None
    may_lack: Optional[str] = None
    dtype: Optional[str] = None
    dtype_from: Optional[str] = None
    optional: bool = False
    description: str = ""


@dataclass(frozen=True)
class Scalar:
    """A Python number or flag."""

    dtype: str = "float32"
    _: KW_ONLY
    param: Optional[str] = None
    optional: bool = False
    description: str = ""


Axis = Union[Var, Const]
Value = Union[Tensor, Scalar]


@dataclass(frozen=True, eq=False)
class TraceTemplate:
    """One API in terms of axes, inputs and outputs.

    Parameters
    ----------
    op_type
        Category of the op, such as ``"rmsnorm"``.
    axes, inputs, outputs
        By the name used in the definition; the order of inputs and outputs is the interface of ``reference``.
    name_prefix
        Start of the definition's name; ``op_type`` when omitted.
    reference
        Plain torch function of the inputs that returns the outputs, new values of mutated arguments included. A
        parameter that is no input has a default, or is named after a ``Const`` axis or ``<output>_dtype``, whose values
        the definition fixes.
    check
        ``check(reference_outputs, actual_outputs) -> bool`` where ``default_check`` is too strict.
    init
        ``init(**axes, device=...) -> dict`` makes arguments where any random tensors would be refused.
    constraints
        Python expressions over axes and scalars that hold for every valid call.
    """

    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    _: KW_ONLY
    name_prefix: Optional[str] = None
    reference: Optional[Callable[..., Any]] = None
    check: Optional[Callable[..., bool]] = None
    init: Optional[Callable[..., dict[str, Any]]] = None
    constraints: Optional[Sequence[str]] = None
    tags: Optional[Sequence[str]] = None
    description: str = ""

    def __post_init__(self) -> None:
        shared = self.inputs.keys() & self.outputs.keys()
        if shared:
            raise ArgumentError(f"TraceTemplate: {self.prefix} names {sorted(shared)} as input and as output")
        for name, value in [*self.inputs.items(), *self.outputs.items()]:
            unknown = set(getattr(value, "dim_names", ())) - self.axes.keys()
            if unknown:
                raise ArgumentError(f"TraceTemplate: {self.prefix}: {name} uses undeclared axes {sorted(unknown)}")

    @property
    def prefix(self) -> str:
        return self.name_prefix or self.op_type

    def parameters(self) -> Iterator[str]:
        """Names that the API's signature must have."""
        for name, value in self.inputs.items():
            yield value.param or name
        for value in self.outputs.values():
            if value.param is not None:
                yield value.param


@dataclass(frozen=True, eq=False)
class TraceDispatch:
    """Several templates behind one API; ``choose(**arguments)`` picks the one that describes a call."""

    choose: Callable[..., TraceTemplate]
    templates: Sequence[TraceTemplate]

    def __call__(self, /, **arguments: Any) -> TraceTemplate:  # a method has an argument of that name too
        return self.choose(**arguments)

    @property
    def reference(self) -> Optional[Callable[..., Any]]:
        return self.templates[0].reference

    @property
    def init(self) -> Optional[Callable[..., dict[str, Any]]]:
        return self.templates[0].init


def by_rank(param: str, templates: Mapping[int, TraceTemplate]) -> TraceDispatch:
    """Choose by the number of dimensions of one tensor argument."""

    def choose(**arguments: Any) -> TraceTemplate:
        value = arguments.get(param)
        rank = getattr(value, "ndim", None)
        if rank is None:
            raise ArgumentError(f"fi_trace: {param} is {value!r}, expected a tensor of rank {sorted(templates)}")
        if rank not in templates:
            raise ArgumentError(f"fi_trace: {param} has rank {rank}, expected one of {sorted(templates)}")
        return templates[rank]

    return TraceDispatch(choose, tuple(templates.values()))
