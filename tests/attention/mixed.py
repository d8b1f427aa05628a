# SPDX-License-Identifier: Apache-2.0
"""A planned BatchAttention of requests with many and with few queries."""

from __future__ import annotations

from flashinfer import BatchAttention

from .inputs import Batch

QO_LENS, KV_LENS = [1, 17, 40, 0, 3, 9], [9, 33, 97, 12, 130, 4]  # the last request has more rows than keys


def planned(batch: Batch, pages, layout="NHD", **options) -> BatchAttention:
    attention = BatchAttention(layout, device=batch.device)
    dims = (*batch.heads, batch.head_dim_qk, batch.head_dim_vo, pages.page_size)
    types = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
    attention.plan(batch.qo_indptr, pages.indptr, pages.indices, pages.lens, *dims, **types, **options)
    return attention
