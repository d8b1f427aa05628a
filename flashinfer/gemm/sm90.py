# SPDX-License-Identifier: Apache-2.0
"""The kernels for SM90 and the calls they take."""

from __future__ import annotations

from typing import Callable, Optional

import torch

from ..jit.gemm import get_gemm_sm90_module

__all__ = ["Sm90Devices", "Sm90Functions", "sm90_serves"]

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_OUT = frozenset({torch.bfloat16, torch.float16, torch.float32})
_BLOCKS = frozenset({(1, 128, 128), (1, 1, 128)})


class Sm90Devices(dict[int, bool]):
    """Whether a CUDA device, by its index, has capability 9.0; asked once per device."""

    def __missing__(self, index: int) -> bool:
        self[index] = torch.cuda.get_device_capability(index) == (9, 0)
        return self[index]


class Sm90Functions(dict[str, Callable[..., None]]):
    """``gemm_sm90`` of the module of each kind, loaded on first use."""

    def __missing__(self, kind: str) -> Callable[..., None]:
        self[kind] = get_gemm_sm90_module(kind).gemm_sm90
        return self[kind]


def _takes_bulk_copies(x: torch.Tensor) -> bool:
    """Return True if rows are contiguous and everything is aligned to 16 bytes, as bulk tensor copies demand."""
    *leading, last = x.stride()
    if last != 1 and x.size(-1) != 1:
        return False
    address, size = x.data_ptr(), x.element_size()
    for dim, stride in enumerate(leading):
        if x.size(dim) != 1:
            address |= stride * size or 1
    return address & 15 == 0


def _is_block_scale(scale: Optional[torch.Tensor], x: torch.Tensor) -> bool:
    """Return True unless a scale is the whole tensor's: one element that is not the only block of ``x``."""
    if scale is None:
        return False
    return scale.numel() != 1 or (scale.dim() == x.dim() and x.size(-2) == 1 and x.size(-1) <= 128)


def sm90_serves(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Optional[torch.Tensor],
    b_scale: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    granularity: tuple[int, int, int],
    alpha: float,
    beta: float,
) -> Optional[str]:
    """Return the kind of SM90 module that takes these arguments of ``product``, or None. Devices are not looked at."""
    dtype = a.dtype
    if b.dtype is not dtype or (dtype is not _BF16 and dtype is not _E4M3) or alpha != 1.0 or beta != 0.0:
        return None
    k = a.shape[-1]
    if out.dtype not in _OUT or (bias is not None and bias.dtype is not _BF16) or k == 0:
        return None
    kind = "bf16" if dtype is _BF16 else "fp8"
    if not ((a_scale is None or a_scale.numel() == 1) and (b_scale is None or b_scale.numel() == 1)):
        if dtype is _BF16 or granularity not in _BLOCKS:
            return None
        if not (_is_block_scale(a_scale, a) and _is_block_scale(b_scale, b)):
            return None
        kind = "fp8_block"
    if kind != "bf16" and out.dtype is torch.float32:
        return None  # tensor cores keep 13 bits of sums of 8-bit products; the general kernel sums in fp32
    if a.is_contiguous() and b.is_contiguous() and out.is_contiguous():  # 2 us less than to look at all strides
        pitches = a.element_size() * k | out.element_size() * out.shape[-1]
        if (pitches | a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15 == 0:
            return kind
    return kind if _takes_bulk_copies(a) and _takes_bulk_copies(b) and _takes_bulk_copies(out) else None
