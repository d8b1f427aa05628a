# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages of the engines that are not installed here: servers, parsers, compiled extensions.

A module of a listed package is empty: whatever is read from it is an object that does nothing. No name of flashinfer,
torch or of the engines' own attention code is replaced this way.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, ClassVar, Iterator, Optional, Sequence


def _hide_special(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


class Anything:
    """Object that can be called, indexed, subclassed and used as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        _hide_special(name)
        return Anything()

    def __getitem__(self, index: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return Anything()

    __ror__ = __and__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False

    def __lt__(self, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class _ClassOfNames(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        _hide_special(name)
        return Anything()


def _any_schema(cls: type, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _empty_class(name: str) -> type:
    members = {
        "__init__": lambda self, *args, **kwargs: None,
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__get_pydantic_core_schema__": classmethod(_any_schema),
        "__getattr__": Anything.__getattr__,
    }
    return _ClassOfNames(name, (), members)


class EmptyModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        _hide_special(name)
        found = _empty_class(name) if name[:1].isupper() else Anything()
        setattr(self, name, found)
        return found


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of empty modules for packages that are listed, and not installed unless they are of an engine."""

    def __init__(self, packages: Sequence[str], always: Sequence[str]) -> None:
        self.packages, self.always = set(packages), tuple(always)

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Any = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        forced = any(name == stub or name.startswith(f"{stub}.") for stub in self.always)
        if forced or name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def install(packages: Sequence[str], always: Sequence[str] = ()) -> None:
    """Stub the packages that are not installed, and modules of engines in ``always`` whatever is."""
    missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, Stubs(missing, always))
