# SPDX-License-Identifier: Apache-2.0
"""A kernel written for a definition: where its files are and how they are built."""

from __future__ import annotations

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Solution:
        """Read a solution from its JSON object; keys that this class does not know are left out.

        ``target_hardware`` and ``dependencies`` may be missing.
        """
        try:
            spec = data["spec"]
            build = BuildSpec(
                spec["language"],
                tuple(spec.get("target_hardware") or ()),
                spec["entry_point"],
                tuple(spec.get("dependencies") or ()),
                bool(spec.get("destination_passing_style", False)),
                spec.get("binding"),
            )
            sources = tuple(SourceFile(source["path"], source["content"]) for source in data["sources"])
            return cls(data["name"], data["definition"], data["author"], build, sources, data.get("description"))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"Solution: the object must have the fields of a solution, got {error!r}") from error
