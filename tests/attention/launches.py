# SPDX-License-Identifier: Apache-2.0
"""Kernel launches of a call on a GPU."""

from __future__ import annotations

from typing import Any, Callable

import torch


def kernels(call: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels that a call launches, after a warm-up call that builds modules."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]
