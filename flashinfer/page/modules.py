# SPDX-License-Identifier: Apache-2.0
"""The compiled modules of the family, and what its functions share on the Python side."""

from __future__ import annotations

from typing import Optional, Union

import torch

from ..errors import ArgumentError
from ..jit.codegen import module_cache
from ..jit.page import gen_page_module, gen_page_nvfp4_module
from ..knobs import knobs
from ..tensor_checks import as_int32

get_page_module = module_cache(gen_page_module)
get_page_nvfp4_module = module_cache(gen_page_nvfp4_module)

#: Whether CUDA calls check the values of their index tensors. Read at import: to ask at each call takes a microsecond.
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
    """What says where rows go, as kernels read it."""
    return as_int32(op, batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr)


def is_hnd(op: str, kv_layout: str) -> bool:
    if not isinstance(kv_layout, str) or kv_layout not in _IS_HND:
        raise KeyError(f"{op}: kv_layout is {kv_layout!r}, expected 'NHD' or 'HND'")
    return _IS_HND[kv_layout]


def halves(op: str, name: str, cache: PagedCache) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Keys and values of a pair; a cache that holds both comes back whole: the launcher splits it for free."""
    if type(cache) is torch.Tensor or isinstance(cache, torch.Tensor):  # isinstance alone takes 0.2 us
        return cache, None
    if not isinstance(cache, tuple):
        raise KeyError(f"{op}: {name} is a {type(cache).__name__}, expected a tensor or a tuple of two")
    if len(cache) != 2:
        raise ArgumentError(f"{op}: {name} has {len(cache)} tensors, expected 2 (keys and values)")
    return cache
