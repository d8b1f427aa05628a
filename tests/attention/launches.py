# SPDX-License-Identifier: Apache-2.0
"""What a call launches on a GPU."""

from __future__ import annotations

from typing import Any, Callable

import torch


def kernels(call: Callable[[], Any]) -> list[str]:
    """Names of the kernels of a call, made once before: the first one builds modules and fills caches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]
