# SPDX-License-Identifier: Apache-2.0
"""Probes of memory that a GPU can share; none of them raises."""

from __future__ import annotations

__all__ = ["is_mnnvl_fabric_supported", "is_multicast_supported"]


def _has_attribute(device_idx: int, name: str) -> bool:
    """Return True if the driver reports a device attribute; False without a GPU or the package ``cuda-python``."""
    try:
        from cuda.bindings import driver

        error, device = driver.cuDeviceGet(device_idx)
        if error != driver.CUresult.CUDA_SUCCESS:
            return False
        error, value = driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name), device)
        return bool(error == driver.CUresult.CUDA_SUCCESS and value)
    except (ImportError, AttributeError, RuntimeError):
        return False


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """Return True if memory of the device can be exported with fabric handles."""
    return _has_attribute(device_idx, "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED")


def is_multicast_supported(device_idx: int) -> bool:
    """Return False: this package sets up no memory that is written on several GPUs at once (multicast).

    Engines ask before they create a ``McastGPUBuffer``, which raises here whatever the device can do. One of them has
    no other way once the answer is True, and does not start.
    """
    return False
