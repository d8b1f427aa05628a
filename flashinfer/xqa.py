# SPDX-License-Identifier: Apache-2.0
"""Decoding over page tables with the interface of XQA, served by our own decoding kernels."""

from __future__ import annotations

import functools
import math
from typing import Any, Optional, Union

import torch

from ._compat.unsupported_attention import XQA_NAMES
from ._runtime.errors import ArgumentError
from ._runtime.explain_error import explain_type_errors
from .api_logging import flashinfer_api
from .attention.block_tables import as_int32, as_rows, attend_block_tables, draft_rows, to_output
from .attention.index_arrays import segment_lens, to_host
from .attention.options import layout_code
from .trace.templates.xqa import xqa_dispatch

__all__ = ["xqa"]

get_xqa_module_mla, xqa_mla = XQA_NAMES["get_xqa_module_mla"], XQA_NAMES["xqa_mla"]

_PAGE_SIZES = (16, 32, 64, 128)
Factor = Union[float, torch.Tensor]


def _check_sizes(
    q: torch.Tensor, k_cache: torch.Tensor, kv_layout: str, page_size: int, num_kv_heads: int, q_seq_len: int
) -> None:
    head_dim, group = q.shape[-1], q.shape[-2] // max(num_kv_heads, 1)
    if page_size not in _PAGE_SIZES:
        raise ArgumentError(f"xqa: page_size must be one of {_PAGE_SIZES}, got {page_size}")
    if head_dim % 16 or not 16 <= head_dim <= 512:
        raise ArgumentError(f"xqa: head_dim must be a multiple of 16 from 16 to 512, got {head_dim}")
    if head_dim > 256 and (q_seq_len > 1 or group > 16):
        raise ArgumentError(
            "xqa: head_dim must be at most 256 for several tokens or more than 16 query heads per KV head, got "
            f"{head_dim} with {q_seq_len} tokens and {group} query heads per KV head"
        )
    if q.shape[-2] % max(num_kv_heads, 1):
        raise ArgumentError(f"xqa: q must have a multiple of num_kv_heads = {num_kv_heads} heads, got {q.shape[-2]}")
    if k_cache.dtype == torch.uint8:
        raise ArgumentError("xqa: k_cache must have 16 bits or FP8 (NVFP4 needs SM12x), got dtype uint8")
    page = (page_size, num_kv_heads) if layout_code("xqa", kv_layout) == 0 else (num_kv_heads, page_size)
    if k_cache.ndim != 4 or k_cache.shape[1:3] != page:
        raise ArgumentError(
            f"xqa: k_cache must have {kv_layout} pages of {page_size} tokens by {num_kv_heads} heads (page_size "
            f"and num_kv_heads), got shape {tuple(k_cache.shape)}"
        )


