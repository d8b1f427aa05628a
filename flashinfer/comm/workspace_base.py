# SPDX-License-Identifier: Apache-2.0
"""Base class of the workspaces of a fused all-reduce."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["AllReduceFusionWorkspace"]


class AllReduceFusionWorkspace(ABC):
    """Memory shared between the ranks of a group, for calls of ``allreduce_fusion``."""

    _destroyed = False

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank = world_size, rank

    @property
    @abstractmethod
    def backend(self) -> str:
        """``"trtllm"`` or ``"mnnvl"``."""

    @abstractmethod
    def destroy(self) -> None:
        """Give the memory back. Not collective, and safe to repeat."""

    @abstractmethod
    def is_buffer_size_sufficient(self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: Any) -> bool:
        """Return whether a call of this size fits."""

    def __del__(self) -> None:
        if not self._destroyed and getattr(self, "world_size", None) is not None:
            warnings.warn(f"{type(self).__name__} was not destroyed; call destroy()", ResourceWarning, stacklevel=2)
