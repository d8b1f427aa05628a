# SPDX-License-Identifier: Apache-2.0
"""Files of a dump. Every write is flushed to the disk before it returns: the next thing may be the crash."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any, Mapping

import torch

__all__ = ["append_record", "load_tensors", "read_record", "save_tensors", "tensor_format"]

METADATA = "metadata.jsonl"
SESSION = "session.jsonl"


def tensor_format(safetensors: bool) -> str:
    """``pt`` or ``safetensors``, the latter only where the package is installed."""
    if not safetensors:
        return "pt"
    if importlib.util.find_spec("safetensors") is None:
        logging.getLogger("flashinfer.api").warning("dumps: safetensors is not installed, writing .pt files instead")
        return "pt"
    return "safetensors"


def save_tensors(directory: Path, stem: str, tensors: Mapping[str, torch.Tensor], fmt: str) -> None:
    """Write ``<stem>.<fmt>``. The tensors must be on the host."""
    path = directory / f"{stem}.{fmt}"
    if fmt == "safetensors":
        from safetensors.torch import save_file

        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, str(path))
        _sync(path)
    else:
        with path.open("wb") as file:
            torch.save(dict(tensors), file)
            file.flush()
            os.fsync(file.fileno())
    _sync(directory)


def load_tensors(directory: Path, stem: str) -> dict[str, torch.Tensor]:
    """Read whichever format is there. A dump may come from elsewhere, hence no pickled code (``weights_only``)."""
    path = directory / f"{stem}.safetensors"
    if path.exists():
        from safetensors.torch import load_file

        return load_file(str(path))
    return torch.load(directory / f"{stem}.pt", map_location="cpu", weights_only=True)


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
    """The last complete line of ``metadata.jsonl``."""
    for line in reversed((directory / METADATA).read_text().splitlines()):
        try:
            return json.loads(line)
        except json.JSONDecodeError:  # cut short by the crash; the line before it is the state to trust
            continue
    raise RuntimeError(f"replay: {directory / METADATA} has no complete line, expected the record of a call")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
