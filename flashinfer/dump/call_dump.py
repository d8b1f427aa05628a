# SPDX-License-Identifier: Apache-2.0
"""State of one dumped call: the writer keeps it until outputs are known, ``graph`` until the CUDA graph is deleted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = ["CallDump", "Recorder"]


@dataclass
class CallDump:
    """State between the inputs and the outputs of one dumped call."""

    directory: Path
    record: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    aliases: dict[str, str]  # key of an input -> another key of the same tensor
    before: dict[str, torch.Tensor] = field(default_factory=dict)  # host copies, to find changed arguments


class Recorder(Protocol):
    """The part of :class:`~flashinfer.dump.writer.Dumper` that writes a call again after a replay of its graph."""

    def reserve(self, size: int, name: str) -> bool:
        """Count ``size`` bytes of the call ``name`` against the cap; False if they do not fit."""

    def write_record(self, dump: CallDump) -> None:
        """Write the record of the call."""
