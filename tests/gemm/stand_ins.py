# SPDX-License-Identifier: Apache-2.0
"""Objects that tests put in place of native functions, and of tensors on a GPU."""

from __future__ import annotations

import torch


class Native:
    """Stands for a native function: records the arguments of its calls, writes ones, returns ``takes``."""

    def __init__(self, takes: bool = True) -> None:
        self.calls: list[tuple] = []
        self.takes = takes

    def __call__(self, out, *args):
        self.calls.append((out, *args))
        if self.takes:
            out.fill_(1)
        return self.takes


class _OnCuda(torch.Tensor):
    is_cuda = True


def on_cuda(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor that says it is on a CUDA device."""
    return torch.empty(shape, dtype=dtype).as_subclass(_OnCuda)
