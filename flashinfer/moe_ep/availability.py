# SPDX-License-Identifier: Apache-2.0
"""Probes for installed transports."""

from __future__ import annotations

import importlib.util
import warnings

from .._runtime.knobs import knobs

__all__ = ["available_backends", "have_nccl_ep", "have_nixl_ep", "supports_fault_tolerance", "warn_about_builds"]


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


def warn_about_builds() -> None:
    """Warn if variables ask for transports and none is installed."""
    flags = {
        "BUILD_NVEP": knobs.build_nvep,
        "BUILD_NCCL_EP": knobs.build_nccl_ep,
        "BUILD_NIXL_EP": knobs.build_nixl_ep,
    }
    asked = [name for name, is_set in flags.items() if is_set]
    if asked and not available_backends():
        warnings.warn(
            f"flashinfer.moe_ep: {', '.join(asked)} is set, but no transport is installed", RuntimeWarning, stacklevel=2
        )
