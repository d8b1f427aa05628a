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
from typing import Any, Callable, Optional, TypeVar, Union, cast

import torch

from ._runtime.codegen_wrapper import added_keywords, compiler, is_traced, wrap_with
from ._runtime.errors import ArgumentError
from ._runtime.kept import kept_parts
from ._runtime.knobs import knobs
from .jit.utils import write_atomically
from .trace.definition import definition, definition_name
from .trace.template import TraceTemplate

__all__ = [
    "api_name",
    "attach_fi_trace",
    "build_fi_trace_fn",
    "dump_call",
    "dumping_when_asked",
    "fi_trace",
    "register_fi_trace",
    "registry_entries",
    "traced_functions",
]

F = TypeVar("F", bound=Callable[..., Any])
Template = Union[TraceTemplate, Callable[..., TraceTemplate]]

traced_functions: dict[str, Callable[..., Any]] = {}  # every API with a template; keys are public names
_registered: dict[str, Template] = {}  # templates of functions of other packages
_dumped: set[Path] = set()
_failed: set[str] = set()


def fi_trace(
    func_or_method: Callable[..., Any], save_dir: Union[str, os.PathLike[str], None] = None, **kwargs: Any
) -> dict[str, Any]:
    """Return the definition of a call, without making the call.

    Parameters
    ----------
    func_or_method
        An API function, or a method of a wrapper object.
    save_dir
        Where to write ``<name>.json``; when omitted, ``FLASHINFER_TRACE_DUMP_DIR`` says where, once per name and
        process, and nothing is written when that is unset.
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
    name = api_name(func)
    if traced_functions.get(name, func).__module__ != func.__module__:
        raise ArgumentError(f"{name}: names of APIs must differ, got one in {func.__module__} too")
    traced_functions[name] = func
    return func


def register_fi_trace(qualname: str, spec: Template) -> None:
    """Give a template to a function that cannot be decorated; ``qualname`` is ``module.name``."""
    _registered[qualname] = spec


def registry_entries(
    func: Callable[..., Any], template: Template
) -> list[tuple[Callable[..., Any], TraceTemplate, str]]:
    """Return ``(func, template, label)`` of each template of an API; the label begins its definitions' names."""
    templates = [template] if isinstance(template, TraceTemplate) else getattr(template, "templates", ())
    return [(func, one, one.prefix) for one in templates]


def build_fi_trace_fn(
    spec: Template, api: Union[str, Callable[..., Any], None] = None
) -> Callable[..., dict[str, Any]]:
    """Return a function that takes the arguments of a call and returns the definition of the call.

    ``api`` is the function that is called, whose signature names positional arguments and supplies defaults, or its
    name, which is kept as a tag; then only keywords are understood. Arguments that no template knows are ignored.
    """
    func = api if callable(api) else None

    def fi_trace(*args: Any, save_dir: Any = None, name: Optional[str] = None, **kwargs: Any) -> dict[str, Any]:
        """Return the definition of a call with these arguments; ``save_dir`` also writes the definition."""
        if name is not None and (not isinstance(name, str) or not name or Path(name).name != name):
            raise ArgumentError(f"fi_trace: name must be a file name (without .json), got {name!r}")
        arguments = _bind(func, args, kwargs)
        template = _choose(spec, arguments)
        label = api_name(func) if func is not None else api or template.prefix
        result = definition(template, arguments, api=str(label), name=name)
        if save_dir is not None:
            _write(Path(save_dir) / f"{result['name']}.json", result)
        elif os.environ.get("FLASHINFER_TRACE_DUMP_DIR"):
            _write_once((knobs.trace_dump_dir / f"{result['name']}.json").absolute(), result)
        return result

    return fi_trace


TraceTemplate.build_fi_trace_fn = build_fi_trace_fn

# The dict inside os.environ: a lookup takes 0.02 us, os.environ.get() 0.8.
_environment: Any = getattr(os.environ, "_data", os.environ)
_SWITCH = type(knobs).trace_dump.variable
_switch: Any = os.environ.encodekey(_SWITCH) if hasattr(os.environ, "encodekey") else _SWITCH


_CHECKED = """
if not _is_traced() and _switch in _environment:
    _dump(_func, {arguments})
return _func({arguments}{added})
"""
_LAUNCHED = """
if _is_traced() or _compiler._is_compiling_flag:
    return _func({arguments}{added})
if _switch in _environment:
    _dump(_func, {arguments})
{launch}
return _func_by_position({values})
"""


def dumping_when_asked(func: F) -> F:
    """Wrap ``func`` to write the definitions of its calls while ``FLASHINFER_TRACE_DUMP`` is set.

    The wrapper also takes the launches that :class:`flashinfer._runtime.kept.KeptLaunches` has for ``func``.
    A program may set the variable at any time, so each call reads it. The check takes 0.17 us for a method with ten
    parameters (Python 3.11, where an empty call takes 0.036).
    """
    launch, names = kept_parts(func)
    extra = added_keywords(func)
    body = _LAUNCHED.replace("{launch}", launch) if launch else _CHECKED
    body = body.replace("{added}", "".join(f", {name}={name}" for name in extra))
    names = {"_is_traced": is_traced, "_compiler": compiler, **_DUMP_NAMES, **names}
    wrapper: Any = wrap_with(func, body, names, extra)
    wrapper.__dict__.pop("_kept_launches", None)  # functools.wraps has copied it
    wrapper._dumps = func
    return cast(F, wrapper)


