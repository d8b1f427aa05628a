# SPDX-License-Identifier: Apache-2.0
"""Published helpers about chunks of packed sequences."""

from __future__ import annotations

import torch

from flashinfer.recurrent.gdn_pieces import chunk_bound as chunk_bound_host
from flashinfer.recurrent.gdn_prefill import choose_cp_chunk_len as choose_cp_chunk_len_host
from flashinfer.recurrent.gdn_prefill import should_use_cp as should_use_cp_host

__all__ = [
    "choose_cp_chunk_len_host",
    "chunk_bound_host",
    "is_integer_dtype",
    "should_use_cp_host",
    "workspace_num_chunks_host",
]


def is_integer_dtype(dtype: torch.dtype) -> bool:
    """Return True for the dtypes that offsets may have."""
    return dtype in (torch.int32, torch.int64)


def workspace_num_chunks_host(cu_seqlens: torch.Tensor, chunk_size: int, total_seqlen: int) -> int:
    """Return the slots for chunks of all sequences."""
    return chunk_bound_host(cu_seqlens.shape[0] - 1, total_seqlen, chunk_size)
