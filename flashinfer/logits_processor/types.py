# SPDX-License-Identifier: Apache-2.0
"""Tensors tagged with their meaning in a pipeline: logits, probabilities or indices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional, Union

import torch
from torch.utils._pytree import tree_map

__all__ = ["TaggedTensor", "TensorType"]


class TensorType(Enum):
    """Logits, probabilities, or indices of tokens."""

    LOGITS = 1
    PROBS = 2
    INDICES = 3


@dataclass(frozen=True)
class TaggedTensor:
    """A tensor and its type. torch functions take it like the tensor, and return plain tensors."""

    data: torch.Tensor
    type: TensorType

    @classmethod
    def logits(cls, t: torch.Tensor) -> TaggedTensor:
        return cls(t, TensorType.LOGITS)

    @classmethod
    def probs(cls, t: torch.Tensor) -> TaggedTensor:
        return cls(t, TensorType.PROBS)

    @classmethod
    def indices(cls, t: torch.Tensor) -> TaggedTensor:
        return cls(t, TensorType.INDICES)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def size(self, dim: Optional[int] = None) -> Union[torch.Size, int]:
        return self.data.size() if dim is None else self.data.size(dim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.data if isinstance(x, TaggedTensor) else x

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
