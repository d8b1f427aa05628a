# SPDX-License-Identifier: Apache-2.0
"""The published path of definitions of :mod:`flashinfer.trace.apply`, and of what the environment asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Optional, Union

from flashinfer._runtime.knobs import knobs
from flashinfer.trace import Solution
from flashinfer.trace.apply.solutions import Definition as Definition
from flashinfer.trace.apply.solutions import load

__all__ = ["ENABLE_ENV", "PATH_ENV", "Axis", "IOSpec", "TraceConfig", "load_config", "resolve_trace_path"]

ENABLE_ENV = "FLASHINFER_TRACE_APPLY"
PATH_ENV = "FLASHINFER_TRACE_APPLY_PATH"


@dataclass(frozen=True)
class Axis:
    """One axis of a definition: ``var``, or ``const`` with its size."""

    type: str
    value: Optional[int] = None
    description: str = ""


@dataclass(frozen=True)
class IOSpec:
    """One input or output of a definition; without a shape, a number."""

    dtype: str
    shape: Optional[tuple[str, ...]] = None
    optional: bool = False
    description: str = ""


@dataclass(frozen=True)
class TraceConfig:
    """Solutions of a folder, by definition."""

    path: Optional[Path] = None
    solutions: Mapping[str, Solution] = field(default_factory=dict)


def resolve_trace_path(path: Union[str, Path, None] = None) -> Optional[Path]:
    """Return the folder of solutions: the argument, else that of ``FLASHINFER_TRACE_APPLY_PATH``, else None."""
    named = knobs.trace_apply_path if path is None else path
    return None if named is None else Path(named).expanduser()


def load_config(path: Union[str, Path, None] = None) -> TraceConfig:
    """Read the solutions of a folder; none without a folder."""
    found = resolve_trace_path(path)
    return TraceConfig() if found is None else TraceConfig(found, load(found))
