# SPDX-License-Identifier: Apache-2.0
"""What every op decides before it calls its module, in as few nanoseconds as Python allows."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from . import arch, utils

__all__ = ["NativeFunction", "backend_of", "use_pdl"]

_own_probe = arch.device_support_pdl


class NativeFunction(dict[bool, Callable[..., Any]]):
    """A function of a family's modules by ``tensor.is_cuda``: ``rmsnorm[x.is_cuda](...)``.

    An item once it was used, which takes 0.2 us less than to ask for the module and then for its function.
    """

    def __init__(self, get_module: Callable[[str], Any], name: str) -> None:
        self._get_module, self._name = get_module, name

    def __missing__(self, is_cuda: bool) -> Callable[..., Any]:
        function = getattr(self._get_module("cuda" if is_cuda else "cpu"), self._name)
        self[is_cuda] = function
        return function


def backend_of(tensor: torch.Tensor) -> str:
    """Which module serves a tensor. (``tensor.device.type`` says the same in 0.5 us instead of 0.05.)"""
    return "cuda" if tensor.is_cuda else "cpu"


def use_pdl(tensor: torch.Tensor, enable_pdl: Optional[bool]) -> bool:
    """Whether a launch may be dependent. Launchers know which devices have that (``UsePdl`` of tvm_ffi_utils.h).

    The probe is read from ``utils`` at each call, because serving engines replace it there; theirs is asked.
    """
    return enable_pdl is not False and (
        utils.device_support_pdl is _own_probe or utils.device_support_pdl(tensor.device)
    )
