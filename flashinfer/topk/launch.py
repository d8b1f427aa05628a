# SPDX-License-Identifier: Apache-2.0
"""Module and launch parameters of a top-k call: elements kept in shared memory and blocks per row."""

from __future__ import annotations

import functools

import torch

from .._runtime.cache_buffers import _cache_buf, _get_cache_buf
from .._runtime.knobs import knobs
from .._runtime.probes import probes
from ..jit.codegen import module_cache
from ..jit.topk import gen_topk_module

__all__ = ["get_num_cached_for_topk", "get_topk_module", "plan"]

get_topk_module = module_cache(gen_topk_module)

_SCRATCH_BYTES = 10 * 1024  # shared memory of a block besides its candidates, rounded up
_BLOCKS_PER_ROW = {"filtered": 1, "multi_cta": 8}  # keys are values of FLASHINFER_TOPK_ALGO; 0: the kernel chooses


@functools.cache
def get_num_cached_for_topk(device: torch.device, k: int) -> int:
    """Return the number of elements of a row that a block keeps in shared memory to find the ``k`` largest.

    The number is 2.5 * ``k``, at least 5120: a threshold estimated from a sample lets about 1.5 * ``k`` elements pass.
    If shared memory cannot hold 1.6 * ``k`` elements, the number is 0 and rows are selected in global memory.
    """
    available = probes.get_shared_bytes_per_block_optin(device) - _SCRATCH_BYTES - 2 * k
    fitting = min(max(5120, 5 * k // 2), available // 8)
    return fitting if 5 * fitting >= 8 * k else 0


def plan(input: torch.Tensor, k: int) -> tuple[int, int]:
    """Return the elements that a block keeps in shared memory, and the blocks per row (0: the kernel chooses)."""
    blocks_per_row = _BLOCKS_PER_ROW.get(knobs.topk_algo, 0)  # on the CPU too: an unknown name is an error there
    index = input.get_device()
    if index < 0:
        return 0, 0
    key, capacity = _prepared(index, k)
    if key not in _cache_buf:
        _get_cache_buf(key[0], 1, key[1])
    return capacity, blocks_per_row


@functools.cache
def _prepared(index: int, k: int) -> tuple[tuple[str, torch.device], int]:
    """Return the key of the state buffer, and the number of elements kept in shared memory.

    Serving engines look for this buffer. Our kernels keep their state in shared memory, so the buffer has one byte.
    """
    device = torch.device("cuda", index)
    return (f"radix_topk_row_states_{device}", device), get_num_cached_for_topk(device, k)
