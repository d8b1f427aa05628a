# SPDX-License-Identifier: Apache-2.0
"""A kernel written for a definition: where its files are and how they are built."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Mapping, Optional, Sequence

from .._runtime.errors import ArgumentError

__all__ = ["BuildSpec", "Solution", "SourceFile", "SupportedBindings", "SupportedLanguages"]


class SupportedLanguages(str, Enum):
    PYTHON = "python"
    TRITON = "triton"
    CUTEDSL = "cutedsl"
    TILELANG = "tilelang"
    CPP = "cpp"
    CUDA = "cuda"
    CUTLASS = "cutlass"
    CUTILE = "cutile"


_PYTHON_FAMILY = frozenset(
    {
        SupportedLanguages.PYTHON,
        SupportedLanguages.TRITON,
        SupportedLanguages.CUTEDSL,
        SupportedLanguages.TILELANG,
        SupportedLanguages.CUTILE,
    }
)


class SupportedBindings(str, Enum):
    TVM_FFI = "tvm-ffi"
    TORCH = "torch"


@dataclass(frozen=True)
class SourceFile:
    """``path`` is relative to the root of the solution."""

    path: str
    content: str


@dataclass(frozen=True)
class BuildSpec:
    """Build instructions of a solution; ``entry_point`` is ``"file::function"``.

    With ``destination_passing_style`` the function receives its outputs as further arguments instead of returning them.
    """

    language: SupportedLanguages
    target_hardware: Sequence[str]
    entry_point: str
    dependencies: Sequence[str] = field(default_factory=tuple)
    destination_passing_style: bool = False
    binding: Optional[SupportedBindings] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "language", SupportedLanguages(self.language))
        if self.binding is not None:
            object.__setattr__(self, "binding", SupportedBindings(self.binding))
        if len(self.entry_point.split("::")) != 2:
            raise ArgumentError(f"BuildSpec: entry_point must be 'file::function', got {self.entry_point!r}")

    @property
    def is_python_family(self) -> bool:
        """Tell whether the entry point is a function of Python, whatever compiles its kernels."""
        return self.language in _PYTHON_FAMILY

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuildSpec:
        """Read it from its JSON object; ``target_hardware`` and ``dependencies`` may be missing."""
        try:
            return cls(
                data["language"],
                tuple(data.get("target_hardware") or ()),
                data["entry_point"],
                tuple(data.get("dependencies") or ()),
                bool(data.get("destination_passing_style", False)),
                data.get("binding"),
            )
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"BuildSpec: the object must have the fields of a build, got {error!r}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON object."""
        return {
            "language": self.language.value,
            "target_hardware": list(self.target_hardware),
            "entry_point": self.entry_point,
            "dependencies": list(self.dependencies),
            "destination_passing_style": self.destination_passing_style,
            "binding": None if self.binding is None else self.binding.value,
        }


@dataclass(frozen=True)
class Solution:
    """``definition`` is the name of the definition that this solution implements."""

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: Sequence[SourceFile]
    description: Optional[str] = None

    def __post_init__(self) -> None:
        file = self.spec.entry_point.split("::")[0]
        paths = [source.path for source in self.sources]
        if file not in paths:
            raise ArgumentError(f"Solution: entry_point must name one of the sources {paths}, got {file!r}")

    @property
    def entry_file(self) -> str:
        """The file of the entry point."""
        return self.spec.entry_point.split("::")[0]

    @property
    def entry_symbol(self) -> str:
        """The function that is called."""
        return self.spec.entry_point.split("::")[1]

    @property
    def entry_source(self) -> SourceFile:
        """The source that holds the entry point."""
        return next(source for source in self.sources if source.path == self.entry_file)

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON object, which :meth:`from_dict` reads."""
        return {
            "name": self.name,
            "definition": self.definition,
            "author": self.author,
            "spec": self.spec.to_dict(),
            "sources": [{"path": source.path, "content": source.content} for source in self.sources],
            "description": self.description,
        }

    def hash(self) -> str:
        """Return a SHA-256 of what the solution computes: its definition, its build and its sources."""
        said = {name: value for name, value in self.to_dict().items() if name in ("definition", "spec", "sources")}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Solution:
        """Read a solution from its JSON object; keys that this class does not know are left out.

        ``target_hardware`` and ``dependencies`` may be missing.
        """
        try:
            build = BuildSpec.from_dict(data["spec"])
            sources = tuple(SourceFile(source["path"], source["content"]) for source in data["sources"])
            return cls(data["name"], data["definition"], data["author"], build, sources, data.get("description"))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"Solution: the object must have the fields of a solution, got {error!r}") from error
