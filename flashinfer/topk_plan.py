# SPDX-License-Identifier: Apache-2.0
"""What every top-k call asks before it calls the module: which module, and how the CUDA kernel is to work."""

from __future__ import annotations

import functools

import torch

from . import utils
from .cache_buffers import _cache_buf, _get_cache_buf
from .jit.codegen import module_cache
from .jit.topk import gen_topk_module
from .knobs import knobs

__all__ = ["get_num_cached_for_topk", "get_topk_module", "plan"]

get_topk_module = module_cache(gen_topk_module)

_SCRATCH_BYTES = 10 * 1024  # shared memory of a block besides its candidates, rounded up
_BLOCKS_PER_ROW = {"filtered": 1, "multi_cta": 8}  # by the value of FLASHINFER_TOPK_ALGO; 0: the kernel chooses


@functools.cache
def get_num_cached_for_topk(device: torch.device, k: int) -> int:
    """How many elements of a row a block keeps in shared memory to find the ``k`` largest of them.

    Two and a half times ``k``, of which a sample lets about one and a half times pass; 0 where there is no memory for
    the latter, and rows are selected in global memory then.
    """
    available = utils.get_shared_bytes_per_block_optin(device) - _SCRATCH_BYTES - 2 * k
    fitting = min(max(5120, 5 * k // 2), available // 8)
    return fitting if 5 * fitting >= 8 * k else 0


def plan(input: torch.Tensor, k: int) -> tuple[int, int]:
    """Elements a block keeps on chip, and blocks per row (0: the kernel chooses)."""
    index = input.get_device()
    if index < 0:
        return 0, 0
    key, capacity = _prepared(index, k)
    if key not in _cache_buf:
        _get_cache_buf(key[0], 1, key[1])
    return capacity, _BLOCKS_PER_ROW.get(knobs.topk_algo, 0)


@functools.cache
def _prepared(index: int, k: int) -> tuple[tuple[str, torch.device], int]:
    """Key of a buffer, and elements kept on chip.

    Serving engines look for this buffer. Our kernels keep their state on chip, so a byte stands for it.
    """
    device = torch.device("cuda", index)
    return (f"radix_topk_row_states_{device}", device), get_num_cached_for_topk(device, k)