def _dump_if_on(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    if knobs.trace_dump:
        dump_call(function, args, kwargs)


_DUMP_NAMES = {"_switch": _switch, "_environment": _environment, "_dump": _dump_if_on}


def dump_parts(func: Callable[..., Any]) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """Return the parts of the wrapper of :func:`dumping_when_asked`, for a decorator that replaces the wrapper.

    Returns
    -------
    tuple
        The wrapped function, a statement for :func:`wrap_with` that writes the definition, and the
        names that it uses. For any other function: the function, ``pass`` and no names.
    """
    inner: Any = getattr(func, "_dumps", None)
    if inner is None or getattr(func, "__wrapped__", None) is not inner:  # an outer wrapper has copied ``_dumps``
        return func, "pass", {}
    return cast(Callable[..., Any], inner), "if _switch in _environment: _dump(_func, {arguments})", _DUMP_NAMES


def dump_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the definition of a call that is about to run, once per name; a failure is a warning, given once."""
    if torch.compiler.is_compiling():
        return
    try:
        arguments = _bind(func, args, kwargs)
        template = _choose(_template_of(func), arguments)
        path = (knobs.trace_dump_dir / f"{definition_name(template, arguments)}.json").absolute()
        if path not in _dumped:
            _write_once(path, definition(template, arguments, api=api_name(func)))
    except Exception as error:
        api = api_name(func)
        if api not in _failed:
            _failed.add(api)
            warnings.warn(f"{api}: no trace definition is written ({error}); the call goes on", stacklevel=3)


def _template_of(func: Callable[..., Any]) -> Template:
    template = getattr(func, "_trace_template", None) or _registered.get(api_name(func))
    if template is None:
        raise ArgumentError(f"fi_trace: func must be a function with a trace template, got {api_name(func)}")
    return template


def _choose(spec: Template, arguments: dict[str, Any]) -> TraceTemplate:
    return spec if isinstance(spec, TraceTemplate) else spec(**arguments)


#: Our module -> the module of the published package that defines the same APIs, if not the family itself.
_PUBLISHED_MODULES = {
    f"{__package__}.{ours}": f"{__package__}.{published}"
    for ours, published in {
        "attention.batch_attention": "attention._core",
        "cudnn.decode": "cudnn.decode",
        "cudnn.prefill": "cudnn.prefill",
        "gemm.bf16": "gemm.gemm_base",
        "gemm.block_scaled": "gemm.gemm_base",
        "gemm.blockscale": "gemm.gemm_base",
        "gemm.fp8": "gemm.gemm_base",
        "gemm.gemm_base": "gemm.gemm_base",
        "gemm.routergemm": "gemm.routergemm",
        "indexer.schedule": "attn_scores",
        "indexer.scores": "attn_scores",
        "mla._core": "mla._core",
        "quantization.fp4_quantization": "quantization.fp4_quantization",
        "quantization.fp8_quantization": "quantization.fp8_quantization",
        "quantization.nvfp4_kv": "quantization.fp4_quantization",
        "recurrent.gdn_bf16_state": "gdn_kernels.gdn_decode_bf16_state",
        "recurrent.gdn_prefill": "gdn_prefill",
        "recurrent.gdn_ring": "gdn_kernels.gdn_decode_bf16_wy_ucache",
        "recurrent.gdn_step": "gdn_decode",
        "recurrent.kda": "kda",
        "recurrent.kda_prefill": "kda",
        "recurrent.kda_step": "kda_decode",
        "recurrent.mamba_chunk": "mamba.ssd_combined",
        "recurrent.mamba_replay": "mamba.checkpointing_ssu",
        "recurrent.mamba_update": "mamba.selective_state_update",
        "topk_varlen.topk_varlen": "topk_varlen.topk_varlen",
    }.items()
}


def api_name(func: Callable[..., Any]) -> str:
    """Return the name of an API in definitions: with the module of the published package, the key of data sets."""
    module = getattr(func, "__module__", None) or ""
    if module.startswith(f"{__package__}."):
        module = _PUBLISHED_MODULES.get(module) or ".".join(module.split(".")[:2])
    return f"{module}.{getattr(func, '__qualname__', repr(func))}"


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _bind(func: Optional[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name with the defaults filled in. Keywords that are no parameters stay: they may be axes."""
    if func is None:
        return dict(kwargs)
    signature = _signature(func)
    bound = signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    bound.apply_defaults()
    return bound.arguments | kwargs


def _write_once(path: Path, content: dict[str, Any]) -> None:
    """Write a definition that this process has not written yet; other processes may have written the same."""
    if path not in _dumped:
        _write(path, content)
        _dumped.add(path)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
