# SPDX-License-Identifier: Apache-2.0
"""Fallback of the cuDNN calls to our own kernels, for machines without the cuDNN frontend."""

from __future__ import annotations

from typing import Optional

import numpy as np
import torch

from .._runtime.errors import ArgumentError
from ..attention.block_tables import attend_block_tables, to_output
from ..attention.index_arrays import to_host
from ..prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from ..prefill.ragged import BatchPrefillWithRaggedKVCacheWrapper

__all__ = ["decode", "decode_tokens", "prefill"]


def decode(
    op: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace: torch.Tensor,
    max_sequence_kv: int,
    seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute attention for one row of each request. Does not wait for the GPU."""
    result = attend_block_tables(
        op, q, k_cache, v_cache, block_tables, seq_lens_kv.reshape(-1), max_sequence_kv, _bytes(workspace),
        kv_layout="HND", sm_scale=scale, out=out if out.dtype == q.dtype else None,
    )  # fmt: skip
    to_output(op, result, out, 1.0, "scale")


def decode_tokens(
    op: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace: torch.Tensor,
    seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor,
    q_len_per_req: int,
    window_left: int,
    sinks: Optional[torch.Tensor],
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
) -> None:
    """Compute attention for a few rows of each request, causal. Copies the lengths to the host."""
    (kv_lens,) = (x.reshape(-1) for x in to_host(op, actual_seq_lens_kv=seq_lens_kv))
    if q.shape[0] != kv_lens.size * q_len_per_req:
        raise ArgumentError(
            f"{op}: q must have {kv_lens.size * q_len_per_req} rows ({q_len_per_req} of each request), got {q.shape[0]}"
        )
    page_size = k_cache.shape[2]
    table, last = _table(op, block_tables, kv_lens, page_size)
    rows, pages = _offsets_of(np.full_like(kv_lens, q_len_per_req)), _offsets_of(-(-kv_lens // page_size))
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_bytes(workspace), "HND")
    sizes = (q.shape[1], k_cache.shape[1], q.shape[2], page_size, v_cache.shape[3])
    types = {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype, "o_data_type": out.dtype}
    host = (torch.from_numpy(rows), torch.from_numpy(pages))
    wrapper.plan(*host, table, last, *sizes, causal=True, sm_scale=scale, window_left=window_left, **types)
    wrapper.run(q, (k_cache, v_cache), sinks=sinks, out=out, lse=lse, return_lse=lse is not None)


def prefill(
    op: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace: torch.Tensor,
    seq_lens_q: torch.Tensor,
    seq_lens_kv: torch.Tensor,
    block_tables: Optional[torch.Tensor],
    causal: bool,
    offsets: dict[str, Optional[torch.Tensor]],
    units: str,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    lse_base: str,
) -> None:
    """Compute attention for many rows of each request. Copies the lengths to the host, which waits for the GPU."""
    qo_lens, kv_lens = (
        x.reshape(-1) for x in to_host(op, actual_seq_lens_q=seq_lens_q, actual_seq_lens_kv=seq_lens_kv)
    )
    qo_indptr, kv_indptr = _offsets_of(qo_lens), _offsets_of(kv_lens)
    options = {"causal": causal, "sm_scale": scale, "q_data_type": q.dtype, "o_data_type": out.dtype}
    rows = _rows(op, "q", q, offsets["q"], units, qo_lens)
    queries = q[: int(qo_indptr[-1])] if rows is None else q[rows]
    heads, scores = q.shape[1], None
    if lse is not None:
        scores = q.new_empty((len(queries), heads), dtype=torch.float32)
    forms = {"lse": scores, "lse_base": lse_base} if scores is not None else {}
    if block_tables is not None:
        page_size = k_cache.shape[2]
        table, last = _table(op, block_tables, kv_lens, page_size)
        paged = BatchPrefillWithPagedKVCacheWrapper(_bytes(workspace), "HND")
        sizes = (heads, k_cache.shape[1], q.shape[2], page_size, v_cache.shape[3])
        pages = _offsets_of(-(-kv_lens // page_size))
        paged.plan(
            *map(torch.from_numpy, (qo_indptr, pages)), table, last, *sizes, kv_data_type=k_cache.dtype, **options
        )
        result = paged.run(queries, (k_cache, v_cache), **forms)
    else:
        places = [_rows(op, name, x, offsets[name], units, kv_lens) for name, x in (("k", k_cache), ("v", v_cache))]
        k, v = (x if at is None else x[at] for x, at in zip((k_cache, v_cache), places, strict=True))
        ragged = BatchPrefillWithRaggedKVCacheWrapper(_bytes(workspace))
        dims = (heads, k.shape[1], q.shape[2], v.shape[2])
        ragged.plan(*map(torch.from_numpy, (qo_indptr, kv_indptr)), *dims, kv_data_type=k.dtype, **options)
        result = ragged.run(queries, k, v, **forms)
    targets = _rows(op, "o", out, offsets["o"], units, qo_lens)
    if targets is None:
        out[: len(result)].copy_(result)
    else:
        out[targets] = result
    if lse is not None and scores is not None:
        _store_lse(op, lse, scores, offsets["stats"], units, qo_lens)


def _bytes(workspace: torch.Tensor) -> torch.Tensor:
    return workspace.view(-1).view(torch.uint8)


def _offsets_of(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _rows(
    op: str, name: str, x: torch.Tensor, offsets: Optional[torch.Tensor], units: str, lengths: np.ndarray
) -> Optional[torch.Tensor]:
    """Return the row indices of all requests in ``x``, or None if the requests are contiguous from row 0."""
    if offsets is None:
        return None
    begins = offsets.reshape(-1)[: len(lengths)].cpu().numpy().astype(np.int64)
    if units == "elements":
        if (begins % x.stride(0)).any():
            raise ArgumentError(f"{op}: batch_offsets_{name} must be multiples of {x.stride(0)} (a row), got others")
        begins //= x.stride(0)
    if (begins == _offsets_of(lengths)[:-1]).all():
        return None
    parts = [np.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts)).to(x.device)


def _table(
    op: str, block_tables: torch.Tensor, kv_lens: np.ndarray, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page ids of all requests, concatenated, and the number of keys in the last page of each request."""
    tables = block_tables.reshape(len(kv_lens), -1)
    counts = -(-kv_lens // page_size)
    if counts.max(initial=0) > tables.shape[1]:
        raise ArgumentError(
            f"{op}: block_tables must have {counts.max()} columns for these lengths, got {tables.shape[1]}"
        )
    used = torch.from_numpy(np.arange(tables.shape[1])[None] < counts[:, None]).to(tables.device)
    last = np.where(kv_lens > 0, (kv_lens - 1) % page_size + 1, 0).astype(np.int32)
    return tables[used].to(torch.int32), torch.from_numpy(last)


def _store_lse(
    op: str, lse: torch.Tensor, scores: torch.Tensor, offsets: Optional[torch.Tensor], units: str, qo_lens: np.ndarray
) -> None:
    """Store the LSE into a padded 3-D ``(batch_size, max_token_per_sequence, heads)`` or a ragged 2-D buffer."""
    if lse.ndim == 2:
        rows = _rows(op, "stats", lse, offsets, units, qo_lens)
        if rows is None:
            lse[: len(scores)].copy_(scores)
        else:
            lse[rows] = scores
        return
    for request, part in enumerate(scores.split(qo_lens.tolist())):
        lse[request, : len(part)].copy_(part)
