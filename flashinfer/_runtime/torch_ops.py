# SPDX-License-Identifier: Apache-2.0
"""Ops that ``torch.compile`` and ``torch.export`` can put in a graph: registration under ``flashinfer::<name>``.

In eager mode the decorated function is called directly (0.1 us more than the bare function; the dispatcher would cost
several); while torch traces, the registered op is. No signature is written twice: the schema is inferred from the
function, and a function that returns nothing needs no fake, because there is nothing to describe.

    @register_custom_op("rmsnorm", mutates_args=("out",))
    def _rmsnorm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float) -> None: ...

    @register_custom_op("layernorm", mutates_args=())
    def _layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float) -> torch.Tensor: ...

    @register_fake_op("layernorm")
    def _layernorm_fake(input, gemma, beta, eps):
        return torch.empty_like(input)

A registered op must not return one of its arguments, nor a view of one: torch forbids it.

An op lives as long as the process, while this module may be imported again (every ``flashinfer*`` entry removed from
``sys.modules``): the new import finds what is registered in the namespace of torch and replaces the functions.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, Iterable, Optional, Sequence, TypeVar, Union, overload

import torch

from .codegen_wrapper import compiler, is_traced, parameters_of, wrap_with
from .errors import ArgumentError
from .explain_error import explain_kinds, refuse_list

__all__ = ["called", "register_custom_op", "register_fake_op"]

F = TypeVar("F", bound=Callable[..., Any])

_NAMESPACE = "flashinfer"
_TAKES_LISTS = re.compile("list|sequence|tuple", re.IGNORECASE)  # annotations


class _Op:
    """One registered op. The dispatcher calls ``run``, so that registering a name again replaces the function."""

    def __init__(self, name: str, schema: str) -> None:
        self.name, self.schema = name, schema
        self.func: Callable[..., Any] = _nothing
        self.fake: Optional[Callable[..., Any]] = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    def run_fake(self, *args: Any, **kwargs: Any) -> Any:
        assert self.fake is not None
        return self.fake(*args, **kwargs)


class _Registered:
    """All ops of this package in one process, and their library: torch removes the ops if the library is collected."""

    def __init__(self) -> None:
        self.ops: dict[str, _Op] = {}
        self.library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # FRAGMENT: others may add ops to the namespace


def _registered() -> _Registered:
    """Return the ops that this or an earlier import registered; torch.ops keeps them under a name no op can have."""
    kept = vars(getattr(torch.ops, _NAMESPACE))
    key = "registered by flashinfer._runtime.torch_ops"
    if key not in kept:
        kept[key] = _Registered()
    return kept[key]


_ops, _library = _registered().ops, _registered().library


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Fake of an op that only writes to its arguments."""


def _bare_name(name: str) -> str:
    namespace, colons, bare = name.rpartition("::")
    if (colons and namespace != _NAMESPACE) or not bare.isidentifier():
        raise ArgumentError(f"register_custom_op: name must be an identifier or {_NAMESPACE}::identifier, got {name!r}")
    return bare


_CALL = """
if _is_traced() or _compiler._is_compiling_flag:
    return _op({arguments})
if {is_list}:
    _refuse_list({arguments})
try:
    return _func({arguments})
except (TypeError, AttributeError, RuntimeError) as error:
    _explain(error, {arguments})
    raise
"""
_CALL_NAMES: dict[str, Any] = {"_is_traced": is_traced, "_compiler": compiler}


def called(name: str) -> Callable[[F], F]:
    """Decorator below :func:`register_custom_op`: set the name that errors use if callers do not know the op's name."""

    def mark(fn: F) -> F:
        fn._called = name  # type: ignore[attr-defined]
        return fn

    return mark


