# SPDX-License-Identifier: Apache-2.0
"""The published path of calls of :mod:`flashinfer.trace.apply`, and of the switch that replaces ops."""

from __future__ import annotations

from typing import Optional

import torch

from flashinfer._runtime.probes import probes
from flashinfer.trace.apply.adapt import output_dests as _derive_output_dests
from flashinfer.trace.apply.calls import bind_namespace as bind_namespace
from flashinfer.trace.apply.calls import build_extractor_maps as build_extractor_maps
from flashinfer.trace.apply.calls import extract_axes as extract_axes
from flashinfer.trace.apply.patch import bump_stat as bump_stat
from flashinfer.trace.apply.patch import disable_apply as disable_apply
from flashinfer.trace.apply.patch import disable_apply as reset_loaded
from flashinfer.trace.apply.patch import enable_apply as enable_apply
from flashinfer.trace.apply.patch import is_enabled as is_enabled
from flashinfer.trace.apply.patch import stats as stats_snapshot

__all__ = ["_derive_output_dests", "current_sm", "reset_loaded", "stats_snapshot"]


def current_sm() -> Optional[str]:
    """Return the architecture of the current GPU, such as ``sm90``; None without one."""
    if not torch.cuda.is_available():
        return None
    major, minor = probes.get_compute_capability(torch.device("cuda", torch.cuda.current_device()))
    return f"sm{major}{minor}"
