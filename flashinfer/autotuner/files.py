# SPDX-License-Identifier: Apache-2.0
"""Results in a JSON file: ``{"_metadata": {...}, "<key>": [runner class, tactic], ...}``.

A result is valid for the versions and the GPU (without one, the CPU) it was measured with, which the file names. A
file of another machine is not read, and not overwritten either: another user may need it. Keys that begin with ``_``
are not results:
``_generation`` counts how often the file was written, ``_records`` holds what products keep beside the results.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import platform
from pathlib import Path
from typing import Any, Mapping

import torch

from ..jit.cpu_targets import cpu_arch_tag
from ..jit.utils import locked, write_atomically
from ..version import __version__
from .tactics import from_json, to_json

__all__ = [
    "GENERATION",
    "METADATA",
    "RECORDS",
    "Fit",
    "classify_metadata",
    "collect_metadata",
    "cudnn_backend_version",
    "fit_of",
    "locked",
    "read_content",
    "read_json",
    "results_in",
    "write_content",
]

METADATA, GENERATION, RECORDS = "_metadata", "_generation", "_records"
_ANY = "*"
_UNKNOWN = "unknown"
_SAYS_NOTHING = (_UNKNOWN, "None", None)
_MOST_LEVELS = 64  # levels of lists in lists; what is written back and compared is walked by recursion
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")

Results = dict[str, tuple[str, Any]]


class Fit(enum.Enum):
    """Result of comparing a file of results with this machine."""

    YES = enum.auto()
    NO = enum.auto()
    UNKNOWN = enum.auto()  #: the file does not name the machine; the file may be replaced


def _installed(*names: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return _UNKNOWN


def cudnn_backend_version() -> str:
    """Return the version of the cuDNN library that torch loads, else of the one that the package ``cudnn`` finds."""
    with contextlib.suppress(Exception):  # torch refuses libraries that do not fit together
        version = torch.backends.cudnn.version()
        if version is not None:
            return str(version)
    with contextlib.suppress(Exception):  # not installed, or without its library
        import cudnn

        return str(cudnn.backend_version())
    return _UNKNOWN


def collect_metadata() -> dict[str, str]:
    """Collect what measured times depend on: versions and the GPU; ``"unknown"`` for a value that cannot be found.

    Without a GPU, the CPU is named, because machines of all kinds may share a folder.
    """
    found = {
        "flashinfer_version": __version__,
        "cuda_version": torch.version.cuda or _UNKNOWN,
        "cublas_version": _installed(*_CUBLAS),
        "cudnn_version": cudnn_backend_version(),
        "cudnn_frontend_version": _installed("nvidia-cudnn-frontend"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else _UNKNOWN,
    }
    return found if found["gpu"] != _UNKNOWN else {**found, "cpu": _cpu_name()}


@functools.cache
def _cpu_name() -> str:
    """Return the model of the CPU and its instructions: virtual machines may all say "Intel Xeon Processor"."""
    model = platform.processor() or platform.machine() or _UNKNOWN
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} ({cpu_arch_tag()})"


def classify_metadata(
    saved: Any, current: Mapping[str, str]
) -> tuple[dict[str, tuple[Any, str]], dict[str, tuple[Any, str]]]:
    """Return two dicts of differences, (value in the file, value here): definite ones, and those the file omits."""
    definite: dict[str, tuple[Any, str]] = {}
    unsaid: dict[str, tuple[Any, str]] = {}
    for name, here in current.items():
        there = saved.get(name) if isinstance(saved, Mapping) else None
        if there in (here, _ANY):
            continue
        (unsaid if there in _SAYS_NOTHING else definite)[name] = (there, here)
    return definite, unsaid


def fit_of(content: Mapping[str, Any], current: Mapping[str, str]) -> Fit:
    """Compare a file with this machine. ``"*"`` fits any machine, as does a file without metadata."""
    if METADATA not in content:
        return Fit.YES
    definite, unsaid = classify_metadata(content[METADATA], current)
    return Fit.NO if definite else Fit.UNKNOWN if unsaid else Fit.YES


def read_content(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file. FileNotFoundError without a file, ``json.JSONDecodeError`` if it is no JSON."""
    content = read_json(path)
    return content if isinstance(content, dict) else {METADATA: None}


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError if it is damaged in whatever way."""
    try:
        content = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [content]
    for _ in range(_MOST_LEVELS):
        parts = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list)))
        level = [x for part in parts for x in part]
    if level:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")
    return content


def results_in(content: Mapping[str, Any]) -> Results:
    """Return runner class and tactic by key. Tactics that were saved as tuples are tuples again."""
    return {
        key: (value[0], from_json(value[1]))
        for key, value in content.items()
        if not key.startswith("_") and isinstance(value, list) and len(value) == 2
    }


def write_content(path: Path, special: Mapping[str, Any], results: Results) -> None:
    content = {**special, **{key: [runner, to_json(tactic)] for key, (runner, tactic) in results.items()}}
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