@overload
def register_custom_op(
    name: str,
    fn: None = None,
    *,
    mutates_args: Union[str, Iterable[str]],
    device_types: Optional[Union[str, Sequence[str]]] = None,
    schema: Optional[str] = None,
) -> Callable[[F], F]: ...
@overload
def register_custom_op(
    name: str,
    fn: F,
    *,
    mutates_args: Union[str, Iterable[str]],
    device_types: Optional[Union[str, Sequence[str]]] = None,
    schema: Optional[str] = None,
) -> F: ...
def register_custom_op(
    name: str,
    fn: Optional[Callable[..., Any]] = None,
    *,
    mutates_args: Union[str, Iterable[str]],
    device_types: Optional[Union[str, Sequence[str]]] = None,
    schema: Optional[str] = None,
) -> Any:
    """Register a function as ``torch.ops.flashinfer.<name>``. Takes 0.4 ms; usable as a decorator.

    Parameters
    ----------
    name : str
        ``"rmsnorm"`` or ``"flashinfer::rmsnorm"``. Registering it again, with the same schema, replaces the function.
    fn : Optional[Callable]
        The function; its annotations must be types torch knows (Tensor, int, float, bool, str, dtype, Optional, List).
    mutates_args : Union[str, Iterable[str]]
        Names of the arguments that are written to; ``"unknown"`` means every tensor.
    device_types : Optional[Union[str, Sequence[str]]]
        Where the function runs; default ``("cpu", "cuda")``.
    schema : Optional[str]
        ``"(Tensor x) -> Tensor"`` where it cannot be inferred.

    Returns
    -------
    Callable
        A function with the same signature.
    """
    if fn is None:
        return functools.partial(_register, name, mutates_args=mutates_args, device_types=device_types, schema=schema)
    return _register(name, fn, mutates_args=mutates_args, device_types=device_types, schema=schema)


def _register(
    name: str,
    fn: Callable[..., Any],
    *,
    mutates_args: Union[str, Iterable[str]],
    device_types: Optional[Union[str, Sequence[str]]],
    schema: Optional[str],
) -> Callable[..., Any]:
    name = _bare_name(name)
    schema = schema or torch.library.infer_schema(fn, mutates_args=mutates_args)
    op = _ops.get(name)
    if op is None:
        op = _Op(name, schema)
        _library.define(name + schema)
        for device_type in (device_types,) if isinstance(device_types, str) else device_types or ("cpu", "cuda"):
            _library.impl(name, op.run, device_type.upper())
        if schema.rstrip().endswith("-> ()"):
            op.fake = _nothing
            _library.impl(name, op.run_fake, "Meta")  # 20 us; register_fake opens the caller's source file, 140 us
        _ops[name] = op
    elif op.schema != schema:
        raise ArgumentError(
            f"register_custom_op: {name} must have schema {op.schema} (registered before), got {schema}"
        )
    op.func = fn
    registered = getattr(getattr(torch.ops, _NAMESPACE), name).default
    explain = functools.partial(explain_kinds, getattr(fn, "_called", name), fn)
    refuse = functools.partial(refuse_list, getattr(fn, "_called", name), fn)
    # TVM-FFI converts lists by recursion in C++, which a list that contains itself makes endless.
    names = [p.name for p in parameters_of(fn) if not _TAKES_LISTS.search(str(p.annotation))]
    body = _CALL.replace("{is_list}", " or ".join(f"{name}.__class__ is list" for name in names))
    return wrap_with(fn, body, _CALL_NAMES | {"_op": registered, "_explain": explain, "_refuse_list": refuse})


def register_fake_op(name: str, fn: Optional[F] = None) -> Any:
    """Register the fake of an op: a function that returns fresh tensors of the right shapes, dtypes and devices.

    Parameters
    ----------
    name : str
        As given to :func:`register_custom_op`.
    fn : Optional[Callable]
        Takes the op's arguments as fake tensors, allocates the results (``torch.empty_like(x)``) and returns them.
    """
    if fn is None:
        return functools.partial(register_fake_op, name)
    op = _ops.get(_bare_name(name))
    if op is None:
        raise ArgumentError(
            f"register_fake_op: name must be an op that register_custom_op has registered, got {name!r}"
        )
    if op.fake is None:
        torch.library.register_fake(f"{_NAMESPACE}::{op.name}", op.run_fake, lib=_library)
    op.fake = fn
    return fn
