# SPDX-License-Identifier: Apache-2.0
"""Decisions that every op makes before it calls its module: the backend and PDL. Kept short for host latency."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from . import arch
from .probes import probes

__all__ = ["NativeFunction", "backend_of", "use_pdl"]

_own_probe = arch.device_support_pdl


class NativeFunction(dict[bool, Callable[..., Any]]):
    """Function of a family's modules, indexed by ``tensor.is_cuda``: ``rmsnorm[x.is_cuda](...)``.

    The function is cached after its first use: a look-up takes 0.2 us less than looking up module and function.
    """

    def __init__(self, get_module: Callable[[str], Any], name: str) -> None:
        self._get_module, self._name = get_module, name

    def __missing__(self, is_cuda: bool) -> Callable[..., Any]:
        function = getattr(self._get_module("cuda" if is_cuda else "cpu"), self._name)
        self[is_cuda] = function
        return function


def backend_of(tensor: torch.Tensor) -> str:
    """Return the backend of the module that serves a tensor. (``tensor.device.type`` takes 0.5 us instead of 0.05.)"""
    return "cuda" if tensor.is_cuda else "cpu"


def use_pdl(tensor: torch.Tensor, enable_pdl: Optional[bool]) -> bool:
    """Return True if a launch may use PDL. Launchers know which devices have it (``UsePdl`` of tvm_ffi_utils.h).

    The probe is read at each call, because serving engines replace the probe (:mod:`flashinfer._runtime.probes`).
    """
    return enable_pdl is not False and (
        probes.device_support_pdl is _own_probe or probes.device_support_pdl(tensor.device)
    )
