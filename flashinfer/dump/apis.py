# SPDX-License-Identifier: Apache-2.0
"""The functions that a replay may call: those decorated with ``@flashinfer_api``, found by the names in a record."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from typing import Any, Callable, Mapping, Optional, Sequence, TypeVar

import torch

__all__ = [
    "find_api",
    "first_logged_init",
    "public_module",
    "refill_tables",
    "refuse_code",
    "register_api",
    "unspecified_places",
    "unspecified_results",
    "wraps",
]

F = TypeVar("F", bound=Callable[..., Any])

_apis: dict[tuple[str, str], Callable[..., Any]] = {}
_TABLE = "w_ptr"  # begins the names of parameters that hold addresses
_UNSPECIFIED = "_unspecified_results"
_CODE = ("jit_args", "jit_kwargs")  # parameters whose text ends up in C++ that is compiled and loaded


def register_api(func: Callable[..., Any]) -> None:
    """Make ``func`` replayable; the decorator calls this for every public function."""
    _apis[func.__module__, func.__qualname__] = func


def unspecified_results(*places: int) -> Callable[[F], F]:
    """Mark results of a function, by their places in the returned list, whose values have no meaning.

    Placed directly below ``@flashinfer_api``. A replay does not compare them.
    """

    def mark(func: F) -> F:
        vars(func)[_UNSPECIFIED] = places
        return func

    return mark


def unspecified_places(func: Callable[..., Any]) -> tuple[int, ...]:
    """Return what :func:`unspecified_results` has marked."""
    return getattr(func, _UNSPECIFIED, ())


def refill_tables(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], banks: Mapping[int, Mapping[int, Any]]
) -> None:
    """Fill tables of addresses anew, which the dump holds as numbers of another process.

    ``banks`` are the recorded matrices by row of the table, by ``id`` of the table. A table is an argument whose name
    begins with ``w_ptr``. RuntimeError for one without a bank for each row: its addresses may be any.
    """
    for name, table in _bound(func, args, kwargs).items():
        if not (name.startswith(_TABLE) and isinstance(table, torch.Tensor)):
            continue
        rows = banks.get(id(table), {})
        if table.dim() != 2 or sorted(rows) != list(range(table.shape[0])):
            raise RuntimeError(
                f"replay: {name} of {func.__qualname__} must be dumped with the bank of each row (which fill_w_ptr "
                f"notes on the table that it fills), got addresses of the process that made the dump"
            )
        table.zero_()
        for row, bank in rows.items():
            sys.modules[func.__module__].fill_w_ptr(table, bank, table.shape[1], row)


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
    values = _bound(func, args, kwargs)
    for name in _CODE:
        if values.get(name) is not None:
            raise RuntimeError(
                f"replay: {name} of {func.__qualname__} must not hold code (if you trust where it comes from: "
                "allow_code=True, or flashinfer replay --allow-code), got C++ source that would be compiled and run"
            )


def _bound(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name. Positional ones that do not fit are left out: the call itself reports them."""
    values = dict(kwargs)
    with contextlib.suppress(TypeError):
        values |= inspect.signature(func).bind_partial(*args).arguments
    return values
