# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention as in DeepSeek-V3.2, for ``examples/serve``: an indexer, a selection, attention to rows.

A token has 576 numbers in the cache of a layer, which are key and value of all heads, and 132 bytes in the cache of
the indexer: 128 e4m3 numbers and their scale. For each new token the indexer scores all tokens up to it, the best
``top_k`` are selected, and attention reads the rows of these alone. Nothing is planned: prompts and decode steps are
one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Union

import torch
from torch.nn.functional import layer_norm

import flashinfer
from flashinfer.indexer import fp8_paged_mqa_logits
from serve.linear import LARGEST_E4M3, Linear, Weights

LATENT, ROTARY, INDEX = 512, 64, 128  #: columns of a latent row, its rotary columns, columns of an index key
PAGE_SIZE = 64  #: tokens of a page: one of the sizes that the scores take


@dataclass(frozen=True)
class Sparse:
    """Sizes of latent attention and its indexer; ``top_k`` is the number of tokens that a token attends to."""

    query_rank: int
    nope_dim: int
    value_dim: int
    index_heads: int
    top_k: int

    def shapes(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of one layer, keyed by their whole names below it: DeepSeek's."""
        return {
            "self_attn.q_a_proj.weight": (self.query_rank, hidden),
            "self_attn.q_a_layernorm.weight": (self.query_rank,),
            "self_attn.q_b_proj.weight": (heads * (self.nope_dim + ROTARY), self.query_rank),
            "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROTARY, hidden),
            "self_attn.kv_a_layernorm.weight": (LATENT,),
            "self_attn.kv_b_proj.weight": (heads * (self.nope_dim + self.value_dim), LATENT),
            "self_attn.o_proj.weight": (hidden, heads * self.value_dim),
            "self_attn.indexer.wq_b.weight": (self.index_heads * INDEX, self.query_rank),
            "self_attn.indexer.wk.weight": (INDEX, hidden),
            "self_attn.indexer.k_norm.weight": (INDEX,),
            "self_attn.indexer.k_norm.bias": (INDEX,),
            "self_attn.indexer.weights_proj.weight": (self.index_heads, hidden),
        }


@dataclass(frozen=True)
class SparsePages:
    """Pages of all layers: latent rows ``(layers, pages, 64, 576)``, bytes of the indexer ``(layers, pages, 8448)``."""

    latent: torch.Tensor
    index: torch.Tensor

    @staticmethod
    def empty(layers: int, pages: int, dtype: torch.dtype, device: Union[str, torch.device]) -> SparsePages:
        return SparsePages(
            torch.zeros(layers, pages, PAGE_SIZE, LATENT + ROTARY, dtype=dtype, device=device),
            torch.zeros(layers, pages, PAGE_SIZE * (INDEX + 4), dtype=torch.uint8, device=device),
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(zip(self.latent, self.index, strict=True))


class Unplanned:
    """Stands for an attention wrapper in the engine: these kernels take the lists of each call, and no plan."""

    def plan(self, *tables: Any, **options: Any) -> None:
        pass


def block_tables(rows: Any, max_length: int) -> torch.Tensor:
    """Return the pages of each request as a table; places behind its last page hold pages that are not read."""
    width = torch.arange(-(-max_length // PAGE_SIZE), device=rows.kv_indptr.device)
    places = (rows.kv_indptr[:-1, None] + width).clamp_max(len(rows.kv_indices) - 1)
    return rows.kv_indices[places]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers of the last dimension and the float32 scale that restores them."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


class SparseAttention:
    """Attention of one layer. The projections from and to the latent row go into the queries and the result."""

    def __init__(self, config: Any, weights: Weights, prefix: str, linear: type[Linear]) -> None:
        prefix = f"{prefix}.self_attn"
        self.config, self.sizes = config, config.sparse
        self.query_down = linear.of(weights, prefix, "q_a_proj")
        self.query_up = linear.of(weights, prefix, "q_b_proj")
        self.latent = linear.of(weights, prefix, "kv_a_proj_with_mqa")
        self.out = linear.of(weights, prefix, "o_proj")
        self.index_query = linear.of(weights, prefix, "indexer.wq_b")
        self.index_key = linear.of(weights, prefix, "indexer.wk")
        self.index_weights = Linear.of(weights, prefix, "indexer.weights_proj")
        self.query_norm, self.latent_norm = (weights[f"{prefix}.{name}_a_layernorm.weight"] for name in ("q", "kv"))
        self.index_norm = [weights[f"{prefix}.indexer.k_norm.{name}"] for name in ("weight", "bias")]
        up = weights[f"{prefix}.kv_b_proj.weight"].view(config.num_qo_heads, -1, LATENT)
        self.key_up, self.value_up = up.split((self.sizes.nope_dim, self.sizes.value_dim), dim=1)

    def __call__(self, x: torch.Tensor, rows: Any, pages: Any, tables: torch.Tensor) -> torch.Tensor:
        """Write the new rows of both caches, then score, select and attend."""
        latent, index = pages
        eps, rope = self.config.eps, self.config.rope
        down = flashinfer.rmsnorm(self.query_down(x), self.query_norm, eps)
        query = self.query_up(down).view(len(x), self.config.num_qo_heads, -1)
        nope, rotary = query.split((self.sizes.nope_dim, ROTARY), dim=-1)
        row, row_rotary = self.latent(x).split((LATENT, ROTARY), dim=-1)
        row, rotary, row_rotary = flashinfer.rmsnorm(row, self.latent_norm, eps), rotary.clone(), row_rotary.clone()
        rope.rotate(rotary, row_rotary[:, None], rows.positions)
        flashinfer.append_paged_mla_kv_cache(
            row, row_rotary, rows.batch_indices, rows.positions, latent[..., :LATENT], latent[..., LATENT:],
            rows.kv_indices, rows.kv_indptr, rows.kv_last_page_len,
        )  # fmt: skip
        indices = self.select(x, down, rows, index, tables)
        absorbed = torch.cat((torch.einsum("thd,hdl->thl", nope, self.key_up), rotary), -1)
        scale = (self.sizes.nope_dim + ROTARY) ** -0.5
        attended = flashinfer.sparse_mla(absorbed, latent, indices, scale)
        return self.out(torch.einsum("thl,hdl->thd", attended, self.value_up).reshape(len(x), -1))

    def select(
        self, x: torch.Tensor, down: torch.Tensor, rows: Any, index: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows of the latent cache that each token attends to, -1 behind the last."""
        heads = self.sizes.index_heads
        query = self.index_query(down).view(len(x), heads, INDEX)
        key = layer_norm(self.index_key(x), (INDEX,), *self.index_norm, self.config.eps)
        self.config.rope.rotate(query[..., :ROTARY], key[:, None, :ROTARY], rows.positions)
        query8, query_scale = quantize(query)
        self.write_keys(key, rows, index, tables)
        weights = self.index_weights(x).float() * query_scale * (heads * INDEX) ** -0.5
        of_rows, lengths = tables[rows.batch_indices.long()], rows.positions + 1
        cache = index.view(len(index), PAGE_SIZE, 1, INDEX + 4)
        scores = fp8_paged_mqa_logits(query8[:, None], cache, weights, of_rows, lengths, self.config.max_length)
        return flashinfer.top_k_page_table_transform(
            scores, tables, lengths, self.sizes.top_k, rows.batch_indices, deterministic=True, page_size=PAGE_SIZE
        )

    def write_keys(self, key: torch.Tensor, rows: Any, index: torch.Tensor, tables: torch.Tensor) -> None:
        """Quantise the keys of the new tokens and write them, and their scales behind all keys of their pages."""
        key8, scale = quantize(key)
        positions = rows.positions.long()
        page, slot = tables[rows.batch_indices.long(), positions // PAGE_SIZE].long(), positions % PAGE_SIZE
        keys, scales = index.split((PAGE_SIZE * INDEX, PAGE_SIZE * 4), dim=1)
        keys.unflatten(1, (PAGE_SIZE, INDEX))[page, slot] = key8.view(torch.uint8)
        scales.view(torch.float32)[page, slot] = scale
