# SPDX-License-Identifier: Apache-2.0
"""Tools for decorators: wrappers that bind arguments at no cost, and functions torch.compile treats as constants."""

from __future__ import annotations

import functools
import inspect
import textwrap
import types
import weakref
from typing import Any, Callable, Iterable, Optional, TypeVar

import torch

__all__ = [
    "added_keywords",
    "compiler",
    "is_traced",
    "kept_out_of_graphs",
    "parameters_of",
    "traced_as_constant",
    "wrap_with",
]

F = TypeVar("F", bound=Callable[..., Any])


class _PublicFlag:
    """Stands in for ``torch.compiler`` where torch has no ``_is_compiling_flag``."""

    @property
    def _is_compiling_flag(self) -> bool:
        return torch.compiler.is_compiling()


def _flags() -> Any:
    """Return an object with ``_is_compiling_flag``: torch.compiler, or one that asks its public function."""
    return torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _PublicFlag()


# `is_traced() or compiler._is_compiling_flag` equals torch.compiler.is_compiling(), in 0.03 us instead of 0.1, and a
# call has two such checks. Dynamo treats the first as true and does not read the second, which is set while
# torch.export runs a program.
is_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
compiler: Any = _flags()


def traced_as_constant(func: F) -> F:
    """Let torch.compile run ``func`` while it traces and treat the result as a constant of the graph.

    Does the same as ``torch.compiler.assume_constant_result``, which imports dynamo: a second, at every start.
    """
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


def kept_out_of_graphs(func: F, reason: str) -> F:
    """Let torch.compile break its graph at a call of ``func``, or report ``reason`` where it must not break.

    Does the same as ``torch.compiler.disable``, without importing dynamo.
    """
    func._torchdynamo_disable = True  # type: ignore[attr-defined]
    func._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return func


def wrap_with(
    func: Callable[..., Any], body: str, names: dict[str, Any], extra: Optional[dict[str, Any]] = None
) -> Callable[..., Any]:
    """Return a plain function that takes the arguments of ``func`` and runs ``body``.

    The interpreter binds the arguments and fills in the defaults, which costs nothing; ``inspect.Signature.bind`` takes
    5 us a call and ``*args, **kwargs`` 0.1 us without binding anything. The result has the name, module, documentation
    and (through ``__wrapped__``) the published signature of ``func``.

    Parameters
    ----------
    func : Callable
        The function to wrap.
    body : str
        Statements in which ``_func`` is that function, the parameters have their own names, and ``{arguments}`` becomes
        what to write between parentheses to pass them all on. ``_func_by_position({values})`` calls the same function
        in less time (:func:`_by_position`); a body that torch.compile traces calls ``_func``.
    names : Dict[str, Any]
        Further names the body uses.
    extra : Optional[Dict[str, Any]]
        Keyword-only parameters, with their defaults, that the wrapper has and ``func`` has not.

    Example
    -------
    >>> twice = wrap_with(abs, "return 2 * _func({arguments})", {})
    >>> twice(-3)
    6
    """
    extra = extra or {}
    given = parameters_of(func)
    clash = [p.name for p in given if p.name in extra or p.name in names or p.name in ("_func", "_func_by_position")]
    if clash:
        raise TypeError(f"{func.__name__}: parameters must not have names that a wrapper uses, got {clash[0]}")
    arguments = ", ".join(_PASSED_ON[p.kind].format(p.name) for p in given)
    by_position, values = _by_position(func, given, arguments, extra)

    name = func.__name__ if func.__name__.isidentifier() else "wrapper"
    lines = _indented(body).replace("{arguments}", arguments).replace("{values}", values)
    made_of = ", ".join(("_func", "_func_by_position", *names))
    parameters = _parameter_list(given, extra)
    source = f"def make({made_of}):\n    def {name}({parameters}):\n{lines}\n    return {name}\n"
    scope: dict[str, Any] = {}
    # In the module of ``func``: dynamo looks a function's globals up by their module's name.
    exec(_compiled(source, func.__name__), getattr(func, "__globals__", {}), scope)
    wrapper = scope["make"](func, by_position, **names)
    wrapper.__defaults__ = tuple(p.default for p in given if p.kind in _POSITIONAL and p.default is not p.empty)
    by_keyword = {p.name: p.default for p in given if p.kind == p.KEYWORD_ONLY and p.default is not p.empty}
    wrapper.__kwdefaults__ = {**by_keyword, **extra}
    made = functools.wraps(func)(wrapper)
    made.__dict__["_added_keywords"] = tuple(extra)
    return made


