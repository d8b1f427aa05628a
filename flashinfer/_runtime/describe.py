# SPDX-License-Identifier: Apache-2.0
"""Text form of API arguments for the log: layout of tensors (level 3) and their statistics (level 5)."""

from __future__ import annotations

import enum
import math
from typing import Any, Callable, Iterator, Optional

import torch

__all__ = ["describe", "describe_result", "describe_tensor", "skipped_statistics", "tensor_statistics"]

_MAX_TEXT = 200  # characters of one string or number list
_MAX_ITEMS = 16  # entries of one container
_MAX_DEPTH = 5
_CHUNK = 1 << 24  # elements; a float32 copy of a whole KV cache could exhaust the device the log is meant to debug

Statistics = Callable[[torch.Tensor], str]


def describe(label: str, value: Any, statistics: Optional[Statistics] = None) -> list[str]:
    """Return ``label`` on its own line and the value below, indented; ``statistics`` adds a text for every tensor."""
    return [f"  {label}", *_describe("", value, statistics, depth=2)]


def describe_result(value: Any, statistics: Optional[Statistics] = None) -> list[str]:
    """Return the lines below ``Output value:``."""
    return _describe("", value, statistics, depth=1)


def _describe(name: str, value: Any, statistics: Optional[Statistics], depth: int) -> list[str]:
    head = f"{'  ' * depth}{name}"
    if isinstance(value, torch.Tensor):
        return [f"{head}{describe_tensor(value, statistics)}"]
    if isinstance(value, (list, tuple, dict)) and not isinstance(value, torch.Size):
        kind = f"{type(value).__name__} of {len(value)}"
        entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        if all(isinstance(item, (bool, int, float, str, type(None))) for _, item in entries):
            return [f"{head}{kind} {_clip(repr(value))}"]
        if depth >= _MAX_DEPTH:
            return [f"{head}{kind} ..."]
        lines = [f"{head}{kind}"]
        for key, item in entries[:_MAX_ITEMS]:
            lines += _describe(f"[{key!r}]: ", item, statistics, depth + 1)
        return lines if len(entries) <= _MAX_ITEMS else [*lines, f"{'  ' * (depth + 1)}... {len(entries)} in all"]
    return [f"{head}{_describe_scalar(value)}"]


def describe_tensor(tensor: torch.Tensor, statistics: Optional[Statistics] = None) -> str:
    """Shape, stride, dtype, device, requires_grad and contiguity; only ``statistics`` reads values."""
    try:
        layout = _layout(tensor)
    except Exception as error:  # nested tensors have no strides; a subclass may raise anything
        return f"{type(tensor).__name__} that cannot be described ({_reason(error)})"
    return f"Tensor({layout})" if statistics is None else f"Tensor({layout}, {statistics(tensor)})"


def _layout(tensor: torch.Tensor) -> str:
    strided = tensor.layout is torch.strided
    stride = tuple(tensor.stride()) if strided else tensor.layout
    return (
        f"shape={tuple(tensor.shape)}, stride={stride}, dtype={tensor.dtype}, device={tensor.device}, "
        f"requires_grad={tensor.requires_grad}, is_contiguous={strided and tensor.is_contiguous()}"
    )


def _describe_scalar(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name} (value={value.value!r})"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return _clip(repr(value))
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return str(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    # repr() of an unknown object may print the tensors it holds, which synchronises.
    return f"{type(value).__module__}.{type(value).__qualname__} object at {id(value):#x}"


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text)} characters)"


def skipped_statistics(tensor: torch.Tensor) -> str:
    """Replace :func:`tensor_statistics` where reading values is illegal."""
    return "[statistics skipped: CUDA graph capture in progress]"


def tensor_statistics(tensor: torch.Tensor) -> str:
    """``min=, max=, mean=`` of the finite elements, ``nan_count=, inf_count=`` of floating dtypes; never raises.

    The extremes leave NaN and infinities out because the counts already report them, and a single NaN would
    otherwise hide the range of everything else.
    """
    try:
        return _statistics(tensor)
    except Exception as error:
        return f"[statistics unavailable: {_reason(error)}]"


def _reason(error: Exception) -> str:
    return _clip(f"{type(error).__name__}: {error}".splitlines()[0])


@torch.no_grad()
def _statistics(tensor: torch.Tensor) -> str:
    if tensor.numel() == 0:
        return "[empty: no statistics]"
    if tensor.is_complex():
        return "[statistics unavailable: complex]"
    is_float = tensor.is_floating_point()
    low, high, total, finite, nans, infs = math.inf, -math.inf, 0.0, 0, 0, 0
    distinct = _without_repetitions(tensor.detach())
    for part in _chunks(distinct):
        if is_float:
            values = part if part.dtype in (torch.float32, torch.float64) else part.float()
            if not all(math.isfinite(x.item()) for x in values.aminmax()):  # both are NaN where one element is
                nans += int(values.isnan().sum())
                infs += int(values.isinf().sum())
                values = values[values.isfinite()]
        else:
            values = part.to(torch.int64)
        if values.numel():
            lowest, highest = values.aminmax()
            low, high = min(low, lowest.item()), max(high, highest.item())
            total += values.sum(dtype=torch.float64).item()
            finite += values.numel()
    if finite == 0:
        text = "min=nan, max=nan, mean=nan"
    else:
        spread = f"min={low:.6f}, max={high:.6f}" if is_float else f"min={low}, max={high}"
        text = f"{spread}, mean={total / finite:.6f}"
    if is_float:
        text = f"{text}, nan_count={nans}, inf_count={infs}"
    if distinct.numel() < tensor.numel():
        text = f"{text} (each repeated element counted once)"
    return text


def _without_repetitions(tensor: torch.Tensor) -> torch.Tensor:
    """Take one element of each dimension that a view repeats: an expanded number has any number of elements."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split into pieces of at most ``_CHUNK`` elements along the leading dimensions, without copying."""
    if tensor.numel() <= _CHUNK:
        yield tensor
        return
    rows = max(1, _CHUNK // max(1, tensor.numel() // tensor.shape[0]))
    for part in tensor.split(rows):
        yield from _chunks(part if part.numel() <= _CHUNK else part[0])
