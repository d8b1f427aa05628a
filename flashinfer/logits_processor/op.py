# SPDX-License-Identifier: Apache-2.0
"""Steps that a pipeline executes: functions from one type of tensor to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Mapping

from .._runtime.errors import ArgumentError
from .types import TaggedTensor, TensorType

__all__ = ["Op", "ParameterizedOp"]


class Op(ABC):
    """A step. A subclass declares the type that it takes (``IN``) and the type that it produces (``OUT``).

    Every op of a pipeline gets all keyword arguments of the call and uses those it knows.
    """

    IN: TensorType
    OUT: TensorType

    @abstractmethod
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """Process a tensor of type ``IN``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _data(self, tensor: TaggedTensor) -> Any:
        """Return the plain tensor if it has the right type."""
        if tensor.type is not self.IN:
            raise ArgumentError(
                f"{type(self).__name__}: the input must be of type {self.IN.name}, got {tensor.type.name}"
            )
        return tensor.data


class ParameterizedOp(Op):
    """A step with parameters; the constructor takes their defaults."""

    def __init__(self, **default_params: Any) -> None:
        self.default_params = default_params

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.default_params.items())})"

    def _get_param(self, name: str, kwargs: Mapping[str, Any], required: bool = True) -> Any:
        """Return the call's value, else the constructor's, else None; raise if a required parameter would be None."""
        value = kwargs.get(name)
        if value is None:
            value = self.default_params.get(name)
        if value is None and required:
            raise ArgumentError(f"{type(self).__name__}: {name} must be in the call of the pipeline, got none")
        return value
