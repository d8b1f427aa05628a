# SPDX-License-Identifier: Apache-2.0
"""The GPU's own clock, for use under confidential computing, where CUDA events do not give true times."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Callable, Optional

import torch

from ..jit.globaltimer import gen_globaltimer_module
from .knobs import knobs
from .nvml import nvml_session

__all__ = ["get_globaltimer_kernel", "is_confidential_compute"]

_log = logging.getLogger("flashinfer")


@functools.cache
def get_globaltimer_kernel() -> Optional[Callable[[torch.Tensor], None]]:
    """Return a kernel that writes the GPU's clock, in nanoseconds, to a one-element int64 CUDA tensor (current stream).

    None without a GPU, or where the kernel cannot be built.
    """
    if not torch.cuda.is_available():
        return None
    try:
        return gen_globaltimer_module().build_and_load().write_globaltimer
    except (RuntimeError, OSError) as error:  # no compiler, or JIT is off
        _log.warning("get_globaltimer_kernel: the kernel cannot be built (%s)", error)
        return None


def is_confidential_compute() -> bool:
    """Return True if the GPU runs under confidential computing: ``FLASHINFER_CONFIDENTIAL_COMPUTE``, else NVML.

    False without a GPU or a driver that can tell.
    """
    forced = knobs.confidential_compute
    return forced == "1" if forced else _nvml_says_so()


class _ConfidentialComputeState(ctypes.Structure):
    """``nvmlConfComputeSystemState_t``."""

    _fields_ = [("environment", ctypes.c_uint), ("feature", ctypes.c_uint), ("tools_mode", ctypes.c_uint)]


@functools.cache
def _nvml_says_so() -> bool:
    with nvml_session() as nvml:
        if nvml is None:
            return False
        state = _ConfidentialComputeState()
        try:
            return nvml.nvmlSystemGetConfComputeState(ctypes.byref(state)) == 0 and state.feature != 0
        except AttributeError:  # a driver from before confidential computing
            return False
