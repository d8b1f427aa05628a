# SPDX-License-Identifier: Apache-2.0
"""Templates and references of decoding over tables of pages: ``xqa`` and the calls named after other libraries.

Published are ``xqa`` in the layout NHD and the batch calls over one tensor in the layout HND; other forms are ours.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Union

import torch

from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference
from .shared import normal, seeded

__all__ = [
    "block_table_reference",
    "trtllm_batch_decode_block_sparse_trace",
    "trtllm_batch_decode_dispatch",
    "trtllm_batch_decode_trace",
    "xqa_batch_decode_dispatch",
    "xqa_batch_decode_trace",
    "xqa_dispatch",
    "xqa_trace",
]


def block_table_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    heads_first: int,
    logits_scale: float,
    output_scale: float,
    window_left: int,
) -> torch.Tensor:
    if heads_first:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    batch_size = block_tables.shape[0]
    rows = q.reshape(batch_size, -1, *q.shape[-2:])
    out = torch.empty_like(rows)
    for i, kv_len in enumerate(seq_lens.reshape(-1).tolist()):
        k, v = (cache[block_tables[i].long()].flatten(0, 1)[:kv_len] for cache in (k_cache, v_cache))
        result = attention_reference(rows[i], k, v, True, window_left, None, logits_scale)[0]
        out[i] = (result.float() * output_scale).to(q.dtype)
    return out.reshape(q.shape)


def _xqa_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: Optional[torch.Tensor] = None,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    sliding_win_size: int = 0,
    rcp_out_scale: float = 1.0,
    heads_first: int = 0,
    **_: Any,
) -> torch.Tensor:
    logits_scale = q_scale * kv_scale / math.sqrt(q.shape[-1])
    return block_table_reference(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        heads_first,
        logits_scale,
        kv_scale * rcp_out_scale,
        sliding_win_size - 1,
    )


def _batch_decode_reference(
    query: torch.Tensor,
    kv_cache: Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    workspace_buffer: Optional[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    heads_first: int = 1,
    **_: Any,
) -> torch.Tensor:
    """Keys and values are the first and the last of the second dimension, or a pair."""
    k, v = (kv_cache[:, 0], kv_cache[:, -1]) if isinstance(kv_cache, torch.Tensor) else kv_cache
    return block_table_reference(query, k, v, block_tables, seq_lens, heads_first, bmm1_scale, bmm2_scale, window_left)


def _trtllm_batch_decode_block_sparse_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: Optional[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    **_: Any,
) -> torch.Tensor:
    """Each key head has a table and lengths of its own."""
    heads = kv_cache.shape[2]
    group, out = query.shape[1] // heads, torch.empty_like(query)
    for head in range(heads):
        mine, cache = slice(head * group, (head + 1) * group), kv_cache[:, :, head : head + 1]
        table = (block_tables[head], seq_lens[head])
        out[:, mine] = block_table_reference(
            query[:, mine], cache[:, 0], cache[:, -1], *table, 1, bmm1_scale, bmm2_scale, -1
        )
    return out


def _axes(layout: str) -> dict[str, Axis]:
    return {
        "num_qo_heads": Const(abbrev="h"),
        "num_kv_heads": Const(abbrev="kv"),
        "head_dim": Const(abbrev="d"),
        "page_size": Const(abbrev="ps"),
        "heads_first": Const("1 for the layout HND", abbrev="", value=int(layout == "HND")),
        "num_pages": Var(),
        "batch_size": Var(),
        "max_pages": Var("pages of the longest request"),
    }


def _pages(layout: str) -> tuple[str, ...]:
    inner = ("page_size", "num_kv_heads") if layout == "NHD" else ("num_kv_heads", "page_size")
    return ("num_pages", *inner, "head_dim")


def _xqa(layout: str) -> TraceTemplate:
    rows = ("batch_size", "one", "num_qo_heads", "head_dim")
    return TraceTemplate(
        "xqa",
        axes={**_axes(layout), "one": Const(abbrev="", value=1)},
        inputs={
            "q": Tensor(rows),
            "k_cache": Tensor(_pages(layout)),
            "v_cache": Tensor(_pages(layout)),
            "page_table": Tensor(("batch_size", "max_pages"), dtype="int32"),
            "seq_lens": Tensor(("batch_size", "one"), dtype="uint32"),
            "q_scale": Scalar(optional=True),
            "kv_scale": Scalar(optional=True),
            "sliding_win_size": Scalar("int32", optional=True),
            "rcp_out_scale": Scalar(optional=True),
        },
        outputs={"out": Tensor(rows, param="output", dtype_from="q")},
        name_prefix=f"xqa_{layout.lower()}",
        reference=_xqa_reference,
        description="Attention of the last token of each request over its table of pages.",
    )


def _batch_decode(prefix: str) -> Callable[[str, bool], TraceTemplate]:
    def make(layout: str, pair: bool) -> TraceTemplate:
        first, *rest = _pages(layout)
        cache = {
            name: Tensor(_pages(layout), param="kv_cache", tuple_idx=i) for i, name in enumerate(("k_cache", "v_cache"))
        }
        combined = {"kv_cache": Tensor((first, "kv", *rest))}
        return TraceTemplate(
            "batch_decode",
            axes={
                **_axes(layout),
                "num_rows": Var("batch_size * q_len_per_req"),
                **({} if pair else {"kv": Const("keys, then values", abbrev="")}),
            },
            inputs={
                "query": Tensor(("num_rows", "num_qo_heads", "head_dim")),
                **(cache if pair else combined),
                "block_tables": Tensor(("batch_size", "max_pages"), dtype="int32"),
                "seq_lens": Tensor(("batch_size",), dtype="int32"),
                "max_seq_len": Scalar("int32"),
                "bmm1_scale": Scalar(optional=True),
                "bmm2_scale": Scalar(optional=True),
                "window_left": Scalar("int32", optional=True),
            },
            outputs={"output": Tensor(("num_rows", "num_qo_heads", "head_dim"), dtype_from="query")},
            name_prefix=f"{prefix}_{layout.lower()}{'_pair' if pair else ''}",
            reference=_batch_decode_reference,
            description="Attention of the last tokens of each request over its table of pages.",
        )

    return make


def _block_tables(g: torch.Generator, num_pages: int, *shape: int) -> torch.Tensor:
    """Different pages in each entry."""
    count = math.prod(shape)
    return torch.randperm(max(num_pages, count), generator=g, device=g.device)[:count].int().view(shape)


def _trtllm_batch_decode_init(
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
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Requests of as many tokens each: ``batch_size`` becomes a divisor of ``num_tokens``."""
    g, batch_size = seeded(seed, device), math.gcd(num_tokens, batch_size)
    columns = max_pages_per_seq or max(num_pages // batch_size, -(-num_tokens // (batch_size * page_size)), 1)
    num_pages = max(num_pages, batch_size * columns)
    return {
        "query": normal(g, num_tokens, num_heads, head_dim),
        "kv_cache": normal(g, num_pages, kv_cache_dim, num_kv_heads, page_size, head_dim),
        "workspace_buffer": torch.zeros(128 << 20, dtype=torch.uint8, device=device),
        "block_tables": _block_tables(g, num_pages, batch_size, columns),
        "seq_lens": torch.full((batch_size,), columns * page_size, dtype=torch.int32, device=device),
        "max_seq_len": columns * page_size,
        "bmm1_scale": 1 / math.sqrt(head_dim),
        "bmm2_scale": 1.0,
        "kv_layout": "HND",
        "q_len_per_req": num_tokens // batch_size,
    }


def _trtllm_batch_decode_block_sparse_init(
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
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    made = _trtllm_batch_decode_init(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        kv_cache_dim=kv_cache_dim,
        batch_size=batch_size,
        max_pages_per_seq=max_pages_per_seq,
        device=device,
        seed=seed,
    )
    made["block_tables"] = made["block_tables"].repeat(num_kv_heads, 1, 1)
    made["seq_lens"] = made["seq_lens"].repeat(num_kv_heads, 1)
    return {**made, "enable_block_sparse_attention": True}


def _xqa_init(
    *,
    batch_size: int = 2,
    beam_width: int = 1,
    num_pages: int = 4,
    max_pages_per_seq: int = 2,
    num_heads_qo: int = 128,
    num_kv_heads: int = 16,
    head_dim: int = 128,
    page_size: int = 16,
    workspace_size: int = 268435456,
    num_semaphores: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, num_pages = seeded(seed, device), max(num_pages, batch_size * max_pages_per_seq)
    rows, pages = (batch_size, beam_width, num_heads_qo, head_dim), (num_pages, page_size, num_kv_heads, head_dim)
    lengths = torch.full((batch_size, beam_width), max_pages_per_seq * page_size, device=device)
    semaphores = num_semaphores or batch_size * num_kv_heads * 2
    return {
        "q": normal(g, *rows),
        "k_cache": normal(g, *pages),
        "v_cache": normal(g, *pages),
        "page_table": _block_tables(g, num_pages, batch_size, max_pages_per_seq),
        "seq_lens": lengths.to(torch.uint32),
        "output": torch.zeros(rows, dtype=torch.bfloat16, device=device),
        "workspace_buffer": torch.zeros(workspace_size, dtype=torch.uint8, device=device),
        "semaphores": torch.zeros(semaphores, device=device).to(torch.uint32),
        "num_kv_heads": num_kv_heads,
        "page_size": page_size,
        "kv_layout": "NHD",
    }


_CACHE = "kv_cache[num_pages, kv_cache_dim, num_kv_heads, page_size, head_dim]"
_SCALES = "max_seq_len:int32; bmm1_scale:float32?; bmm2_scale:float32?"


def _published(stem: str, op_type: str, **rest: Any) -> TraceTemplate:
    sparse = stem.endswith("_sparse")
    lead = "num_kv_heads, " if sparse else ""
    return template_of_text(
        stem + "_h{num_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}",
        op_type,
        var="num_tokens num_pages batch_size max_pages_per_seq",
        hidden="kv_cache_dim",
        inputs=f"query[num_tokens, num_heads, head_dim]; {_CACHE};"
        f"block_tables[{lead}batch_size, max_pages_per_seq]; seq_lens[{lead}batch_size]; {_SCALES}"
        + ("; enable_block_sparse_attention:bool" if sparse else ""),
        outputs="output[num_tokens, num_heads, head_dim]=query",
        stem=stem,
        description="Attention of the last tokens of each request over its table of pages.",
        **rest,
    )


trtllm_batch_decode_trace = _published(
    "trtllm_batch_decode", "trtllm_paged", reference=_batch_decode_reference, init=_trtllm_batch_decode_init
)
trtllm_batch_decode_block_sparse_trace = _published(
    "trtllm_batch_decode_block_sparse",
    "trtllm_paged",
    reference=_trtllm_batch_decode_block_sparse_reference,
    init=_trtllm_batch_decode_block_sparse_init,
)
xqa_batch_decode_trace = _published("xqa_batch_decode", "xqa", reference=_batch_decode_reference)


def _by_form(
    make: Callable[[str, bool], TraceTemplate], default: str, published: TraceTemplate, *sparse: TraceTemplate
) -> TraceDispatch:
    """Choose by layout and form of the cache; ``sparse`` is for calls with a table for each head."""
    ours = {(layout, pair): make(layout, pair) for layout in ("NHD", "HND") for pair in (False, True)}

    def choose(**arguments: Any) -> TraceTemplate:
        layout = arguments.get("kv_layout", default)
        form = layout, isinstance(arguments.get("kv_cache"), (tuple, list))
        if form != ("HND", False):
            return ours[form]
        return sparse[0] if sparse and arguments.get("enable_block_sparse_attention") else published

    return TraceDispatch(choose, (published, *sparse, *ours.values()))


xqa_trace = template_of_text(
    "xqa_h{num_heads_qo}_kv{num_kv_heads}_d{head_dim}_ps{page_size}",
    "xqa",
    var="batch_size num_pages max_pages_per_seq workspace_size num_semaphores",
    hidden="beam_width",
    inputs="q[batch_size, beam_width, num_heads_qo, head_dim]; k_cache[num_pages, page_size, num_kv_heads, head_dim];"
    "v_cache[num_pages, page_size, num_kv_heads, head_dim]; page_table[batch_size, max_pages_per_seq];"
    "seq_lens[batch_size, beam_width]; output[batch_size, beam_width, num_heads_qo, head_dim];"
    "workspace_buffer[workspace_size]; semaphores[num_semaphores]; num_kv_heads:int32; page_size:int32",
    outputs="output[batch_size, beam_width, num_heads_qo, head_dim]<-output",
    reference=_xqa_reference,
    init=_xqa_init,
    description="Attention of the last token of each request over its table of pages.",
)
_XQA_HND = _xqa("HND")


def _choose_xqa(**arguments: Any) -> TraceTemplate:
    return _XQA_HND if arguments.get("kv_layout", "NHD") == "HND" else xqa_trace


xqa_dispatch = TraceDispatch(_choose_xqa, (xqa_trace, _XQA_HND))
xqa_batch_decode_dispatch = _by_form(_batch_decode("xqa_batch_decode"), "NHD", xqa_batch_decode_trace)
trtllm_batch_decode_dispatch = _by_form(
    _batch_decode("trtllm_batch_decode"), "HND", trtllm_batch_decode_trace, trtllm_batch_decode_block_sparse_trace
)
