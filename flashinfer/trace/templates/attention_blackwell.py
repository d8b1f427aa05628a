# SPDX-License-Identifier: Apache-2.0
"""Templates and references of attention calls whose kernels need a Blackwell GPU: a definition runs none."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..notation import template_of_text
from ..template import TraceDispatch, TraceTemplate
from .attention_blackwell_arguments import (
    _trtllm_batch_context_init,
    _trtllm_batch_decode_mla_dense_init,
    _trtllm_batch_decode_mla_ragged_init,
    _trtllm_batch_decode_mla_sparse_init,
    _xqa_mla_init,
)
from .attention_reference import attention_reference

__all__ = [
    "trtllm_batch_context_trace",
    "trtllm_batch_decode_mla_dense_trace",
    "trtllm_batch_decode_mla_ragged_trace",
    "trtllm_batch_decode_mla_sparse_trace",
    "trtllm_batch_decode_mla_trace_dispatch",
    "xqa_batch_decode_mla_trace",
    "xqa_mla_trace",
]


def _trtllm_batch_context_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: Optional[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Keys and values are the first and the last of the second dimension of the cache, in the layout HND."""
    out, rows = torch.zeros_like(query), cum_seq_lens_q.tolist()
    for i, kv_len in enumerate(seq_lens.tolist()):
        pages = kv_cache[block_tables[i].long()].transpose(2, 3)
        k, v = (pages[:, half].flatten(0, 1)[:kv_len] for half in (0, -1))
        mine = slice(rows[i], rows[i + 1])
        out[mine] = attention_reference(query[mine].float(), k, v, True, sm_scale=bmm1_scale)[0] * bmm2_scale
    return out


def latent_attention_reference(
    query: torch.Tensor, latent: torch.Tensor, kv_lora_rank: int, logits_scale: float, output_scale: float, causal: bool
) -> torch.Tensor:
    """One request, bfloat16: all heads share ``latent``, and the first part of a row is the value too."""
    k = latent.float().unsqueeze(1)
    out = attention_reference(query.float(), k, k[..., :kv_lora_rank], causal, sm_scale=logits_scale)[0]
    return (out * output_scale).to(torch.bfloat16)


