# SPDX-License-Identifier: Apache-2.0
"""A kernel that only takes time, which tuners put in front of what they measure."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch

from flashinfer._runtime.errors import ArgumentError

__all__ = ["delay_kernel", "get_trtllm_utils_module"]


@functools.cache
def _cycles_per_microsecond(device: int) -> float:
    """Return the highest clock of the SMs in MHz (2 GHz where torch cannot tell); a lower clock delays longer."""
    return float(getattr(torch.cuda.get_device_properties(device), "clock_rate", 2_000_000)) / 1000


def delay_kernel(stream_delay_micro_secs: int) -> None:
    """Keep the current stream of the current CUDA device busy for about this many microseconds."""
    if stream_delay_micro_secs < 0:
        raise ArgumentError(f"delay_kernel: stream_delay_micro_secs must be 0 or more, got {stream_delay_micro_secs}")
    if not torch.cuda.is_available():
        raise ArgumentError("delay_kernel: the machine must have a CUDA device, got none")
    torch.cuda._sleep(int(stream_delay_micro_secs * _cycles_per_microsecond(torch.cuda.current_device())))


@functools.cache
def get_trtllm_utils_module() -> SimpleNamespace:
    """Return an object that has :func:`delay_kernel`, as the published module of this name does."""
    return SimpleNamespace(delay_kernel=delay_kernel)
