# SPDX-License-Identifier: Apache-2.0
"""Registry of the specs made in this process, and the state of their modules."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Optional, TypeVar

from .load import is_compiled, library_path
from .spec import ModuleSpec

__all__ = ["JitSpecRegistry", "JitSpecStatus"]

S = TypeVar("S", bound=ModuleSpec)


@dataclass(frozen=True)
class JitSpecStatus:
    """One row of ``flashinfer module-status``."""

    name: str
    created_at: datetime.datetime
    is_compiled: bool
    library_path: Optional[Path]
    sources: list[Path]
    needs_device_linking: bool

    @property
    def status(self) -> str:
        return "Compiled" if self.is_compiled else "Not Compiled"


class JitSpecRegistry(Generic[S]):
    """Every spec made in this process, by name."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[S, datetime.datetime]] = {}

    def register(self, spec: S) -> None:
        self._specs[spec.name] = (spec, datetime.datetime.now())

    def get_all_specs(self) -> dict[str, S]:
        return {name: spec for name, (spec, _) in self._specs.items()}

    def get_spec_status(self, name: str) -> Optional[JitSpecStatus]:
        if name not in self._specs:
            return None
        spec, created = self._specs[name]
        compiled = is_compiled(spec)
        library = library_path(spec) if compiled else None
        return JitSpecStatus(name, created, compiled, library, list(spec.sources), spec.needs_device_linking)

    def get_all_statuses(self) -> list[JitSpecStatus]:
        return [status for name in self._specs if (status := self.get_spec_status(name)) is not None]

    def get_stats(self) -> dict[str, int]:
        compiled = sum(status.is_compiled for status in self.get_all_statuses())
        return {"total": len(self._specs), "compiled": compiled, "not_compiled": len(self._specs) - compiled}
