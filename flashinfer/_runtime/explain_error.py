# SPDX-License-Identifier: Apache-2.0
"""Explain a failed call: find the argument of a wrong type and name it as the caller knows it.

Native code can only number its arguments, and Python says "'NoneType' object has no attribute 'is_cuda'". Arguments
are validated only after a call has failed, so a call that succeeds pays for no check.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
from numbers import Integral, Real
from typing import Any, Callable, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from .errors import ArgumentError, BackendSupportedError

__all__ = ["explain_arguments", "explain_kinds", "explain_type_errors"]

F = TypeVar("F", bound=Callable[..., Any])

_ACCEPTED: dict[Any, tuple[type, ...]] = {
    torch.Tensor: (torch.Tensor,),
    float: (Real, torch.SymInt, torch.SymFloat),
    int: (Integral, torch.SymInt),
    bool: (Integral, torch.SymBool),
    str: (str,),
    torch.dtype: (torch.dtype,),
    type(None): (type(None),),
}
_SEQUENCES = (tuple, list, collections.abc.Sequence)
_NO_MEMORY = ("tensor without memory", "doesn't have storage")  # error texts of native code and of torch
_WITHOUT_MEMORY = {
    "DTensor": "such as its to_local()",
    "FakeTensor": "torch.compile is served",
    "Tensor": "functions of torch.func are not served",
}


def explain_type_errors(func: Optional[F] = None, *, name: Optional[str] = None) -> Any:
    """Decorator: when a call fails because an argument has a wrong type, name the argument and the call in the error.

    Meant for functions that are called rarely, such as ``plan``: the wrapper takes 0.1 us. Ops get the same from
    ``register_custom_op``. ``name`` replaces the function's own name in errors; for a method, the error also names the
    class.
    """
    if func is None:
        return functools.partial(explain_type_errors, name=name)
    called = func.__name__ if name is None else name

    @functools.wraps(func)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            is_method = next(iter(inspect.signature(func).parameters), None) == "self"
            owner = f"{type(args[0]).__name__}." if is_method and args else ""
            explain_kinds((owner + called).removesuffix(".__init__"), func, error, *args, **kwargs)
            raise

    return explained


def explain_kinds(op: str, func: Callable[..., Any], error: Exception, *args: Any, **kwargs: Any) -> None:
    """Raise an error that names the first argument of a wrong type, or on a device without kernels; else return.

    Called after ``func(*args, **kwargs)`` raised ``error``, so this function may be slow.
    """
    try:
        hints = get_type_hints(func)
    except NameError:  # a third-party function whose annotations exist for type checkers only
        hints = {}
    try:
        arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    except TypeError:  # too many or too few arguments; the original error says so
        return
    inputs_first = sorted(arguments.items(), key=lambda item: "out" in item[0])  # inputs before outputs
    explain_arguments(op, error, *((name, hints.get(name), value) for name, value in inputs_first))


def refuse_list(op: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise an error that names the first argument that is a list, whatever the list contains."""
    for name, value in inspect.signature(func).bind(*args, **kwargs).arguments.items():
        if type(value) is list:
            hint = get_type_hints(func).get(name)
            kinds = " or ".join(getattr(kind, "__name__", str(kind)) for kind in _kinds(hint) if kind is not type(None))
            raise TypeError(f"{op}: {name} must be {kinds}, got a list")


def explain_arguments(op: str, error: Exception, *arguments: tuple[str, Any, Any]) -> None:
    """Do the work of :func:`explain_kinds` for triples of name, type and value."""
    if isinstance(error, (ArgumentError, BackendSupportedError)):  # these errors name the argument already
        return
    for name, expected_kind, value in arguments:
        for part, hint, each in _parts(name, expected_kind, value):
            if isinstance(each, torch.Tensor):
                _check_tensor(f"{op}: {part}", each, error)
            expected = _missed(hint, each)
            if expected is not None:
                raise TypeError(f"{op}: {part} must be {expected}, got a {type(each).__name__}") from error
            if type(each) is int and not -(2**63) <= each < 2**63:
                raise ArgumentError(f"{op}: {part} must be a number of 64 bits, got {each}") from error


def _check_tensor(what: str, x: torch.Tensor, error: Exception) -> None:
    if x.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{what} must be on the CPU or a CUDA device, got {x.device}") from error
    if x.layout is not torch.strided:
        raise ArgumentError(f"{what} must be a dense tensor, got layout {x.layout}") from error
    if any(text in str(error) for text in _NO_MEMORY) and not _has_memory(x):
        kind = type(x).__name__
        hint = _WITHOUT_MEMORY.get(kind, "not one that stands for others")
        raise ArgumentError(f"{what} must be a tensor with data ({hint}), got a {kind}") from error
    if x.ndim == 0 and (isinstance(error, IndexError) or "0-d" in str(error)):
        raise ArgumentError(f"{what} must have at least 1 dimension, got 0") from error


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return x.numel() == 0 or x.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a tensor subclass that wraps other tensors has no storage
        return False


def _parts(name: str, hint: Any, value: Any) -> list[tuple[str, Any, Any]]:
    """Return the argument and, if it is a sequence of tensors, each element, with name and expected type."""
    parts = [(name, hint, value)]
    if isinstance(value, (tuple, list)) and any(torch.Tensor in get_args(kind) for kind in _kinds(hint)):
        parts += [(f"{name}[{i}]", torch.Tensor, each) for i, each in enumerate(value)]
    return parts


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Union else (hint,)


def _missed(hint: Any, value: Any) -> Optional[str]:
    """Name the type that ``value`` should have; None if ``value`` has that type or the hint names no known type."""
    accepted: list[type] = []
    names = []
    for kind in _kinds(hint):
        if kind in _ACCEPTED:
            accepted += _ACCEPTED[kind]
            names.append(kind.__name__)
        elif get_origin(kind) in _SEQUENCES:
            accepted += (tuple, list)
            names.append("a sequence")
        else:
            return None
    return None if isinstance(value, tuple(accepted)) else " or ".join(name for name in names if name != "NoneType")
