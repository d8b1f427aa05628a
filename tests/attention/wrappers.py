# SPDX-License-Identifier: Apache-2.0
"""Planned wrappers of batch decode and prefill, and the comparison of their results."""

from __future__ import annotations

import torch

from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

from .inputs import Batch, Pages

F16 = torch.float16
LENS = [1, 54, 97, 130]


def workspace(device: str, size: int = 32 << 20) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def decode_batch(device: str, q_len: int = 1, kv_lens: list[int] | None = None, **options) -> Batch:
    kv_lens = LENS if kv_lens is None else kv_lens
    return Batch([q_len] * len(kv_lens), kv_lens, device=device, **options)


def planned(batch: Batch, pages: Pages, layout: str = "NHD", tensor_cores: bool = False, **options):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(batch.device), layout, use_tensor_cores=tensor_cores)
    wrapper.plan(*pages.table, *batch.heads, batch.head_dim_qk, pages.page_size, **options)
    return wrapper


def close(got, expected, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(got[0].float(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], expected[1], rtol=tolerance, atol=tolerance)


def paged(
    batch: Batch, pages: Pages, layout: str = "NHD", backend: str = "auto", **options
) -> BatchPrefillWithPagedKVCacheWrapper:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(batch.device), layout, backend=backend)
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, batch.head_dim_qk, pages.page_size, **options)
    return wrapper


def ragged(batch: Batch, layout: str = "NHD", backend: str = "auto", **options) -> BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(batch.device), layout, backend=backend)
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, batch.head_dim_qk, **options)
    return wrapper
