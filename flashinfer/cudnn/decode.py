# SPDX-License-Identifier: Apache-2.0
"""Decoding by cuDNN over a paged cache."""

from __future__ import annotations

import importlib.util
from typing import Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..attention.outputs import lse_buffer
from ..trace.templates.cudnn import cudnn_batch_decode_dispatch
from .graph import Operand, has_frontend, run_sdpa

__all__ = ["CUDNN_AVAILABLE", "cudnn_batch_decode_with_kv_cache"]

CUDNN_AVAILABLE = importlib.util.find_spec("cudnn") is not None
_OP = "cudnn_batch_decode_with_kv_cache"


@flashinfer_api(trace=cudnn_batch_decode_dispatch)
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Optional[torch.Tensor] = None,
    block_tables: Optional[torch.Tensor] = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: Optional[torch.Tensor] = None,
    batch_offsets_o: Optional[torch.Tensor] = None,
    batch_offsets_k: Optional[torch.Tensor] = None,
    batch_offsets_v: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    lse: Optional[torch.Tensor] = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: Optional[torch.Tensor] = None,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    r"""Attention of a few tokens per request by cuDNN, or by our own kernels where its frontend is not installed.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch_size * q_len_per_req, num_qo_heads, head_dim)``, float16 or bfloat16.
    k_cache, v_cache : torch.Tensor
        ``(num_pages, num_kv_heads, page_size, head_dim)``.
    scale : float
        Scale of the logits.
    workspace_buffer : torch.Tensor
        Scratch.
    max_sequence_kv : int
        Keys that no request exceeds.
    actual_seq_lens_kv : torch.Tensor
        ``(batch_size, 1, 1, 1)`` int32: keys of each request.
    block_tables : torch.Tensor
        ``(batch_size, pages)`` int32.
    is_cuda_graph_compatible : bool
        Accepted: every call can be captured once its graph is built.
    batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v : Optional[torch.Tensor]
        Accepted; rows lie one after the other.
    out, lse : Optional[torch.Tensor]
        Output buffers.
    return_lse : bool
        Whether to return the LSE too.
    q_len_per_req : int
        Last tokens of each request that ``q`` has, each of which sees the keys up to its own.
    window_left : int
        Keys left of a token's own that are visible, -1 for all.
    sinks : Optional[torch.Tensor]
        ``(num_qo_heads,)`` logits without a value.

    With one of the last five, our own kernels run, which copy the lengths to the host.

    Returns
    -------
    Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
        Shape of ``q``, and with ``return_lse`` the base-2 LSE, float32 ``(rows, num_qo_heads)``.
    """
    if q.ndim != 3 or k_cache.ndim != 4:
        raise ArgumentError(f"{_OP}: q and k_cache must have 3 and 4 dimensions, got {q.ndim} and {k_cache.ndim}")
    if block_tables is None or actual_seq_lens_kv is None:
        raise ArgumentError(f"{_OP}: block_tables or actual_seq_lens_kv must be tensors, got None")
    out = torch.empty_like(q) if out is None else out
    if return_lse or lse is not None or q_len_per_req != 1 or window_left >= 0 or sinks is not None:
        from . import fallback

        if q_len_per_req < 1:
            raise ArgumentError(f"{_OP}: q_len_per_req must be at least 1, got {q_len_per_req}")
        scores = lse_buffer(_OP, lse, q.shape[:2], q) if return_lse or lse is not None else None
        fallback.decode_tokens(
            _OP, q, k_cache, v_cache, scale, workspace_buffer, actual_seq_lens_kv, block_tables, q_len_per_req,
            window_left, sinks, out, scores,
        )  # fmt: skip
        return (out, scores) if return_lse and scores is not None else out
    if not has_frontend():
        from . import fallback

        fallback.decode(
            _OP, q, k_cache, v_cache, scale, workspace_buffer, max_sequence_kv, actual_seq_lens_kv, block_tables, out
        )
        return out
    batch_size = q.shape[0]
    tensors = {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "out": out,
        "table_k": block_tables.view(batch_size, 1, -1, 1),
        "table_v": block_tables.view(batch_size, 1, -1, 1),
        "seq_len_q": torch.ones(batch_size, 1, 1, 1, dtype=torch.int32, device=q.device),
        "seq_len_kv": actual_seq_lens_kv.view(batch_size, 1, 1, 1).to(torch.int32),
    }
    described = {name: Operand.of(x.unsqueeze(2)) for name, x in (("q", q), ("out", out))}
    run_sdpa(_OP, tensors, described, scale, False, max_sequence_kv, workspace_buffer)
    return out