@flashinfer_api(trace=xqa_dispatch)
@explain_type_errors
def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Optional[torch.Tensor] = None,
    q_scale: Factor = 1.0,
    kv_scale: Factor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: Optional[int] = None,
    enable_pdl: Optional[bool] = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Optional[torch.Tensor] = None,
    *,
    q_cu_seq_lens: Optional[torch.Tensor] = None,
    k_sf_cache: Optional[torch.Tensor] = None,
    v_sf_cache: Optional[torch.Tensor] = None,
) -> None:
    r"""Attention of the last token, or of draft tokens, of each request over a paged cache; written to ``output``.

    ``logit = q . k * q_scale * kv_scale / sqrt(head_dim)`` and ``output = softmax(logit) v * kv_scale *
    rcp_out_scale``.

    The call plans nothing after its first use with the same sizes, waits for nothing and can be captured in a CUDA
    graph; only requests with different numbers of draft tokens (``q_cu_seq_lens``) need those numbers on the host.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch_size, 1, num_qo_heads, head_dim)``; with drafts ``(batch_size, 1, q_seq_len, num_qo_heads, head_dim)``,
        or ``(total, num_qo_heads, head_dim)`` with ``q_cu_seq_lens``. float16 or bfloat16.
    k_cache, v_cache : torch.Tensor
        ``(num_pages, page_size, num_kv_heads, head_dim)``, or ``(num_pages, num_kv_heads, page_size, head_dim)`` for
        HND. dtype of ``q`` or float8_e4m3fn.
    page_table : torch.Tensor
        ``(batch_size, max_pages)`` int32.
    seq_lens : torch.Tensor
        ``(batch_size, 1)`` uint32 or int32: keys of each request, draft tokens included.
    output : torch.Tensor
        Shape of ``q``; its dtype, or float8_e4m3fn for an FP8 cache.
    workspace_buffer : torch.Tensor
        Scratch.
    semaphores : torch.Tensor
        Not used: partial results are merged by a second kernel. Left as it is.
    num_kv_heads, page_size : int
        Sizes of the cache; pages of 16, 32, 64 or 128 tokens.
    sinks : Optional[torch.Tensor]
        ``(num_kv_heads, group)`` float32 logits that add to the denominator of the softmax.
    q_scale, kv_scale : Union[float, torch.Tensor]
        Numbers, or tensors of one element.
    sliding_win_size : int
        How many keys a token sees, itself included; 0 for all.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    sm_count : Optional[int]
        Ignored.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None enables it where the device supports it.
    rcp_out_scale : float
        Multiplies the output.
    q_seq_len : int
        Draft tokens of each request, at most that many with ``q_cu_seq_lens``.
    mask : Optional[torch.Tensor]
        With drafts: ``(batch_size, q_seq_len, 2 * ceil(q_seq_len / 32))`` uint16 (``(total, ...)`` with
        ``q_cu_seq_lens``): bit ``j`` of a token's row says whether it sees draft token ``j``.
    q_cu_seq_lens : Optional[torch.Tensor]
        ``(batch_size + 1,)``: where the draft tokens of each request begin.
    k_sf_cache, v_sf_cache : Optional[torch.Tensor]
        Scale factors of an NVFP4 cache, which needs SM12x.
    """
    _check_sizes(q, k_cache, kv_layout, page_size, num_kv_heads, q_seq_len)
    if q_seq_len > 1 and mask is None:
        raise ArgumentError(f"xqa: mask must be a tensor ({q_seq_len} draft tokens), got None")
    if output.dtype == torch.float8_e4m3fn and k_cache.dtype != torch.float8_e4m3fn:
        raise ArgumentError(f"xqa: output must be {q.dtype} (the cache is {k_cache.dtype}), got {output.dtype}")
    rows = q.reshape(-1, *q.shape[-2:])
    if output.numel() != q.numel():
        raise ArgumentError(f"xqa: output must have shape {tuple(q.shape)} (that of q), got {tuple(output.shape)}")
    flat = as_rows("xqa", "output", output, q.shape[-2:])
    common: dict[str, Any] = {
        "kv_layout": kv_layout,
        "sm_scale": 1.0 / math.sqrt(q.shape[-1]),
        "q_scale": q_scale,
        "k_scale": kv_scale,
        "window_left": sliding_win_size - 1,
        "sinks": sinks,
        "enable_pdl": enable_pdl,
    }
    max_seq_len = page_table.shape[1] * page_size
    if q_cu_seq_lens is not None:
        result = _ragged_drafts(rows, k_cache, v_cache, page_table, seq_lens, max_seq_len, workspace_buffer,
                                q_cu_seq_lens, q_seq_len, mask, common)  # fmt: skip
    else:
        target = flat if flat.dtype == q.dtype else None
        drafts = draft_rows("xqa", mask, rows.shape[0], q_seq_len) if mask is not None and q_seq_len > 1 else None
        result = attend_block_tables(
            "xqa", rows, k_cache, v_cache, page_table, seq_lens, max_seq_len, workspace_buffer,
            q_len=q_seq_len, draft_mask=drafts, out=target, **common,
        )  # fmt: skip
    to_output("xqa", result, flat, kv_scale * rcp_out_scale, "kv_scale")


def _ragged_drafts(
    rows: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    workspace: torch.Tensor,
    q_cu_seq_lens: torch.Tensor,
    q_seq_len: int,
    mask: Optional[torch.Tensor],
    common: dict[str, Any],
) -> torch.Tensor:
    """Compute attention of requests with different numbers of draft tokens: one launch per distinct number.

    The launches depend on the numbers of draft tokens, so these are copied to the host, which waits for the GPU.
    """
    (offsets,) = to_host("xqa", q_cu_seq_lens=q_cu_seq_lens)
    if mask is None:
        raise ArgumentError("xqa: mask must be a tensor (q_cu_seq_lens is given), got None")
    counts = segment_lens("xqa", "q_cu_seq_lens", offsets)
    if counts.size != page_table.shape[0] or offsets[0] != 0 or offsets[-1] != rows.shape[0]:
        raise ArgumentError(
            f"xqa: q_cu_seq_lens must have {page_table.shape[0] + 1} offsets from 0 to {rows.shape[0]} (requests and "
            f"tokens of q), got {offsets.size} from {offsets[0]} to {offsets[-1]}"
        )
    if counts.max(initial=0) > q_seq_len:
        raise ArgumentError(
            f"xqa: a request must have at most q_seq_len = {q_seq_len} draft tokens, got {counts.max()}"
        )
    mask = draft_rows("xqa", mask, rows.shape[0], q_seq_len)
    result = torch.empty_like(rows)
    for count in sorted(set(counts.tolist()) - {0}):
        requests = torch.from_numpy((counts == count).nonzero()[0]).to(rows.device)
        begins = torch.from_numpy(offsets[:-1][counts == count].astype("int64")).to(rows.device)
        at = (begins[:, None] + torch.arange(count, device=rows.device)).reshape(-1)
        drafts = mask.view(torch.int16)[at].view(torch.uint16)
        result[at] = attend_block_tables(
            "xqa", rows[at], k_cache, v_cache, page_table[requests], as_int32(seq_lens)[requests],
            max_seq_len, workspace, q_len=count, draft_mask=drafts if count > 1 else None, **common,
        )  # fmt: skip
    return result


@functools.cache
def get_xqa_module(
    input_dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    head_group_ratio: int,
    use_sliding_window: bool,
    output_dtype: torch.dtype,
    q_seq_len: int,
    use_ragged_q: bool = False,
) -> Any:
    """Return the module that serves ``xqa``: the batch decode module, for every page size, group size and window."""
    from .attention.modules import get_batch_decode_module

    dtypes = (input_dtype, kv_cache_dtype, input_dtype, torch.int32)
    return get_batch_decode_module(*dtypes, head_dim, head_dim, 0, use_sliding_window, False)
