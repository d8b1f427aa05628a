# SPDX-License-Identifier: Apache-2.0
"""Prefill by cuDNN with ragged queries, over a paged cache or ragged keys."""

from __future__ import annotations

import importlib.util
import math
from typing import Optional

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..attention.outputs import check_lse_form
from ..trace.templates.cudnn import cudnn_batch_prefill_dispatch
from .graph import Operand, has_frontend, run_sdpa

__all__ = ["CUDNN_AVAILABLE", "cudnn_batch_prefill_with_kv_cache"]

CUDNN_AVAILABLE = importlib.util.find_spec("cudnn") is not None
_OP = "cudnn_batch_prefill_with_kv_cache"


def _cudnn_supports_direct_seqlens(dtype: torch.dtype, mixed: bool = False) -> bool:
    """Return False: graphs here find the rows of a request by offsets, never by lengths alone."""
    return False


def _padded(x: torch.Tensor, batch_size: int, length: int) -> Operand:
    """Describe a ragged ``(tokens, heads, head_dim)`` tensor as requests of ``length`` rows that start at offsets."""
    token, head, _ = x.stride()
    dims = (batch_size, x.shape[1], length, x.shape[2])
    return Operand(dims, (token * length, head, token, 1), x.dtype)


def _offsets(given: Optional[torch.Tensor], lengths: torch.Tensor, row: int, units: str) -> torch.Tensor:
    """Return ``(batch_size + 1, 1, 1, 1)`` offsets in elements, from the caller's offsets or from the lengths."""
    if given is None:
        ends = torch.cumsum(lengths.view(-1), 0, dtype=torch.int64)
        given = torch.cat([ends.new_zeros(1), ends]) * row
    elif units == "tokens":
        given = given.to(torch.int64) * row
    return given.reshape(-1, 1, 1, 1)


