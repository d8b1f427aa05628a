# SPDX-License-Identifier: Apache-2.0
"""Validation of the global scales of NVFP4 appends: numbers, tensors on other devices, tensors the kernel reads."""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._runtime.errors import ArgumentError

__all__ = ["Scale", "check_number", "check_tensor", "resolve_scales"]

Scale = Union[float, torch.Tensor]

_SMALLEST, _LARGEST = 2.0**-149, (2.0 - 2.0**-23) * 2.0**127  # positive range of float32, the kernel's type

#: Version counters of GPU tensors whose value was read and is valid. Reading a value waits for the GPU.
_accepted: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_number(op: str, name: str, scale: float) -> float:
    """Return the number; raise unless it is a positive finite float32."""
    if not _SMALLEST <= scale <= _LARGEST:
        raise ArgumentError(f"{op}: {name} must be a positive finite global decode scale (float32), got {scale}")
    return scale


def check_tensor(op: str, name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise unless it has one element of float32."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ArgumentError(
            f"{op}: {name} must have one element of torch.float32, got {tuple(scale.shape)} {scale.dtype}"
        )
    return scale


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check_captured(op: str, scales: dict[str, Scale], device: torch.device) -> None:
    """Validate scales during a capture: a graph freezes numbers and cannot wait for the GPU, so tensors are needed."""
    for name, scale in scales.items():
        if not isinstance(scale, torch.Tensor):
            given = f"{scale}"
        elif scale.device != device:
            given = f"a tensor on {scale.device}"
        elif not scale.is_contiguous():
            given = "not contiguous"
        else:
            continue
        raise ArgumentError(
            f"{op}: {name} must be a contiguous float32 tensor on {device} (CUDA graph capture), got {given}"
        )


def _version(scale: torch.Tensor) -> Optional[int]:
    return None if scale.is_inference() else scale._version  # inference tensors do not count writes


def _check_values(op: str, scales: dict[str, torch.Tensor]) -> None:
    versions = {name: _version(scale) for name, scale in scales.items()}  # before the values are read
    unknown = [name for name, seen in versions.items() if seen is None or _accepted.get(scales[name]) != seen]
    if not unknown:
        return
    values = torch.stack([scales[name].detach().reshape(()) for name in unknown]).tolist()
    for name, value in zip(unknown, values, strict=True):
        check_number(op, name, value)
        if versions[name] is not None:
            _accepted[scales[name]] = versions[name]


def resolve_scales(
    op: str, scales: dict[str, Scale], device: torch.device
) -> list[tuple[float, Optional[torch.Tensor]]]:
    """Return each scale as a number, or as a tensor on ``device``, which the kernel reads; a bad value is refused.

    While the current stream of ``device`` is captured, the values of tensors are known at replay only: the kernel then
    ends the launch on a bad value. A launcher on the CPU validates tensors itself.
    """
    if _is_capturing(device):
        _check_captured(op, scales, device)
    elif device.type == "cuda":
        _check_values(op, {n: s for n, s in scales.items() if isinstance(s, torch.Tensor) and s.device == device})
    return [
        (1.0, scale)
        if isinstance(scale, torch.Tensor) and scale.device == device
        else (check_number(op, name, float(scale)), None)
        for name, scale in scales.items()
    ]
