# SPDX-License-Identifier: Apache-2.0
"""Kernels of layers by name: a split kernel computes what a transport delivered, a mega kernel does the whole layer."""

from __future__ import annotations

import abc
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Optional, Sequence, TypeVar, Union

import torch

from .config import BootstrapConfig, FleetParams, MoEEpTensors

__all__ = [
    "IdentityConfig",
    "MegaKernelBackend",
    "SplitKernelBackend",
    "SplitKernelContext",
    "create_mega_kernel",
    "create_split_kernel",
    "is_mega_kernel_config",
    "kernel_requires_weights",
    "register_mega_kernel",
    "register_split_kernel",
    "run_split_kernel",
]


@dataclass(eq=False)
class SplitKernelContext:
    """Tokens that a transport delivered to the experts of this rank."""

    expert_tensors: Sequence[torch.Tensor]
    num_tokens: Union[int, Callable[[], int]]
    fleet_params: FleetParams
    recv_topk_idx: Optional[torch.Tensor] = None
    recv_topk_weights: Optional[torch.Tensor] = None


class SplitKernelBackend(abc.ABC):
    """Experts between the two exchanges of a layer."""

    requires_weights = True

    def __init__(self, config: Any) -> None:
        self.config = config

    @abc.abstractmethod
    def prepare(self, weights: Any, bootstrap: BootstrapConfig, params: FleetParams) -> None:
        """Get ready for calls: check the configuration against the fleet, bring weights into the kernel's form."""

    @abc.abstractmethod
    def run(self, ctx: SplitKernelContext) -> Sequence[torch.Tensor]:
        """Return the results in the shape of the received tokens."""


class MegaKernelBackend(abc.ABC):
    """A whole layer in one kernel, its exchanges included."""

    #: True if the output may stay in the kernel's own memory.
    supports_output_view = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def kernel_name(self) -> str:
        """Return the name under which the kernel is registered."""
        return str(self.config.kernel_name)

    @abc.abstractmethod
    def validate_init(self, bootstrap: BootstrapConfig, fleet_params: FleetParams) -> None:
        """Raise an error if the kernel cannot serve these sizes here."""

    @abc.abstractmethod
    def transform_weights(self, weights: Any, fleet_params: FleetParams) -> Any:
        """Return the weights in the kernel's form."""

    @abc.abstractmethod
    def run(self, t: MoEEpTensors, transformed_weights: Any, output: torch.Tensor, *, quantize_input: bool) -> None:
        """Compute the layer."""


_SPLIT: dict[str, type[SplitKernelBackend]] = {}
_MEGA: dict[str, type[MegaKernelBackend]] = {}
_MEGA_ALIASES: dict[str, str] = {}

S = TypeVar("S", bound=type[SplitKernelBackend])
M = TypeVar("M", bound=type[MegaKernelBackend])


def register_split_kernel(name: str) -> Callable[[S], S]:
    """Return a decorator that makes a class known under a name."""

    def register(cls: S) -> S:
        _SPLIT[name] = cls
        return cls

    return register


def register_mega_kernel(name: str, deprecated_aliases: Iterable[str] = ()) -> Callable[[M], M]:
    """Return a decorator that makes a class known under a name, and under older ones that warn."""

    def register(cls: M) -> M:
        _MEGA[name] = cls
        _MEGA_ALIASES.update(dict.fromkeys(deprecated_aliases, name))
        return cls

    return register


def _name_of(op: str, config: Any) -> str:
    name = getattr(config, "kernel_name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{op}: config must have a kernel_name that is not empty, got {type(config).__name__}")
    return name


def create_split_kernel(config: Any) -> SplitKernelBackend:
    """Make the split kernel that a configuration names."""
    name = _name_of("create_split_kernel", config)
    if name not in _SPLIT:
        raise KeyError(f"unknown split kernel {name!r}; available: {sorted(_SPLIT)}")
    return _SPLIT[name](config)


def create_mega_kernel(config: Any) -> MegaKernelBackend:
    """Make the mega kernel that a configuration names."""
    name = _name_of("create_mega_kernel", config)
    if name in _MEGA_ALIASES:
        current = _MEGA_ALIASES[name]
        warnings.warn(f"mega kernel {name!r} is called {current!r} now", DeprecationWarning, stacklevel=2)
        name = current
    if name not in _MEGA:
        raise KeyError(f"unknown mega kernel {name!r}; available: {sorted(_MEGA)}")
    return _MEGA[name](config)


def is_mega_kernel_config(config: Any) -> bool:
    """Tell whether a configuration names a mega kernel."""
    name = getattr(config, "kernel_name", None)
    return name in _MEGA or name in _MEGA_ALIASES


def is_split_kernel_config(config: Any) -> bool:
    """Tell whether a configuration names a split kernel."""
    return getattr(config, "kernel_name", None) in _SPLIT


def kernel_requires_weights(config: Any) -> bool:
    """Tell whether the split kernel of a configuration computes with weights."""
    return create_split_kernel(config).requires_weights


def run_split_kernel(config: Any, ctx: SplitKernelContext) -> Sequence[torch.Tensor]:
    """Run the split kernel of a configuration; a kernel with weights must be prepared, which layers do."""
    return create_split_kernel(config).run(ctx)


@dataclass(frozen=True)
class IdentityConfig:
    """Experts that return their input, to measure or test a transport."""

    kernel_name: str = "identity"


@register_split_kernel("identity")
class IdentitySplitKernelBackend(SplitKernelBackend):
    """Experts that return their input."""

    requires_weights = False

    def prepare(self, weights: Any, bootstrap: BootstrapConfig, params: FleetParams) -> None:
        """Return: there are no weights to prepare."""

    def run(self, ctx: SplitKernelContext) -> Sequence[torch.Tensor]:
        return ctx.expert_tensors
