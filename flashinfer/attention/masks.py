# SPDX-License-Identifier: Apache-2.0
"""Packing of custom masks into the form that kernels read: one bit per element, each request starts on a byte."""

from __future__ import annotations

from typing import Optional

import numpy as np
import torch

from .._runtime.checks import check_tensors
from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from ..quantization.modules import get_packbits_module
from ..quantization.packbits import packbits

__all__ = ["byte_offsets", "check_items", "check_packed_mask", "pack_batch_mask", "pack_mask"]

_LITTLE = True  # bit order: element n is bit n % 8 of byte n // 8


def pack_mask(op: str, mask: torch.Tensor, qo_len: int, kv_len: int) -> torch.Tensor:
    """Pack the mask of one request into bits."""
    check_tensors(op, custom_mask=mask)
    if mask.numel() != qo_len * kv_len or (mask.ndim == 2 and mask.shape != (qo_len, kv_len)):
        raise ArgumentError(f"{op}: custom_mask must have shape ({qo_len}, {kv_len}), got {tuple(mask.shape)}")
    return packbits(mask.to(torch.bool), bitorder="little")


def check_packed_mask(op: str, packed: torch.Tensor, expected: int) -> None:
    """Check that a packed mask has the ``expected`` bytes, because kernels read that many."""
    check_tensors(op, packed_custom_mask=packed)
    if packed.dtype is not torch.uint8 or packed.numel() < expected:
        raise ArgumentError(
            f"{op}: packed_custom_mask must have {expected} bytes (each request's qo_len * kv_len bits, rounded up), "
            f"got {packed.numel()} elements of {packed.dtype}"
        )


def check_items(
    op: str, prefix_len: torch.Tensor, token_pos: Optional[torch.Tensor], stride: int, kv_lens: np.ndarray
) -> None:
    """Check the arrays of multi-item scoring for size.

    Kernels read a prefix length per request and the position of each token after the prefix inside its item; the
    positions of request ``i`` begin at ``i * stride``. The number of positions is checked only if the prefix lengths
    are in host memory, because reading them from a GPU would wait.
    """
    batch_size = kv_lens.size
    if token_pos is None:
        raise ArgumentError(f"{op}: token_pos_in_items_ptr must be a tensor (prefix_len_ptr is given), got None")
    if prefix_len.numel() < batch_size:
        raise ArgumentError(
            f"{op}: prefix_len_ptr must have {batch_size} elements (requests), got {prefix_len.numel()}"
        )
    begins = np.arange(batch_size, dtype=np.int64) * stride
    items = np.zeros(batch_size, dtype=np.int64)
    if not prefix_len.is_cuda:
        items = np.maximum(kv_lens - prefix_len.reshape(-1).to(torch.int64).numpy()[:batch_size], 0)
    needed = int((begins + items).max(initial=0))
    if token_pos.numel() < needed or stride < 0:
        raise ArgumentError(
            f"{op}: token_pos_in_items_ptr must have at least {needed} elements with token_pos_in_items_len = {stride} "
            f"(a place for each token behind a prefix), got {token_pos.numel()}"
        )


def byte_offsets(qo_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
    """Return the byte offset of each request's packed mask, int32 ``(batch_size + 1,)``."""
    sizes = (qo_lens.astype(np.int64) * kv_lens + 7) // 8
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ArgumentError(f"plan: the custom mask must have less than 2^31 bytes when packed, got {offsets[-1]}")
    return offsets.astype(np.int32)


def pack_batch_mask(
    op: str,
    custom_mask: Optional[torch.Tensor],
    packed_custom_mask: Optional[torch.Tensor],
    qo_lens: np.ndarray,
    kv_lens: np.ndarray,
    device: torch.device,
    non_blocking: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed bits and byte offsets on the device. Sizes come from host arrays, so nothing waits for the GPU."""
    offsets = byte_offsets(qo_lens, kv_lens)
    bytes_indptr = torch.from_numpy(offsets).to(device, non_blocking=non_blocking)
    if packed_custom_mask is not None:
        check_packed_mask(op, packed_custom_mask, int(offsets[-1]))
        is_on_host = device.type == "cpu"  # copy on the host: the caller may overwrite the mask before run()
        packed_custom_mask = packed_custom_mask.to(device, non_blocking=non_blocking, copy=is_on_host)
        return packed_custom_mask.contiguous().view(-1), bytes_indptr
    assert custom_mask is not None
    flat = _as_bool(custom_mask.to(device, non_blocking=non_blocking))
    elements = np.concatenate([[0], np.cumsum(qo_lens.astype(np.int64) * kv_lens)])
    if flat.numel() != elements[-1]:
        raise ArgumentError(
            f"{op}: custom_mask must have {elements[-1]} elements (sum of qo_len * kv_len), got {flat.numel()}"
        )
    packed = flat.new_empty(int(offsets[-1]), dtype=torch.uint8)
    elements_indptr = torch.from_numpy(elements).to(device, non_blocking=non_blocking)
    get_packbits_module(backend_of(flat)).segment_packbits(packed, flat, elements_indptr, bytes_indptr, _LITTLE)
    return packed, bytes_indptr


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    flat = mask.contiguous().view(-1)
    return flat if flat.dtype in (torch.bool, torch.uint8) else flat.to(torch.bool)
