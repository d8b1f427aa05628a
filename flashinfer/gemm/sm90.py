# SPDX-License-Identifier: Apache-2.0
"""The kernels for SM90: which calls they take, and the workspace of their split sums."""

from __future__ import annotations

import ctypes
import sys
from typing import Callable, Optional

import torch

from ..jit.gemm import get_gemm_sm90_module

__all__ = ["Sm90Devices", "Sm90Functions", "sm90_serves", "workspace_of"]

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_OUT = frozenset({torch.bfloat16, torch.float16, torch.float32})
_BLOCKS = frozenset({(1, 128, 128), (1, 1, 128)})
_COUNTER_BYTES = 4096  # SPLIT_COUNTER_BYTES of include/flashinfer/gemm/entries_sm90.h


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
    if a.is_contiguous() and b.is_contiguous() and out.is_contiguous():  # 2 us less than to look at all strides
        pitches = a.element_size() * k | out.element_size() * out.shape[-1]
        if (pitches | a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15 == 0:
            return kind
    return kind if _takes_bulk_copies(a) and _takes_bulk_copies(b) and _takes_bulk_copies(out) else None


# Split sums count finished blocks in a workspace. Its counters are zero before the first launch and each launch leaves
# zeros, so launches that follow one another share a workspace, and those that may run at the same time must not.

#: Workspaces by kind, device and stream.
_eager: dict[tuple[str, int, int], torch.Tensor] = {}
#: Number and workspace of the last capture, by the same key. The memory belongs to the pool of the graph, which sets
#: the counters to zero once per replay.
_captured: dict[tuple[str, int, int], tuple[int, torch.Tensor]] = {}


def _allocate(kind: str, index: int) -> torch.Tensor:
    blocks = torch.cuda.get_device_properties(index).multi_processor_count
    size = get_gemm_sm90_module(kind).gemm_sm90_workspace_bytes(blocks)
    memory = torch.empty(max(size, _COUNTER_BYTES), dtype=torch.uint8, device=torch.device("cuda", index))
    memory[:_COUNTER_BYTES].zero_()
    return memory


def _capture_number(stream: int) -> int:
    """Return the number that the driver gave to the capture of a stream. (torch does not tell it.)"""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuStreamGetCaptureInfo(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    if error != 0:
        raise RuntimeError(f"gemm: cuStreamGetCaptureInfo failed with error {error}")
    return number.value


def _is_capturing(index: int) -> bool:
    if torch.cuda.current_device() == index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def _of_capture(key: tuple[str, int, int]) -> torch.Tensor:
    kind, index, stream = key
    if "torch._inductor.cudagraph_trees" in sys.modules:
        return _allocate(kind, index)  # its recordings fail if memory of the pool is still referenced at the end
    number = _capture_number(stream)
    found = _captured.get(key)
    if found is None or found[0] != number:
        found = _captured[key] = number, _allocate(kind, index)
    return found[1]


def workspace_of(kind: str, index: int) -> torch.Tensor:
    """Return the workspace of the current stream of a device, or of the capture that the stream is in."""
    key = (kind, index, torch._C._cuda_getCurrentRawStream(index))
    if _is_capturing(index):
        return _of_capture(key)
    memory = _eager.get(key)
    if memory is None:
        memory = _eager[key] = _allocate(kind, index)
    return memory
