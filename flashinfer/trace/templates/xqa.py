# SPDX-License-Identifier: Apache-2.0
"""Templates and references of decoding over tables of pages: ``xqa`` and the calls named after other libraries."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference

__all__ = ["block_table_reference", "trtllm_batch_decode_trace", "xqa_batch_decode_trace", "xqa_trace"]


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
    heads_first: int,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    sliding_win_size: int = 0,
    rcp_out_scale: float = 1.0,
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


def _batch_decode_pair_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    heads_first: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    **_: Any,
) -> torch.Tensor:
    return block_table_reference(
        query, k_cache, v_cache, block_tables, seq_lens, heads_first, bmm1_scale, bmm2_scale, window_left
    )


def _batch_decode_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    heads_first: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    **_: Any,
) -> torch.Tensor:
    return block_table_reference(
        query, kv_cache[:, 0], kv_cache[:, -1], block_tables, seq_lens, heads_first, bmm1_scale, bmm2_scale, window_left
    )


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
                "bmm1_scale": Scalar(optional=True),
                "bmm2_scale": Scalar(optional=True),
                "window_left": Scalar("int32", optional=True),
            },
            outputs={"output": Tensor(("num_rows", "num_qo_heads", "head_dim"), dtype_from="query")},
            name_prefix=f"{prefix}_{layout.lower()}{'_pair' if pair else ''}",
            reference=_batch_decode_pair_reference if pair else _batch_decode_reference,
            description="Attention of the last tokens of each request over its table of pages.",
        )

    return make


def _by_layout_and_pair(make: Callable[[str, bool], TraceTemplate], default: str) -> TraceDispatch:
    templates = {(layout, pair): make(layout, pair) for layout in ("NHD", "HND") for pair in (False, True)}

    def choose(**arguments: Any) -> TraceTemplate:
        layout = arguments.get("kv_layout", default)
        return templates[layout, isinstance(arguments.get("kv_cache"), (tuple, list))]

    return TraceDispatch(choose, tuple(templates.values()))


_XQA = {layout: _xqa(layout) for layout in ("NHD", "HND")}


def _choose_xqa(**arguments: Any) -> TraceTemplate:
    return _XQA[arguments.get("kv_layout", "NHD")]


xqa_trace = TraceDispatch(_choose_xqa, tuple(_XQA.values()))
xqa_batch_decode_trace = _by_layout_and_pair(_batch_decode("xqa_batch_decode"), "NHD")
trtllm_batch_decode_trace = _by_layout_and_pair(_batch_decode("trtllm_batch_decode"), "HND")
