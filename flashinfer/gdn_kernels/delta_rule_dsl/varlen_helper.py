# SPDX-License-Identifier: Apache-2.0
"""Published helpers about chunks of packed sequences."""

from __future__ import annotations

import torch

from flashinfer.recurrent.gdn_pieces import chunk_bound as chunk_bound_host

__all__ = ["chunk_bound_host", "is_integer_dtype", "workspace_num_chunks_host"]


def is_integer_dtype(dtype: torch.dtype) -> bool:
    """Return True for the dtypes that offsets may have."""
    return dtype in (torch.int32, torch.int64)


def workspace_num_chunks_host(cu_seqlens_cpu: torch.Tensor, chunk: int, total: int) -> int:
    """Return the slots for chunks of all sequences."""
    return chunk_bound_host(cu_seqlens_cpu.shape[0] - 1, total, chunk)
