# SPDX-License-Identifier: Apache-2.0
"""Compiled modules of the family, and helpers that its functions share."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.checks import as_int32
from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs
from ..jit.codegen import module_cache
from ..jit.page import gen_page_module, gen_page_nvfp4_module

get_page_module = module_cache(gen_page_module)
get_page_nvfp4_module = module_cache(gen_page_nvfp4_module)

#: True if CUDA calls check the values of their index tensors. Read at import: reading it per call takes 1 us.
VALIDATE = knobs.validate_inputs

PagedCache = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

_IS_HND = {"NHD": False, "HND": True}


def table_as_int32(
    op: str,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Cast the tensors that locate the appended rows in the cache to int32, which kernels read."""
    return as_int32(op, batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr)


def is_hnd(op: str, kv_layout: str) -> bool:
    if not isinstance(kv_layout, str) or kv_layout not in _IS_HND:
        raise KeyError(f"{op}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    return _IS_HND[kv_layout]


def halves(op: str, name: str, cache: PagedCache) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Split a (keys, values) pair; a tensor that holds both is returned whole: the launcher splits it for free."""
    if type(cache) is torch.Tensor or isinstance(cache, torch.Tensor):  # isinstance alone takes 0.2 us
        return cache, None
    if not isinstance(cache, tuple):
        raise KeyError(f"{op}: {name} must be a tensor or a tuple of two, got a {type(cache).__name__}")
    if len(cache) != 2:
        raise ArgumentError(f"{op}: {name} must have 2 tensors (keys and values), got {len(cache)}")
    return cache
