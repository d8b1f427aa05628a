# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of trace templates: what an API takes and returns, in named axes.

A template is data. ``definition.py`` turns it and the arguments of one call into a benchmark definition, ``source.py``
writes its functions as text, and its ``reference`` is the oracle that tests and benchmarks compare with.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import KW_ONLY, dataclass
from typing import Any, Callable, ClassVar, Iterator, Mapping, Optional, Sequence, Union

from .._runtime.errors import ArgumentError
from .check import default_check
from .check import default_tolerances as default_tolerances
from .check import standard_check as standard_check
from .function_text import function_source

__all__ = ["Axis", "Const", "Scalar", "Tensor", "TraceDispatch", "TraceTemplate", "Value", "Var", "by_rank"]


@dataclass(frozen=True)
class Var:
    """An axis that differs from call to call."""

    description: str = ""


@dataclass(frozen=True)
class Const:
    """An axis fixed by the model; its value is part of the definition's name.

    ``abbrev`` is written before the value in that name: ``None`` means the axis name, ``""`` keeps the axis out.
    ``value`` fixes the axis in the template itself; otherwise it is read from the call. ``of(sizes)`` tells it from
    other axes where no argument has it.
    """

    description: str = ""
    abbrev: Optional[str] = None
    value: Optional[int] = None
    of: Optional[Callable[[Mapping[str, int]], int]] = None


@dataclass(frozen=True)
class Tensor:
    """A tensor whose dimensions are axes; ``()`` is a 0-d tensor.

    Parameters
    ----------
    dim_names
        One axis name per dimension. A call may add leading dimensions of size one. Where it gives a tuple and
        ``tuple_idx`` is None, the first element is meant.
    param
        Parameter of the API; the name in the definition when omitted. For an output, the buffer or the input it
        overwrites.
    tuple_idx
        Which element, when the parameter is a tuple of tensors.
    dtype
        Fixed dtype, used when no tensor of the call tells another one.
    may_lack
        An axis that a call may leave out, which is one then; the definition has it.
    half
        Whether a call may have a second dimension of size two, for keys and values; the template describes one of them.
    unread
        Whether the dimensions describe the definition only: those of the argument are others, and are not looked at.
    dtype_from
        Outputs: the input or parameter whose dtype is taken when it is there, or that is a dtype. Next comes ``param``.
    dtype_from_scalar
        A parameter that is a dtype, as for ``dtype_from``, which it stands for where that is None.
    """

    dim_names: Sequence[str]
    _: KW_ONLY
    param: Optional[str] = None
    tuple_idx: Optional[int] = None
    may_lack: Optional[str] = None
    half: bool = False
    unread: bool = False
    dtype: Optional[str] = None
    dtype_from: Optional[str] = None
    optional: bool = False
    description: str = ""
    dtype_from_scalar: Optional[str] = None

    def __post_init__(self) -> None:
        if self.dtype_from is None and self.dtype_from_scalar is not None:
            object.__setattr__(self, "dtype_from", self.dtype_from_scalar)  # frozen


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
        It ignores further keywords.
    check
        ``check(reference_outputs, actual_outputs, *, rtol, atol, max_mismatch_pct, min_cos_sim) -> bool``;
        ``default_check`` when omitted.
    init
        ``init(**axes, device="cuda", seed=0) -> dict`` makes the arguments of a call.
    constraints
        Python expressions over axes and scalars that hold for every valid call.
    stem
        The texts of a definition define ``_<stem>_reference`` and ``_<stem>_init`` too: names that data sets know.
    """

    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    _: KW_ONLY
    name_prefix: Optional[str] = None
    reference: Optional[Callable[..., Any]] = None
    check: Callable[..., bool] = default_check
    init: Optional[Callable[..., dict[str, Any]]] = None
    constraints: Optional[Sequence[str]] = None
    tags: Optional[Sequence[str]] = None
    stem: Optional[str] = None
    description: str = ""

    #: ``template.build_fi_trace_fn(api)``, a function that returns the definition of a call of ``api``; fi_trace.py,
    #: which imports this module, sets it.
    build_fi_trace_fn: ClassVar[Callable[..., Callable[..., dict[str, Any]]]]

    def __post_init__(self) -> None:
        if self.check is None:
            object.__setattr__(self, "check", default_check)  # frozen
        for name, value in [*self.inputs.items(), *self.outputs.items()]:
            unknown = set(getattr(value, "dim_names", ())) - self.axes.keys()
            if unknown:
                raise ArgumentError(
                    f"TraceTemplate: {self.prefix}: axes of {name} must be known, got {sorted(unknown)}"
                )

    @property
    def prefix(self) -> str:
        return self.name_prefix or self.op_type

    def definition_name(self, axis_values: Mapping[str, int]) -> str:
        """Name of the definition of a call with these sizes of the ``Const`` axes."""
        parts = [self.prefix]
        for axis, kind in self.axes.items():
            if isinstance(kind, Const) and kind.abbrev != "":
                value = kind.value if kind.value is not None else axis_values[axis]
                parts.append(f"{axis if kind.abbrev is None else kind.abbrev}{value}")
        return "_".join(parts)

    def parameters(self) -> Iterator[str]:
        """Names that the API's signature must have."""
        for name, value in self.inputs.items():
            yield value.param or name
        for value in self.outputs.values():
            if value.param is not None:
                yield value.param


@dataclass(frozen=True, eq=False)
class TraceDispatch:
    """Several templates behind one API; ``choose(**arguments)`` picks the one that describes a call.

    It stands for the first of them wherever a template is read.
    """

    choose: Callable[..., TraceTemplate]
    templates: Sequence[TraceTemplate]

    def __call__(self, /, **arguments: Any) -> TraceTemplate:  # a method has an argument of that name too
        return self.choose(**arguments)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the first template, such as its axes, reference or check."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.templates[0], name)

    @property
    def init(self) -> Optional[Callable[..., dict[str, Any]]]:
        """Makes arguments by the first template whose ``init`` takes the keywords that it is given."""
        inits = [template.init for template in self.templates if template.init is not None]
        if len(set(inits)) <= 1:
            return inits[0] if inits else None

        def init(**arguments: Any) -> dict[str, Any]:
            for candidate in inits:
                with contextlib.suppress(TypeError):
                    inspect.signature(candidate).bind(**arguments)
                    break
            else:
                raise ArgumentError(f"fi_init: arguments must be the axes of one template, got {sorted(arguments)}")
            return candidate(**arguments)

        return init


def by_rank(param: str, templates: Mapping[int, TraceTemplate]) -> TraceDispatch:
    """Choose by the number of dimensions of one tensor argument."""

    def choose(**arguments: Any) -> TraceTemplate:
        value = arguments.get(param)
        rank = getattr(value, "ndim", None)
        if rank is None:
            raise ArgumentError(f"fi_trace: {param} must be a tensor of rank {sorted(templates)}, got {value!r}")
        if rank not in templates:
            raise ArgumentError(f"fi_trace: {param} must have rank {sorted(templates)}, got {rank}")
        return templates[rank]

    return TraceDispatch(choose, tuple(templates.values()))


def _render_reference_source(func: Callable[..., Any]) -> str:
    """Self-contained text of a reference; it defines the function under its own name."""
    return function_source(func)


def _render_init_source(func: Callable[..., Any]) -> str:
    """Self-contained text of an init function; it defines the function under its own name."""
    return function_source(func)
