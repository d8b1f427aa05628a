# SPDX-License-Identifier: Apache-2.0
"""Tunable implementations of an operator, each with its tactics."""

from __future__ import annotations

import abc
from typing import Any, Sequence

import torch

from .profiles import OptimizationProfile

__all__ = ["FALLBACK", "TunableRunner"]

FALLBACK = -1


class TunableRunner(abc.ABC):
    """One implementation of an operator. Two runners of a class are equal if their attributes are equal.

    Attributes that cannot be hashed by value, such as lists, dicts and tensors, are compared by identity. Attributes
    whose name ends in ``_cache`` are ignored.
    """

    @abc.abstractmethod
    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        """Return the tactics worth a trial on these inputs."""

    @abc.abstractmethod
    def forward(self, inputs: list[Any], tactic: Any = FALLBACK, do_preparation: bool = False, **kwargs: Any) -> Any:
        """Run with a tactic; -1 always works. ``do_preparation`` is set in one untimed call before the trials."""

    def precompile_tactics(  # noqa: B027  (a runner without anything to compile leaves it as it is)
        self, inputs: list[Any], tactics: Sequence[Any], profile: OptimizationProfile, **kwargs: Any
    ) -> None:
        """Compile what the tactics of a profile need; called once before their trials."""

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Return what results depend on besides shapes, such as dtypes."""
        return ()

    def __call__(self, inputs: list[Any], **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)

    def _counted(self) -> dict[str, Any]:
        return {name: _key_of(value) for name, value in vars(self).items() if not name.endswith("_cache")}

    def __hash__(self) -> int:
        return hash(tuple(self._counted().values()))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._counted() == other._counted()


class _Identity:
    """Wrapper that makes a value equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def _key_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # has a hash, but compares element by element
        return _Identity(value)
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value
