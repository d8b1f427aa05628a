# SPDX-License-Identifier: Apache-2.0
"""Results in a JSON file: ``{"_metadata": {...}, "<key>": [runner class, tactic], ...}``.

A result holds for the versions and the GPU it was measured with, which the file names. One of another machine is not
read, and not overwritten either: somebody else may need it.
"""

from __future__ import annotations

import enum
import json
import logging
from pathlib import Path
from typing import Any, Mapping

import torch

from ..jit.utils import write_atomically
from ..version import __version__

__all__ = ["METADATA", "Fit", "fit_of", "metadata", "read_results", "write_results"]

METADATA = "_metadata"
_ANY = "*"
_UNKNOWN = "unknown"
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
_log = logging.getLogger("flashinfer")


class Fit(enum.Enum):
    """Whether a file is for this machine."""

    YES = enum.auto()
    NO = enum.auto()
    UNKNOWN = enum.auto()  #: it does not say; it may be replaced


def _installed(*names: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def metadata() -> dict[str, str]:
    """What times depend on."""
    has_gpu = torch.cuda.is_available()
    return {
        "flashinfer_version": __version__,
        "cuda_version": torch.version.cuda or "none",
        "cublas_version": _installed(*_CUBLAS),
        "cudnn_version": str(torch.backends.cudnn.version() or "none") if has_gpu else "none",
        "cudnn_frontend_version": _installed("nvidia-cudnn-frontend"),
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
    }


def fit_of(found: Any) -> Fit:
    """Compare the metadata of a file with this machine's. ``"*"`` fits any."""
    if not isinstance(found, Mapping):
        return Fit.UNKNOWN
    fit = Fit.YES
    for name, here in metadata().items():
        there = found.get(name, _UNKNOWN)
        if there in (here, _ANY):
            continue
        if there != _UNKNOWN:
            return Fit.NO
        fit = Fit.UNKNOWN
    return fit


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


def read_results(path: Path) -> tuple[Fit, dict[str, tuple[str, Any]]]:
    """Results by their keys; none of a file that is not for this machine. Tactics that were tuples are again."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        _log.warning("autotune: %s cannot be read (%s); tuning without it", path, error)
        return Fit.UNKNOWN, {}
    fit = fit_of(content.get(METADATA) if isinstance(content, dict) else None)
    if fit is not Fit.YES:
        _log.warning("autotune: %s is of other versions or another GPU; tuning without it", path)
        return fit, {}
    return fit, {
        key: (value[0], _as_tuples(value[1]))
        for key, value in content.items()
        if not key.startswith("_") and isinstance(value, list) and len(value) == 2
    }


def write_results(path: Path, results: Mapping[str, tuple[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {METADATA: metadata(), **{key: list(value) for key, value in results.items()}}
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