def parameters_of(func: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of ``func``, or of the function it wraps. Several wrappers of a function ask once."""
    function = inspect.unwrap(func, stop=lambda f: hasattr(f, "__signature__"))
    if type(function) is not types.FunctionType or hasattr(function, "__signature__"):
        return list(inspect.signature(func).parameters.values())
    if function not in _parameters:
        _parameters[function] = list(inspect.signature(function).parameters.values())
    return _parameters[function]


_parameters: weakref.WeakKeyDictionary[Any, list[inspect.Parameter]] = weakref.WeakKeyDictionary()


@functools.cache
def _compiled(source: str, name: str) -> types.CodeType:
    """Compile a wrapper. Classes that share a method have the same one."""
    return compile(source, f"<wrapper of {name}>", "exec")


@functools.cache
def _indented(body: str) -> str:
    """Return the statements of a body as those of a function in a function."""
    return textwrap.indent(textwrap.dedent(body).strip(), " " * 8)


def _parameter_list(given: list[inspect.Parameter], extra: Iterable[str]) -> str:
    """Return the parameters as source text without defaults; ``extra`` ones are keyword-only."""
    names = {kind: [p.name for p in given if p.kind == kind] for kind in _PASSED_ON}
    only, ordinary, rest, keywords, mapping = names.values()
    keywords = [*keywords, *extra]
    star = [f"*{name}" for name in rest] or (["*"] if keywords else [])
    return ", ".join([*only, *(["/"] if only else []), *ordinary, *star, *keywords, *(f"**{name}" for name in mapping)])


def _by_position(
    func: Callable[..., Any], given: list[inspect.Parameter], arguments: str, extra: Iterable[str]
) -> tuple[Callable[..., Any], str]:
    """Return ``func`` with all its parameters made positional, and the values to call it with.

    ``*args`` becomes a parameter that takes a tuple, and ``**kwargs`` a parameter that takes a dict. A wrapper has both
    already. A call with twelve keywords and ``*args`` builds a tuple and a dict and looks each keyword up, which takes
    1.5 us on a busy machine; the call by position takes 0.1 us there (Python 3.11).

    The values include what :func:`wrap_with` has added to ``func`` and adds again as ``extra``. The result is ``func``
    and ``arguments`` if the code of ``func`` does not have the parameters of its signature.
    """
    added = [name for name in added_keywords(func) if name in extra]
    arguments = ", ".join(filter(None, [arguments, *(f"{name}={name}" for name in added)]))
    code = getattr(func, "__code__", None)
    if not isinstance(func, types.FunctionType) or code is None:
        return func, arguments
    is_open = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    count = code.co_argcount + code.co_kwonlyargcount + is_open
    names = code.co_varnames[:count]  # the interpreter's order: positional, keyword-only, *args, **kwargs
    if sorted(names) != sorted([*(p.name for p in given), *added]):
        return func, arguments
    flags = code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    code = code.replace(co_argcount=count, co_posonlyargcount=count, co_kwonlyargcount=0, co_flags=flags)
    return types.FunctionType(code, func.__globals__, func.__name__, None, func.__closure__), ", ".join(names)


def added_keywords(func: Callable[..., Any]) -> dict[str, Any]:
    """Return the ``extra`` keywords, with their defaults, that :func:`wrap_with` has added to ``func``."""
    own = getattr(func, "__kwdefaults__", None) or {}  # other wrappers copy the attribute, but not the parameters
    return {name: own[name] for name in getattr(func, "_added_keywords", ()) if name in own}


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PASSED_ON = {
    inspect.Parameter.POSITIONAL_ONLY: "{0}",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "{0}",
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}
