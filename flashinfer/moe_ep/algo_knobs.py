# SPDX-License-Identifier: Apache-2.0
"""Options of transports: of a fleet (all calls of a layer), and of a handle (one call)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Iterable

import torch

__all__ = [
    "AlgoKnob",
    "FleetAlgoKnobAllocator",
    "FleetAlgoKnobFaultTolerance",
    "FleetAlgoKnobNumChannelsPerRank",
    "FleetAlgoKnobNumQpsPerRank",
    "FleetAlgoKnobQuantization",
    "FleetAlgoKnobRdmaBufferSize",
    "FleetAlgoKnobTopologyCapacity",
    "HandleAlgoKnobNumReceivedTokens",
    "HandleAlgoKnobSplitOperation",
    "HandleAlgoKnobTopKWeights",
    "HandleAlgoKnobUserStream",
    "QuantType",
]


class QuantType(enum.Enum):
    """Number formats on the wire."""

    FP8E4M3 = "fp8e4m3"
    FP8E5M2 = "fp8e5m2"
    NVFP8 = "nvfp8"
    UE8M0 = "ue8m0"


@dataclass(frozen=True)
class AlgoKnob:
    """Base of options."""


@dataclass(frozen=True)
class FleetAlgoKnobAllocator(AlgoKnob):
    """Source of the memory of a transport: torch's caching allocator, or two C functions by address."""

    torch_caching: bool = False
    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        if self.torch_caching and (self.alloc_fn or self.free_fn or self.context):
            raise ValueError(
                f"FleetAlgoKnobAllocator: torch_caching must be False with addresses, got alloc_fn {self.alloc_fn:#x}, "
                f"free_fn {self.free_fn:#x} and context {self.context:#x}"
            )
        if bool(self.alloc_fn) != bool(self.free_fn):
            raise ValueError(
                f"FleetAlgoKnobAllocator: alloc_fn and free_fn must be given both or neither, got {self.alloc_fn:#x} "
                f"and {self.free_fn:#x}"
            )


@dataclass(frozen=True)
class FleetAlgoKnobFaultTolerance(AlgoKnob):
    """Behaviour of a fleet that lost a rank: whether it goes on, and how long it waits."""

    enabled: bool = True
    timeout_ms: int = 0
    reconcile_timeout_s: float = 30.0
    coordinator_takeover_s: float = 10.0

    def __post_init__(self) -> None:
        op = "FleetAlgoKnobFaultTolerance"
        if self.timeout_ms < 0:
            raise ValueError(f"{op}: timeout_ms must be at least 0, got {self.timeout_ms}")
        for name in ("reconcile_timeout_s", "coordinator_takeover_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{op}: {name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class FleetAlgoKnobNumChannelsPerRank(AlgoKnob):
    """Channels between two ranks."""

    n: int


@dataclass(frozen=True)
class FleetAlgoKnobNumQpsPerRank(AlgoKnob):
    """Queue pairs between two ranks."""

    n: int


@dataclass(frozen=True)
class FleetAlgoKnobRdmaBufferSize(AlgoKnob):
    """Bytes of the buffer that other nodes write to."""

    bytes_: int


@dataclass(frozen=True)
class FleetAlgoKnobQuantization(AlgoKnob):
    """Number formats on the wire."""

    quants: tuple[QuantType, ...] = ()


@dataclass(frozen=True)
class FleetAlgoKnobTopologyCapacity(AlgoKnob):
    """Largest number of ranks that the fleet may grow to."""

    n: int


@dataclass(frozen=True, eq=False)
class HandleAlgoKnobNumReceivedTokens(AlgoKnob):
    """Tensor that receives the number of tokens of this rank."""

    target: torch.Tensor


@dataclass(frozen=True)
class HandleAlgoKnobSplitOperation(AlgoKnob):
    """Sending and receiving as two calls."""


@dataclass(frozen=True, eq=False)
class HandleAlgoKnobTopKWeights(AlgoKnob):
    """Weights of the experts of each token."""

    weights: torch.Tensor


@dataclass(frozen=True)
class HandleAlgoKnobUserStream(AlgoKnob):
    """CUDA stream of a call, by address."""

    stream: int


def _index_knobs(knobs: Iterable[Any]) -> dict[type, AlgoKnob]:
    """Return the options by class; of several of a class the last one counts."""
    found: dict[type, AlgoKnob] = {}
    for knob in knobs:
        if not isinstance(knob, AlgoKnob):
            raise TypeError(f"algo_knobs: expected AlgoKnob, got {type(knob).__name__}")
        found[type(knob)] = knob
    return found