def latent_rows(kv_cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first ``kv_len`` rows of a table of pages; torch cannot index every dtype, so bytes are gathered."""
    rows = kv_cache[:, 0].view(torch.uint8)[pages.long()].view(kv_cache.dtype)
    return rows.flatten(0, 1)[:kv_len]


def _trtllm_batch_decode_mla_dense_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: Optional[torch.Tensor],
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    **_: Any,
) -> torch.Tensor:
    """The rows of a request are its last tokens."""
    scales = (bmm1_scale, bmm2_scale)
    made = []
    for i, kv_len in enumerate(seq_lens.tolist()):
        rows = latent_rows(kv_cache, block_tables[i], kv_len)
        made.append(latent_attention_reference(query[i], rows, kv_lora_rank, *scales, True))
    return torch.stack(made)


def _trtllm_batch_decode_mla_ragged_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: Optional[torch.Tensor],
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    cum_seq_lens_q: Optional[torch.Tensor] = None,
    max_q_len: Optional[int] = None,
    **_: Any,
) -> torch.Tensor:
    """Requests have different numbers of rows; without ``cum_seq_lens_q`` each has one."""
    starts = list(range(len(seq_lens) + 1)) if cum_seq_lens_q is None else cum_seq_lens_q.tolist()
    scales = (bmm1_scale, bmm2_scale)
    out = query.new_zeros((*query.shape[:2], kv_lora_rank), dtype=torch.bfloat16)
    for i, kv_len in enumerate(seq_lens.tolist()):
        mine, rows = slice(starts[i], starts[i + 1]), latent_rows(kv_cache, block_tables[i], kv_len)
        out[mine] = latent_attention_reference(query[mine], rows, kv_lora_rank, *scales, True)
    return out


def _trtllm_batch_decode_mla_sparse_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: Optional[torch.Tensor],
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    **_: Any,
) -> torch.Tensor:
    """Each row has its own tokens: places in the cache, of which the first ``min(seq_len, top_k)`` count; -1: none."""
    out = query.new_zeros((*query.shape[:3], kv_lora_rank), dtype=torch.bfloat16)
    top_k = sparse_mla_top_k or block_tables.shape[-1]
    slots, scales = kv_cache[:, 0].flatten(0, 1).view(torch.uint8), (bmm1_scale, bmm2_scale)
    for i, kv_len in enumerate(seq_lens.tolist()):
        for j in range(query.shape[1]):
            places = block_tables[i, j, : min(kv_len, top_k)].long()
            rows = slots[places[places >= 0]].view(kv_cache.dtype)
            out[i, j] = latent_attention_reference(query[i, j : j + 1], rows, kv_lora_rank, *scales, False)[0]
    return out


def _xqa_mla_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: Optional[torch.Tensor] = None,
    output_dtype: Optional[torch.dtype] = None,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    **_: Any,
) -> torch.Tensor:
    """Values are the first part of the rows of ``v_cache``, as wide as the output, 512 without one."""
    width = 512 if output is None else output.shape[-1]
    made = []
    for i, kv_len in enumerate(seq_lens.reshape(-1).tolist()):
        k, v = (latent_rows(cache.transpose(1, 2), page_table[i], kv_len).float() for cache in (k_cache, v_cache))
        scale = q_scale * kv_scale / math.sqrt(q.shape[-1])
        out = attention_reference(q[i].float(), k[:, None], v[:, None, :width], False, sm_scale=scale)[0]
        made.append((out * kv_scale).to(output_dtype or torch.bfloat16))
    return torch.stack(made)


trtllm_batch_context_trace = template_of_text(
    "trtllm_batch_context_h{num_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}",
    "trtllm_paged",
    var="num_tokens num_pages batch_size max_pages_per_seq batch_size_plus_1_q batch_size_plus_1_kv",
    hidden="kv_cache_dim",
    inputs="query[num_tokens, num_heads, head_dim];"
    "kv_cache[num_pages, kv_cache_dim, num_kv_heads, page_size, head_dim];"
    "block_tables[batch_size, max_pages_per_seq]; seq_lens[batch_size]; max_q_len:int32; max_kv_len:int32;"
    "bmm1_scale:float32; bmm2_scale:float32; batch_size_scalar<-batch_size:int32;"
    "cum_seq_lens_q[batch_size_plus_1_q]; cum_seq_lens_kv[batch_size_plus_1_kv]",
    outputs="output[num_tokens, num_heads, head_dim]=query",
    reference=_trtllm_batch_context_reference,
    init=_trtllm_batch_context_init,
    description="Attention of prompts over tables of pages: the last tokens of each request over its keys.",
)

_LATENT = "workspace_buffer[workspace_size]; qk_nope_head_dim:int32; kv_lora_rank:int32; qk_rope_head_dim:int32"
_LATENT_SCALES = "bmm1_scale:float32?; bmm2_scale:float32?"
_SKIP = "skip_softmax_threshold_scale_factor:float32?"


def _latent(
    stem: str, rows: str, tables: str, var: str, numbers: str, output: str, suffix: str = "", **rest: Any
) -> TraceTemplate:
    return template_of_text(
        stem + "_h{num_heads}_d_qk{head_dim_qk}_ckv{kv_lora_rank}_kpe{qk_rope_head_dim}_nope{qk_nope_head_dim}"
        "_ps{page_size}" + suffix,
        "mla_paged",
        var=f"batch_size {var} workspace_size",
        hidden="kv_pad_dim",
        inputs=f"query[{rows}, num_heads, head_dim_qk]; kv_cache[num_pages, kv_pad_dim, page_size, head_dim_qk];"
        f"{_LATENT}; block_tables[{tables}]; seq_lens[batch_size]; max_seq_len:int32; {numbers}",
        outputs=f"output[{output}, num_heads, kv_lora_rank]:bfloat16",
        stem=stem,
        description="Latent attention over a table: one key for all heads, whose first part is the value too.",
        **rest,
    )


_ROWS = "batch_size, q_len_per_request"
trtllm_batch_decode_mla_dense_trace = _latent(
    "trtllm_batch_decode_mla_dense",
    _ROWS,
    "batch_size, max_pages_per_seq",
    "q_len_per_request num_pages max_pages_per_seq",
    f"{_LATENT_SCALES}; {_SKIP}",
    _ROWS,
    reference=_trtllm_batch_decode_mla_dense_reference,
    init=_trtllm_batch_decode_mla_dense_init,
)
trtllm_batch_decode_mla_ragged_trace = _latent(
    "trtllm_batch_decode_mla_ragged",
    "num_tokens",
    "batch_size, max_pages_per_seq",
    "num_tokens batch_size_plus_1 num_pages max_pages_per_seq",
    f"{_LATENT_SCALES}; cum_seq_lens_q[batch_size_plus_1]; max_q_len:int32?",
    "num_tokens",
    reference=_trtllm_batch_decode_mla_ragged_reference,
    init=_trtllm_batch_decode_mla_ragged_init,
)
trtllm_batch_decode_mla_sparse_trace = _latent(
    "trtllm_batch_decode_mla_sparse",
    _ROWS,
    f"{_ROWS}, sparse_mla_top_k",
    "q_len_per_request num_pages",
    f"sparse_mla_top_k:int32; {_LATENT_SCALES}; {_SKIP}",
    _ROWS,
    "_topk{sparse_mla_top_k}",
    reference=_trtllm_batch_decode_mla_sparse_reference,
    init=_trtllm_batch_decode_mla_sparse_init,
)
xqa_batch_decode_mla_trace = _latent(
    "xqa_batch_decode_mla",
    _ROWS,
    "batch_size, max_pages_per_seq",
    "q_len_per_request num_pages max_pages_per_seq",
    _LATENT_SCALES,
    _ROWS,
    reference=_trtllm_batch_decode_mla_dense_reference,
)
xqa_mla_trace = template_of_text(
    "xqa_mla_h{num_heads_qo}_ckv{head_dim_ckv}_d_qk{head_dim_qk}_ps{page_size}",
    "xqa",
    var="batch_size num_pages max_pages_per_seq workspace_size num_semaphores",
    hidden="beam_width num_kv_heads",
    inputs="q[batch_size, beam_width, num_heads_qo, head_dim_qk];"
    "k_cache[num_pages, page_size, num_kv_heads, head_dim_qk];"
    "v_cache[num_pages, page_size, num_kv_heads, head_dim_qk]; page_table[batch_size, max_pages_per_seq];"
    "seq_lens[batch_size, beam_width]; output[batch_size, beam_width, num_heads_qo, head_dim_ckv];"
    "workspace_buffer[workspace_size]; semaphores[num_semaphores]; page_size:int32",
    outputs="output[batch_size, beam_width, num_heads_qo, head_dim_ckv]<-output:bfloat16",
    reference=_xqa_mla_reference,
    init=_xqa_mla_init,
    description="Latent attention of the last token of each request over its table of pages.",
)


def _choose_latent(**arguments: Any) -> TraceTemplate:
    if arguments.get("sparse_mla_top_k"):
        return trtllm_batch_decode_mla_sparse_trace
    is_ragged = arguments.get("cum_seq_lens_q") is not None or getattr(arguments.get("query"), "ndim", 4) == 3
    return trtllm_batch_decode_mla_ragged_trace if is_ragged else trtllm_batch_decode_mla_dense_trace


trtllm_batch_decode_mla_trace_dispatch = TraceDispatch(
    _choose_latent,
    (
        trtllm_batch_decode_mla_dense_trace,
        trtllm_batch_decode_mla_ragged_trace,
        trtllm_batch_decode_mla_sparse_trace,
    ),
)
