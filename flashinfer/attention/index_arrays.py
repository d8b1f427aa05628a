# SPDX-License-Identifier: Apache-2.0
"""Transfer and validation of index arrays: to the host for planning, to the device for kernels."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Iterable, Optional, Union

import numpy as np
import torch

from .._runtime.checks import check_integers, narrowed
from .._runtime.errors import ArgumentError
from .streams import made_for_all_streams

__all__ = [
    "as_tensor",
    "as_tensors",
    "check_indices",
    "kv_lens_given",
    "kv_lens_of_pages",
    "last_page_lens",
    "range_buffer",
    "rows_on_host",
    "segment_lens",
    "to_device",
    "to_host",
]

_INT32 = torch.int32


def to_host(op: str, **tensors: Optional[torch.Tensor]) -> list[Any]:
    """Copy tensors to int32 arrays on the host; None stays None.

    The arrays are always copies, because a wrapper may plan again from them after the caller overwrote the tensors. All
    device tensors are transferred in one copy.
    """
    on_device = [t for t in tensors.values() if t is not None and t.is_cuda]
    if len(on_device) > 1:
        for name, t in tensors.items():  # check before torch.cat, which promotes all to one dtype
            if t is not None and t.dtype is not _INT32:
                check_integers(t, f"{op}: {name}")
        together = torch.cat([t.reshape(-1) for t in on_device]).cpu()
        parts = zip(together.split([t.numel() for t in on_device]), on_device, strict=True)
        copies = [part if t.ndim == 1 else part.reshape(t.shape) for part, t in parts]
    else:
        copies = [t.cpu() for t in on_device]
    copies.reverse()
    arrays: list[Optional[np.ndarray]] = []
    for name, t in tensors.items():
        if t is None:
            arrays.append(None)
            continue
        if t.is_cuda:
            t = copies.pop()
        if t.dtype is not _INT32:
            t = narrowed(t, f"{op}: {name}")
        arrays.append(t.numpy().copy())
    return arrays


def as_tensor(x: Any) -> Any:
    """Convert a numpy array to a tensor for a native function; return anything else unchanged."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def as_tensors(args: Iterable[Any]) -> list[Any]:
    return [as_tensor(x) for x in args]


@functools.lru_cache(maxsize=64)
def rows_on_host(batch_size: int, rows: int) -> torch.Tensor:
    """Return ``[0, rows, 2 * rows, ...]`` with ``batch_size + 1`` elements. The result is cached and read-only."""
    return torch.arange(batch_size + 1, dtype=_INT32, device="cpu") * rows


def to_device(owner: str, name: str, x: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    """Convert a tensor to contiguous int32 on the device. ``name`` is the argument of the owner's ``plan``, for errors.

    A GPU tensor that is already contiguous int32 is returned itself, because a copy would be a launch. A CPU tensor is
    always copied.
    """
    if device.type == "cpu":
        if x.dtype is not _INT32:
            x = narrowed(x, f"{owner}.plan: {name}")
        return x.to(device, copy=True, memory_format=torch.contiguous_format)
    if x.dtype is not _INT32 or x.device != device:
        x = narrowed(x, f"{owner}.plan: {name}").to(device=device, non_blocking=non_blocking)
    return x.contiguous()


def segment_lens(op: str, name: str, indptr: np.ndarray) -> np.ndarray:
    """Return segment lengths from offsets, and check that the offsets are non-decreasing."""
    if indptr.ndim != 1 or indptr.size == 0:
        raise ArgumentError(f"{op}: {name} must have shape (batch_size + 1,), got {indptr.shape}")
    lens = indptr[1:] - indptr[:-1]
    if lens.size and lens.min() < 0:
        raise ArgumentError(f"{op}: {name} must not decrease, got offsets that do")
    return lens


def kv_lens_of_pages(op: str, name: str, indptr: np.ndarray, last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """Count the keys of each request: full pages plus the last page. A request without pages has 0 keys."""
    if not 0 < page_size < 2**31:
        raise ArgumentError(f"{op}: page_size must be a positive number of 32 bits, got {page_size}")
    pages = segment_lens(op, name, indptr)
    if last_page_len.shape != pages.shape:
        last = name.replace("indptr", "last_page_len")
        raise ArgumentError(f"{op}: {last} must have shape {pages.shape} (batch size), got {last_page_len.shape}")
    return np.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).astype(np.int32)


def kv_lens_given(op: str, seq_lens: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Return the caller's key counts, after a check that each request with keys has pages.

    The native plan validates only requests with pages; a request without pages would count as one with ragged keys.
    """
    lens = seq_lens.reshape(-1)
    if lens.shape != pages.shape:
        raise ArgumentError(f"{op}: seq_lens must have {pages.size} elements (batch size), got {lens.size}")
    homeless = np.flatnonzero((lens > 0) & (pages == 0))
    if homeless.size:
        raise ArgumentError(f"{op}: seq_lens[{homeless[0]}] must be 0 (it has no pages), got {lens[homeless[0]]}")
    return lens


def last_page_lens(kv_lens: np.ndarray, indptr: np.ndarray, page_size: int) -> torch.Tensor:
    """Return the keys in the last page of each request; below 1 if the request has more pages than its keys need."""
    full_pages = np.maximum(indptr[1:] - indptr[:-1] - 1, 0)
    return torch.from_numpy((kv_lens - full_pages * page_size).astype(np.int32))


_int32_at = ctypes.c_int32.from_address


def _last(indptr: torch.Tensor) -> int:
    """Return the last element of a contiguous int32 tensor on the host, 0.7 us faster than with ``numpy()``."""
    return _int32_at(indptr.data_ptr() + 4 * (indptr.numel() - 1)).value


def check_indices(op: str, name: str, num_indices: int, indptr: Union[np.ndarray, torch.Tensor]) -> None:
    """Check that there are at least as many page ids as the last offset, because kernels read that many."""
    last = indptr[-1] if isinstance(indptr, np.ndarray) else _last(indptr)
    if num_indices < last:
        raise ArgumentError(f"{op}: {name} must have at least {last} elements (the last offset), got {num_indices}")


_ranges: dict[torch.device, list[torch.Tensor]] = {}  # none is ever freed: any stream may still read a shorter one


_views: dict[tuple[int, torch.device], torch.Tensor] = {}  # slices of the above: slicing a tensor takes 2 us
_MOST_VIEWS = 256


def range_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Return int32 ``[0, 1, ..., size - 1]``, a view of a tensor that all calls share. Any stream may read it.

    A tensor that a captured stream makes is not shared: it has no values before the graph is replayed.
    """
    view = _views.get((size, device))
    if view is not None:
        return view
    known = _ranges.setdefault(device, [])
    if known and known[-1].numel() >= size:
        if len(_views) >= _MOST_VIEWS:
            _views.clear()
        view = _views[size, device] = known[-1][:size]
        return view
    length = max(size, 1024, 2 * known[-1].numel() if known else 0)
    made, is_ready = made_for_all_streams(lambda: torch.arange(length, dtype=_INT32, device=device), device)
    if is_ready:
        known.append(made)
    return made[:size]