@flashinfer_api(trace=cudnn_batch_prefill_dispatch)
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Optional[torch.Tensor] = None,
    actual_seq_lens_kv: Optional[torch.Tensor] = None,
    block_tables: Optional[torch.Tensor] = None,
    causal: bool,
    return_lse: bool,
    q_scale: Optional[torch.Tensor] = None,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    batch_offsets_q: Optional[torch.Tensor] = None,
    batch_offsets_o: Optional[torch.Tensor] = None,
    batch_offsets_k: Optional[torch.Tensor] = None,
    batch_offsets_v: Optional[torch.Tensor] = None,
    batch_offsets_stats: Optional[torch.Tensor] = None,
    batch_offsets_units: str = "elements",
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    is_cuda_graph_compatible: bool = False,
    backend: Optional[str] = None,
    o_data_type: Optional[torch.dtype] = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    r"""Attention of many tokens per request by cuDNN, or by our own kernels where its frontend is not installed.

    Ours copy the lengths to the host, which waits for the GPU.

    Parameters
    ----------
    q : torch.Tensor
        ``(tokens, num_qo_heads, head_dim)``, float16 or bfloat16.
    k_cache, v_cache : torch.Tensor
        Pages ``(num_pages, num_kv_heads, page_size, head_dim)`` with ``block_tables``, else rows ``(tokens,
        num_kv_heads, head_dim)``.
    scale : float
        Scale of the logits.
    workspace_buffer : torch.Tensor
        Scratch.
    max_token_per_sequence, max_sequence_kv : int
        Rows and keys that no request exceeds.
    actual_seq_lens_q, actual_seq_lens_kv : torch.Tensor
        ``(batch_size, 1, 1, 1)`` int32: rows and keys of each request.
    block_tables : Optional[torch.Tensor]
        ``(batch_size, pages)`` int32.
    causal, return_lse : bool
        Whether the mask is causal, right ends aligned, and whether the LSE is computed.
    q_scale, k_scale, v_scale : Optional[torch.Tensor]
        Must be None: scales of 8-bit tensors.
    batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v, batch_offsets_stats : Optional[torch.Tensor]
        ``(batch_size + 1,)``: where the rows of each request begin, in ``batch_offsets_units`` ("elements" or
        "tokens"); by default one after the other.
    out, lse : Optional[torch.Tensor]
        Output buffers.
    is_cuda_graph_compatible, backend
        Accepted; there is one way.
    o_data_type : Optional[torch.dtype]
        dtype of the output, that of q by default.
    lse_base : str
        ``"log2"`` or ``"ln"``: logarithm of the LSE.

    Returns
    -------
    out : torch.Tensor
        Shape of ``q`` with the head dimension of ``v_cache``.
    lse : Optional[torch.Tensor]
        ``(batch_size, max_token_per_sequence, num_qo_heads)`` float32 with ``return_lse``; else None.
    """
    check_lse_form(_OP, lse_base, "NH")
    if any(scale_of is not None for scale_of in (q_scale, k_scale, v_scale)):
        raise ArgumentError(
            f"{_OP}: q_scale, k_scale or v_scale must be None (16-bit tensors have no scales), got a value"
        )
    if actual_seq_lens_q is None or actual_seq_lens_kv is None:
        raise ArgumentError(f"{_OP}: actual_seq_lens_q or actual_seq_lens_kv must be tensors, got None")
    batch_size, heads, head_dim = actual_seq_lens_q.numel(), q.shape[1], v_cache.shape[-1]
    if out is None:
        out = q.new_empty((q.shape[0], heads, head_dim), dtype=o_data_type or q.dtype)
    units = batch_offsets_units
    if lse is None and return_lse:
        lse = q.new_empty((batch_size, max_token_per_sequence, heads), dtype=torch.float32)
    if not has_frontend():
        from . import fallback

        offsets = {"q": batch_offsets_q, "o": batch_offsets_o, "k": batch_offsets_k, "v": batch_offsets_v}
        fallback.prefill(
            _OP, q, k_cache, v_cache, scale, workspace_buffer, actual_seq_lens_q, actual_seq_lens_kv, block_tables,
            causal, {**offsets, "stats": batch_offsets_stats}, units, out, lse, lse_base,
        )  # fmt: skip
        return out, lse if return_lse else None
    tensors = {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "out": out,
        "seq_len_q": actual_seq_lens_q.view(batch_size, 1, 1, 1).to(torch.int32),
        "seq_len_kv": actual_seq_lens_kv.view(batch_size, 1, 1, 1).to(torch.int32),
        "offsets_q": _offsets(batch_offsets_q, actual_seq_lens_q, q.stride(0), units),
        "offsets_o": _offsets(batch_offsets_o, actual_seq_lens_q, out.stride(0), units),
    }
    described = {name: _padded(x, batch_size, max_token_per_sequence) for name, x in (("q", q), ("out", out))}
    if block_tables is not None:
        tensors["table_k"] = tensors["table_v"] = block_tables.view(batch_size, 1, -1, 1)
    else:
        for name, x, given in (("k", k_cache, batch_offsets_k), ("v", v_cache, batch_offsets_v)):
            tensors[f"offsets_{name}"] = _offsets(given, actual_seq_lens_kv, x.stride(0), units)
            described[name] = _padded(x, batch_size, max_sequence_kv)
    if lse is not None:
        tensors["stats"] = lse
        rows = lse.stride(1) if lse.ndim == 3 else lse.stride(0)
        dims = (batch_size, heads, max_token_per_sequence, 1)
        described["stats"] = Operand(dims, (rows * max_token_per_sequence, 1, rows, 1), torch.float32)
        if batch_offsets_stats is not None:
            tensors["offsets_stats"] = _offsets(batch_offsets_stats, actual_seq_lens_q, rows, units)
    max_seq_len = max_sequence_kv if block_tables is not None else None
    run_sdpa(_OP, tensors, described, scale, causal, max_seq_len, workspace_buffer)
    if lse is not None and lse_base == "log2":  # the statistics of cuDNN are natural logarithms
        lse.div_(math.log(2))
    return out, lse if return_lse else None
