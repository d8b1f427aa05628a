# SPDX-License-Identifier: Apache-2.0
"""Definitions of calls: attached to every API, asked for by hand, or written while a program runs.

    flashinfer.rmsnorm.fi_trace(input=x, weight=w, save_dir="traces")     # the API's own attribute
    fi_trace(flashinfer.rmsnorm, save_dir="traces", input=x, weight=w)    # the same
    FLASHINFER_TRACE_DUMP=1 FLASHINFER_TRACE_DUMP_DIR=traces python serve.py

Nothing here runs a kernel: shapes and dtypes are enough, so CPU and meta tensors do.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Optional, Union

import torch

from .errors import ArgumentError
from .jit.utils import write_atomically
from .knobs import knobs
from .trace.definition import definition, definition_name
from .trace.template import TraceTemplate

__all__ = [
    "attach_fi_trace",
    "build_fi_trace_fn",
    "dump_call",
    "fi_trace",
    "register_fi_trace",
    "traced_functions",
]

Template = Union[TraceTemplate, Callable[..., TraceTemplate]]

traced_functions: dict[str, Callable[..., Any]] = {}  # every API with a template, by public name
_registered: dict[str, Template] = {}  # templates of functions that are not ours
_dumped: set[Path] = set()
_failed: set[str] = set()


def fi_trace(
    func_or_method: Callable[..., Any], save_dir: Union[str, os.PathLike[str], None] = None, **kwargs: Any
) -> dict[str, Any]:
    """The definition of a call, without making the call.

    Parameters
    ----------
    func_or_method
        An API function, or a method of a wrapper object.
    save_dir
        Where to write ``<name>.json``; nothing is written when omitted.
    **kwargs
        Arguments of the call.

    Returns
    -------
    dict
        The definition, in the schema of flashinfer-bench.

    Raises
    ------
    ValueError
        The function has no template, or the arguments do not fit it.
    """
    func = getattr(func_or_method, "__func__", func_or_method)
    owner = getattr(func_or_method, "__self__", None)
    args = () if func is func_or_method else (owner,)
    return build_fi_trace_fn(_template_of(func), func)(*args, save_dir=save_dir, **kwargs)


def attach_fi_trace(func: Callable[..., Any], template: Template) -> Callable[..., Any]:
    """Give a function its ``fi_trace`` (and ``fi_init``) attributes, and list it in ``traced_functions``."""
    target: Any = func
    target.fi_trace = build_fi_trace_fn(template, func)
    target._trace_template = template
    init = getattr(template, "init", None)
    if init is not None:
        target.fi_init = init
    traced_functions[_qualname(func)] = func
    return func


def register_fi_trace(qualname: str, spec: Template) -> None:
    """Give a template to a function that cannot be decorated; ``qualname`` is ``module.name``."""
    _registered[qualname] = spec


def build_fi_trace_fn(spec: Template, func: Optional[Callable[..., Any]] = None) -> Callable[..., dict[str, Any]]:
    """A function that takes the arguments of a call and returns its definition.

    Without ``func``, whose signature names positional arguments and supplies defaults, only keywords are understood.
    """

    def fi_trace(*args: Any, save_dir: Any = None, name: Optional[str] = None, **kwargs: Any) -> dict[str, Any]:
        """The definition of a call with these arguments; ``save_dir`` also writes it."""
        if name is not None and (not isinstance(name, str) or not name or Path(name).name != name):
            raise ArgumentError(f"fi_trace: name is {name!r}, expected a file name (without .json)")
        arguments = _bind(func, args, kwargs)
        template = _choose(spec, arguments)
        _reject_unknown(func, template, kwargs)
        api = template.prefix if func is None else _qualname(func)
        result = definition(template, arguments, api=api, name=name)
        if save_dir is not None:
            _write(Path(save_dir) / f"{result['name']}.json", result)
        return result

    return fi_trace


def dump_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the definition of a call that is about to run, once per name; a failure warns once and is no error."""
    if torch.compiler.is_compiling():
        return
    try:
        arguments = _bind(func, args, kwargs)
        template = _choose(_template_of(func), arguments)
        path = (knobs.trace_dump_dir / f"{definition_name(template, arguments)}.json").absolute()
        if path not in _dumped:
            _write(path, definition(template, arguments, api=_qualname(func)))
            _dumped.add(path)
    except Exception as error:
        api = _qualname(func)
        if api not in _failed:
            _failed.add(api)
            warnings.warn(f"{api}: no trace definition is written ({error}); the call goes on", stacklevel=3)


def _template_of(func: Callable[..., Any]) -> Template:
    template = getattr(func, "_trace_template", None) or _registered.get(_qualname(func))
    if template is None:
        raise ArgumentError(f"fi_trace: {_qualname(func)} has no trace template, expected a function that carries one")
    return template


def _choose(spec: Template, arguments: dict[str, Any]) -> TraceTemplate:
    return spec if isinstance(spec, TraceTemplate) else spec(**arguments)


def _qualname(func: Callable[..., Any]) -> str:
    """Where users find the function. A family's files are its own affair: its package exports what they define."""
    module = getattr(func, "__module__", None) or ""
    if module.startswith(f"{__package__}."):
        module = ".".join(module.split(".")[:2])
    return f"{module}.{getattr(func, '__qualname__', repr(func))}"


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _bind(func: Optional[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name with the defaults filled in. Keywords that are no parameters may be axes, so they stay."""
    if func is None:
        return dict(kwargs)
    signature = _signature(func)
    bound = signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    bound.apply_defaults()
    return bound.arguments | kwargs


def _reject_unknown(func: Optional[Callable[..., Any]], template: TraceTemplate, kwargs: dict[str, Any]) -> None:
    """A misspelled argument would otherwise be ignored. ``skip_check`` is an argument of the backend decorator."""
    if func is None:
        return
    unknown = [k for k in kwargs if k not in {*_signature(func).parameters, *template.axes, "skip_check"}]
    if unknown:
        raise TypeError(f"{func.__name__}.fi_trace: {unknown[0]!r} is no parameter of {func.__name__} and no axis")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
