# SPDX-License-Identifier: Apache-2.0
"""Probes for installed transports."""

from __future__ import annotations

import importlib.util

__all__ = ["available_backends", "have_nccl_ep", "have_nixl_ep", "supports_fault_tolerance"]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False


def have_nccl_ep() -> bool:
    """Tell whether the module ``nccl.ep`` can be imported."""
    return _is_installed("nccl.ep")


def have_nixl_ep() -> bool:
    """Tell whether the module ``nixl_ep_cpp`` can be imported."""
    return _is_installed("nixl_ep_cpp")


def available_backends() -> list[str]:
    """Return the names of the transports that are installed."""
    return [name for name, is_here in (("nccl_ep", have_nccl_ep()), ("nixl_ep", have_nixl_ep())) if is_here]


def supports_fault_tolerance(backend: object) -> bool:
    """Tell whether a transport goes on without a rank: none does here. Never raises."""
    return False
