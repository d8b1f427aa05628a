# SPDX-License-Identifier: Apache-2.0
"""Direct calls of the native attention modules, below the wrappers, for tests of kernels and planner."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Optional

import torch

from flashinfer.jit.attention import (
    gen_batch_decode_module,
    gen_batch_prefill_module,
    gen_single_decode_module,
    gen_single_prefill_module,
)
from flashinfer.quantization import packbits, segment_packbits

from .inputs import Batch, int32, offsets
from .reference import Attention, Result, alibi_slopes

LAYOUT = {"NHD": 0, "HND": 1}
INT32 = torch.int32


@functools.cache
def load(generate: Any, *key: Any) -> Any:
    return generate(*key).build_and_load()


@dataclass
class Native:
    """One batch on the native modules. ``what`` selects the variant and its parameters."""

    batch: Batch
    what: Attention = Attention()  # noqa: RUF009, frozen
    layout: str = "NHD"
    graph: bool = False
    fixed_split: int = -1
    disable_split: bool = False
    dtype_o: Optional[torch.dtype] = None

    def __post_init__(self) -> None:
        self.float_ws = torch.full((32 << 20,), 0x7F, dtype=torch.uint8, device=self.batch.device)
        self.int_ws = torch.empty(8 << 20, dtype=torch.uint8, device=self.batch.device)
        self.pinned = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=self.batch.device != "cpu")
        b = self.batch
        self.o = torch.full((*b.q.shape[:2], b.head_dim_vo), math.nan, device=b.device).to(self.dtype_o or b.dtype)
        self.lse = torch.full(b.q.shape[:2], math.nan, device=b.device)

    # identity and parameters of the variant ---------------------------------------------------

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.batch.dtype, self.batch.kv_dtype, self.o.dtype  # type: ignore[return-value]

    @property
    def dims(self) -> tuple[int, int]:
        return self.batch.head_dim_qk, self.batch.head_dim_vo

    @property
    def pos_encoding(self) -> int:
        return 1 if self.what.rope else 2 if self.what.alibi else 0

    @property
    def flags(self) -> tuple[int, bool, bool]:
        return self.pos_encoding, False, self.what.logits_soft_cap > 0

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return self.float_ws, self.int_ws

    def slopes(self) -> Optional[torch.Tensor]:
        heads = self.batch.num_qo_heads
        return alibi_slopes(heads).float().to(self.batch.device) if self.what.alibi else None

    def scalars(self) -> tuple[float, ...]:
        what, head_dim = self.what, self.batch.head_dim_qk
        sm_scale = 1 / math.sqrt(head_dim) if what.sm_scale is None else what.sm_scale
        return what.logits_soft_cap, sm_scale, 1 / what.rope_scale, 1 / what.rope_theta

    @property
    def mask_mode(self) -> int:
        what = self.what
        return 3 if what.prefix_len is not None else 2 if what.mask is not None else int(what.causal)

    def prefill_extras(self, *scale_factors: torch.Tensor) -> list[Any]:
        mask = indptr = prefix = places = longest = None
        length, device = 0, self.batch.device
        if self.what.mask is not None:  # one mask for each request, cut to its shape
            blocks = [
                self.what.mask[:n, :m].reshape(-1) for n, m in zip(self.batch.qo_lens, self.batch.kv_lens, strict=True)
            ]
            ends = int32(offsets([x.numel() for x in blocks]), device)
            mask, indptr = segment_packbits(torch.cat(blocks).to(device), ends, bitorder="little")
        if self.what.prefix_len is not None:
            assert self.what.token_pos is not None
            requests = len(self.batch.qo_lens)
            prefix = torch.full((requests,), self.what.prefix_len, dtype=torch.uint32, device=device)
            places = self.what.token_pos.to(device=device, dtype=torch.uint16).repeat(requests)
            length = self.what.token_pos.numel()
        tensors = [mask, indptr, self.slopes(), prefix, places, longest, *scale_factors]
        return [*tensors, *self.scalars(), length]

    # runs ---------------------------------------------------------------------------------------

    def prefill(self, page_size: int = 0, form: str = "pair") -> Result:
        """Run batch prefill over pages, or over ragged rows if ``page_size`` is 0."""
        b = self.batch
        module = load(gen_batch_prefill_module, "fa2", *self.dtypes, INT32, *self.dims, *self.flags, False, _kind(b))
        pages = b.pages(page_size) if page_size else None
        kv_indptr = pages.indptr if pages else b.kv_indptr
        numbers = (b.q.shape[0], len(b.qo_lens), *b.heads, page_size or 1, self.graph, *self.dims)
        causal = self.what.causal and self.what.mask is None
        plan = module.plan(
            *(*self.buffers, self.pinned, b.qo_indptr.cpu(), kv_indptr.cpu(), int32(b.kv_lens, "cpu"), *numbers),
            *(causal, self.what.window_left, self.fixed_split, self.disable_split, 0, 0),
        )
        tail = (self.o, self.lse, self.mask_mode, LAYOUT[self.layout], self.what.window_left, False)
        is_nvfp4 = b.kv_dtype == torch.uint8
        if pages:
            extras = self.prefill_extras(*(b.cache_sf(pages, self.layout) if is_nvfp4 else ()))
            cache = b.cache(pages, self.layout, form)
            k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
            tables = (b.qo_indptr, pages.indptr, pages.indices, pages.last_page_len)
            module.paged_run(*self.buffers, plan, b.q, k, v, *tables, *tail, *extras)
        else:
            factors = [_layout(x, self.layout) for x in (b.k_sf, b.v_sf)] if is_nvfp4 else []
            k, v = b.dense(self.layout)
            indptrs = (b.qo_indptr, b.kv_indptr)
            module.ragged_run(*self.buffers, plan, b.q, k, v, *indptrs, *tail, *self.prefill_extras(*factors))
        return self.o.float(), self.lse

    def decode(self, page_size: int, q_len: int = 1, with_lens: bool = True, form: str = "pair") -> Result:
        b = self.batch
        module = load(gen_batch_decode_module, *self.dtypes, INT32, *self.dims, *self.flags, _kind(b))
        pages = b.pages(page_size)
        indptr = pages.indptr.cpu()
        if with_lens:
            plan = module.plan_with_lens(
                *(*self.buffers, self.pinned, indptr, int32(b.kv_lens, "cpu"), q_len, *b.heads, page_size),
                *(self.graph, self.what.window_left, self.fixed_split, self.disable_split),
            )
        else:
            empty = torch.empty(0, dtype=b.dtype), torch.empty(0, dtype=b.dtype)
            numbers = (*b.heads, page_size, self.graph, self.what.window_left, self.what.logits_soft_cap, *self.dims)
            plan = module.plan(*self.buffers, self.pinned, indptr, len(b.kv_lens), *numbers, *empty)
        cache = b.cache(pages, self.layout, form)
        k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
        factors = b.cache_sf(pages, self.layout) if b.kv_dtype == torch.uint8 else ()
        module.run(
            *(*self.buffers, plan, b.q, k, v, *pages.table, self.o, self.lse),
            *(LAYOUT[self.layout], self.what.window_left, False, self.slopes(), *factors, *self.scalars()),
        )
        return self.o.float(), self.lse

    def single_prefill(self) -> Result:
        b = self.batch
        module = load(gen_single_prefill_module, "fa2", *self.dtypes, *self.dims, *self.flags, False, _kind(b))
        k, v = b.dense(self.layout)
        factors = [_layout(x, self.layout) for x in (b.k_sf, b.v_sf)] if b.kv_dtype == torch.uint8 else []
        extras = self.prefill_extras(*factors)
        if self.what.mask is not None:
            extras[:2] = [packbits(self.what.mask.reshape(-1).to(b.device), bitorder="little"), None]
        window = self.what.window_left
        module.run(b.q, k, v, self.float_ws, self.o, self.lse, self.mask_mode, LAYOUT[self.layout], window, *extras)
        return self.o.float(), self.lse

    def single_decode(self) -> Result:
        b = self.batch
        module = load(gen_single_decode_module, *self.dtypes, *self.dims, *self.flags, _kind(b))
        k, v = b.dense(self.layout)
        factors = [_layout(x, self.layout) for x in (b.k_sf, b.v_sf)] if b.kv_dtype == torch.uint8 else []
        tail = (LAYOUT[self.layout], self.what.window_left, self.slopes(), *factors, *self.scalars())
        module.run(b.q[0], k, v, self.float_ws, self.o[0], self.lse[0], *tail)
        return self.o.float(), self.lse


def _kind(batch: Batch) -> str:
    return "cpu" if batch.device == "cpu" else "cuda"


def _layout(x: Optional[torch.Tensor], layout: str) -> torch.Tensor:
    assert x is not None
    return (x.transpose(0, 1) if layout == "HND" else x).contiguous()
