# SPDX-License-Identifier: Apache-2.0
"""The modules for SM90, one per element type and scaling."""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..jit.gemm import get_gemm_sm90_module, get_gemm_w4_sm90_module

__all__ = ["Sm90Devices", "Sm90Functions", "W4Functions", "dense_product", "is_sm90"]


class Sm90Devices(dict[int, bool]):
    """CUDA devices by index: True for capability 9.0. Each device is probed once."""

    def __missing__(self, index: int) -> bool:
        self[index] = torch.cuda.get_device_capability(index) == (9, 0)
        return self[index]


class Sm90Functions(dict[str, Callable[..., Any]]):
    """One function of the module of each kind, loaded on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __missing__(self, kind: str) -> Callable[..., Any]:
        self[kind] = getattr(get_gemm_sm90_module(kind), self._name)
        return self[kind]


#: The product of ordinary matrices, which shortcuts call.
dense_product = Sm90Functions("gemm_sm90_dense")


class W4Functions(Sm90Functions):
    """One function of the module of each kind of four-bit weights, loaded on first use."""

    def __missing__(self, kind: str) -> Callable[..., Any]:
        self[kind] = getattr(get_gemm_w4_sm90_module(kind), self._name)
        return self[kind]


_devices = Sm90Devices()


def is_sm90(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is on a CUDA device of capability 9.0."""
    return tensor.is_cuda and _devices[tensor.get_device()]
