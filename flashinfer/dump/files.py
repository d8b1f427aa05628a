# SPDX-License-Identifier: Apache-2.0
"""Files of a dump. Every write is flushed to the disk before it returns, because the call may crash the process."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Mapping

import torch

__all__ = ["append_record", "has_tensors", "load_tensors", "publish", "read_record", "save_tensors", "tensor_format"]

METADATA = "metadata.jsonl"
SESSION = "session.jsonl"
_SUFFIX = {"torch": ".pt", "safetensors": ".safetensors"}


def tensor_format(safetensors: bool) -> str:
    """``torch`` or ``safetensors``, the latter only where the package is installed."""
    if not safetensors:
        return "torch"
    if importlib.util.find_spec("safetensors") is None:
        logging.getLogger("flashinfer.api").warning("dumps: safetensors is not installed, writing .pt files instead")
        return "torch"
    return "safetensors"


def save_tensors(directory: Path, stem: str, tensors: Mapping[str, torch.Tensor], fmt: str) -> None:
    """Write ``<stem>.pt`` or ``<stem>.safetensors``. The tensors must be on the host."""
    path = directory / f"{stem}{_SUFFIX[fmt]}"
    if fmt == "safetensors":
        from safetensors.torch import save_file

        save_file({key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}, path)
        _sync(path)
    else:
        with path.open("wb") as file:
            torch.save(dict(tensors), file)
            file.flush()
            os.fsync(file.fileno())
    _sync(directory)


def publish(source: Path, target: Path, stem: str) -> None:
    """Link or copy the tensor files ``stem`` of directory ``source`` into ``target``, replacing those already there."""
    for path in source.glob(f"{stem}.*"):
        temporary = target / f".{path.name}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without links
            shutil.copyfile(path, temporary)
        temporary.replace(target / path.name)
    _sync(target)


def load_tensors(directory: Path, stem: str) -> dict[str, torch.Tensor]:
    """Read either format. A dump may come from elsewhere, hence no pickled code (``weights_only``)."""
    path = directory / f"{stem}.safetensors"
    if path.exists():
        from safetensors.torch import load_file

        return load_file(str(path))
    return torch.load(directory / f"{stem}.pt", map_location="cpu", weights_only=True)


def has_tensors(directory: Path, stem: str) -> bool:
    return any((directory / f"{stem}{suffix}").exists() for suffix in _SUFFIX.values())


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON line in a single write, so that processes sharing ``session.jsonl`` do not mix their lines."""
    line = (json.dumps(record) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_record(directory: Path) -> dict[str, Any]:
    """Return the last complete line of ``metadata.jsonl``."""
    for line in reversed((directory / METADATA).read_bytes().splitlines()):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut short by a crash; the previous line is the valid state
            continue
        if isinstance(record, dict):
            return record
    raise RuntimeError(f"replay: {directory / METADATA} must have the record of a call, got no complete line")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
