# SPDX-License-Identifier: Apache-2.0
"""The functions that a replay may call: those decorated with ``@flashinfer_api``, found by the names in a record."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from typing import Any, Callable, Mapping, Optional, Sequence

__all__ = ["find_api", "first_logged_init", "public_module", "refuse_code", "register_api", "wraps"]

_apis: dict[tuple[str, str], Callable[..., Any]] = {}
_CODE = ("jit_args", "jit_kwargs")  # parameters whose text ends up in C++ that is compiled and loaded


def register_api(func: Callable[..., Any]) -> None:
    """Make ``func`` replayable; the decorator calls this for every public function."""
    _apis[func.__module__, func.__qualname__] = func


def wraps(candidate: Any, func: Callable[..., Any]) -> bool:
    """Return True if ``candidate`` is ``func`` or a ``functools.wraps`` chain around ``func``."""
    while candidate is not None and candidate is not func:
        candidate = getattr(candidate, "__wrapped__", None)
    return candidate is func


def public_module(func: Callable[..., Any]) -> str:
    """Return the package that exports ``func``, or its class, by name: ``flashinfer.decode``, not a file inside it."""
    parts, name = func.__module__.split("."), func.__qualname__.partition(".")[0]
    for count in range(2, len(parts)):
        offered = getattr(sys.modules.get(".".join(parts[:count])), name, None)
        if wraps(offered, func) or (isinstance(offered, type) and offered.__module__ == func.__module__):
            return ".".join(parts[:count])
    return func.__module__


def find_api(record: Mapping[str, Any]) -> Callable[..., Any]:
    """Find the function of a record. Records of other tools have only a module and a name such as ``Wrapper.run``."""
    module = record.get("defining_module") or record.get("module") or ""
    name = record.get("qualname") or record.get("function_name") or ""
    if module == "flashinfer" or module.startswith("flashinfer."):  # a record is untrusted data: import nothing else
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = _apis.get((module, name)) or _registered_below(_attribute(module, name))
    if found is None:
        raise RuntimeError(f"replay: {module}.{name} must be a function with @flashinfer_api, got no known API")
    return found


def _attribute(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = inspect.getattr_static(value, part, None)
    return value


def _registered_below(candidate: Any) -> Optional[Callable[..., Any]]:
    """Return the registered function that ``candidate`` is or wraps."""
    while candidate is not None:
        key = (getattr(candidate, "__module__", ""), getattr(candidate, "__qualname__", ""))
        if _apis.get(key) is candidate:
            return candidate
        candidate = getattr(candidate, "__wrapped__", None)
    return None


def first_logged_init(cls: type) -> Optional[Callable[..., Any]]:
    """Return the ``__init__`` that writes the first dump of an object of ``cls``: the class's own, or a base's."""
    names = ((base.__module__, f"{base.__qualname__}.__init__") for base in cls.__mro__)
    return next((_apis[name] for name in names if name in _apis), None)


def refuse_code(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a parameter that holds C++ source is given."""
    values = dict(kwargs)
    with contextlib.suppress(TypeError):  # the call itself reports arguments that do not fit
        values |= inspect.signature(func).bind_partial(*args).arguments
    for name in _CODE:
        if values.get(name) is not None:
            raise RuntimeError(
                f"replay: {name} of {func.__qualname__} must not hold code (if you trust where it comes from: "
                "allow_code=True, or flashinfer replay --allow-code), got C++ source that would be compiled and run"
            )
