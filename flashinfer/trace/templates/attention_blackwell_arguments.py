# SPDX-License-Identifier: Apache-2.0
"""Arguments of the templates in attention_blackwell.py; each travels as text with its definition."""

from __future__ import annotations

import math
from typing import Any

import torch

from .shared import even_indptr, normal, seeded

__all__: list[str] = []


def _trtllm_batch_context_init(
    *,
    num_tokens: int,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    num_pages: int = 0,
    kv_cache_dim: int = 2,
    batch_size: int = 1,
    max_pages_per_seq: int = 0,
    batch_size_plus_1_q: int = 0,
    batch_size_plus_1_kv: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Prompts without earlier tokens, of about the same length."""
    g, starts = seeded(seed, device), even_indptr(num_tokens, batch_size, device)
    lengths = starts.diff()
    longest = -(-num_tokens // batch_size)
    columns = max_pages_per_seq or -(-longest // page_size)
    num_pages = max(num_pages, batch_size * columns)
    return {
        "query": normal(g, num_tokens, num_heads, head_dim),
        "kv_cache": normal(g, num_pages, kv_cache_dim, num_kv_heads, page_size, head_dim),
        "workspace_buffer": torch.zeros(128 << 20, dtype=torch.uint8, device=device),
        "block_tables": page_tables(g, num_pages, batch_size, columns),
        "seq_lens": lengths,
        "max_q_len": longest,
        "max_kv_len": longest,
        "bmm1_scale": 1 / math.sqrt(head_dim),
        "bmm2_scale": 1.0,
        "batch_size": batch_size,
        "cum_seq_lens_q": starts,
        "cum_seq_lens_kv": starts.clone(),
        "kv_layout": "HND",
    }


def page_tables(g: torch.Generator, num_pages: int, *shape: int) -> torch.Tensor:
    """Different pages in each entry."""
    return torch.randperm(num_pages, generator=g, device=g.device)[: math.prod(shape)].int().view(shape)


def latent_arguments(
    g: torch.Generator,
    query_shape: tuple[int, ...],
    num_pages: int,
    kv_pad_dim: int,
    page_size: int,
    widths: tuple[int, int, int, int],
    workspace_size: int,
) -> dict[str, Any]:
    """Arguments before the page table; ``widths`` are those of a row, of its parts and of a head before compression."""
    head_dim_qk, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim = widths
    return {
        "query": normal(g, *query_shape, head_dim_qk, dtype=torch.float8_e4m3fn),
        "kv_cache": normal(g, num_pages, kv_pad_dim, page_size, head_dim_qk, dtype=torch.float8_e4m3fn),
        "workspace_buffer": torch.zeros(workspace_size, dtype=torch.uint8, device=g.device),
        "qk_nope_head_dim": qk_nope_head_dim,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
    }


def _trtllm_batch_decode_mla_dense_init(
    *,
    batch_size: int,
    q_len_per_request: int,
    num_heads: int = 128,
    head_dim_qk: int = 576,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    qk_nope_head_dim: int = 512,
    num_pages: int = 0,
    kv_pad_dim: int = 1,
    page_size: int = 64,
    max_pages_per_seq: int = 0,
    workspace_size: int = 268435456,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, columns = seeded(seed, device), max_pages_per_seq or max(num_pages // batch_size, 1)
    num_pages = max(num_pages, batch_size * columns)
    rows, widths = (batch_size, q_len_per_request, num_heads), (head_dim_qk, kv_lora_rank)
    parts = (*widths, qk_rope_head_dim, qk_nope_head_dim)
    return {
        **latent_arguments(g, rows, num_pages, kv_pad_dim, page_size, parts, workspace_size),
        "block_tables": page_tables(g, num_pages, batch_size, columns),
        "seq_lens": torch.full((batch_size,), columns * page_size, dtype=torch.int32, device=device),
        "max_seq_len": columns * page_size,
        "bmm1_scale": 1 / math.sqrt(128 + qk_rope_head_dim),
        "bmm2_scale": 1.0,
        "is_var_seq": False,
    }


def _trtllm_batch_decode_mla_ragged_init(
    *,
    batch_size: int,
    num_tokens: int,
    batch_size_plus_1: int,
    num_heads: int = 128,
    head_dim_qk: int = 576,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    qk_nope_head_dim: int = 512,
    num_pages: int = 0,
    kv_pad_dim: int = 1,
    page_size: int = 64,
    max_pages_per_seq: int = 0,
    workspace_size: int = 268435456,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, starts = seeded(seed, device), even_indptr(num_tokens, batch_size, device)
    longest = -(-num_tokens // batch_size)
    columns = max_pages_per_seq or max(num_pages // batch_size, -(-longest // page_size), 1)
    num_pages = max(num_pages, batch_size * columns)
    parts = (head_dim_qk, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim)
    return {
        **latent_arguments(g, (num_tokens, num_heads), num_pages, kv_pad_dim, page_size, parts, workspace_size),
        "block_tables": page_tables(g, num_pages, batch_size, columns),
        "seq_lens": torch.full((batch_size,), columns * page_size, dtype=torch.int32, device=device),
        "max_seq_len": columns * page_size,
        "bmm1_scale": 1 / math.sqrt(128 + qk_rope_head_dim),
        "bmm2_scale": 1.0,
        "is_var_seq": False,
        "cum_seq_lens_q": starts,
        "max_q_len": longest,
    }


def _trtllm_batch_decode_mla_sparse_init(
    *,
    batch_size: int,
    q_len_per_request: int,
    num_heads: int = 128,
    head_dim_qk: int = 576,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    qk_nope_head_dim: int = 512,
    num_pages: int,
    kv_pad_dim: int = 1,
    page_size: int = 64,
    sparse_mla_top_k: int = 2048,
    workspace_size: int = 268435456,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """All requests choose among all tokens of the cache; -1 fills up what it lacks."""
    g, slots = seeded(seed, device), num_pages * page_size
    rows, parts = (batch_size, q_len_per_request), (head_dim_qk, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim)
    count = min(sparse_mla_top_k, slots)
    order = torch.rand(*rows, slots, generator=g, device=device).argsort(dim=-1)[..., :count].int()
    tables = torch.nn.functional.pad(order, (0, sparse_mla_top_k - count), value=-1)
    return {
        **latent_arguments(g, (*rows, num_heads), num_pages, kv_pad_dim, page_size, parts, workspace_size),
        "block_tables": tables,
        "seq_lens": torch.full((batch_size,), slots, dtype=torch.int32, device=device),
        "max_seq_len": slots,
        "sparse_mla_top_k": sparse_mla_top_k,
        "bmm1_scale": 1 / math.sqrt(128 + qk_rope_head_dim),
        "bmm2_scale": 1.0,
        "is_var_seq": False,
    }


def _xqa_mla_init(
    *,
    batch_size: int = 2,
    beam_width: int = 1,
    num_pages: int = 4,
    max_pages_per_seq: int = 2,
    num_heads_qo: int = 128,
    head_dim_ckv: int = 512,
    head_dim_qk: int = 0,
    page_size: int = 64,
    workspace_size: int = 268435456,
    num_semaphores: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, num_pages = seeded(seed, device), max(num_pages, batch_size * max_pages_per_seq)
    rows, head_dim_qk = (batch_size, beam_width, num_heads_qo), head_dim_qk or head_dim_ckv + 64
    cache = normal(g, num_pages, page_size, 1, head_dim_qk, dtype=torch.float8_e4m3fn)
    lengths = torch.full((batch_size, beam_width), max_pages_per_seq * page_size, device=device)
    return {
        "q": normal(g, *rows, head_dim_qk, dtype=torch.float8_e4m3fn),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "page_table": page_tables(g, num_pages, batch_size, max_pages_per_seq),
        "seq_lens": lengths.to(torch.uint32),
        "output": torch.zeros(*rows, head_dim_ckv, dtype=torch.bfloat16, device=device),
        "workspace_buffer": torch.zeros(workspace_size, dtype=torch.uint8, device=device),
        "semaphores": torch.zeros(num_semaphores or batch_size * 2, device=device).to(torch.uint32),
        "page_size": page_size,
    }
