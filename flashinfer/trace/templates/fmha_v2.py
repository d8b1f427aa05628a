# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.trtllm_fmha_v2_prefill``, one for each layout of its inputs."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from ..._runtime.errors import ArgumentError
from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .shared import even_indptr, normal, seeded

__all__ = ["fmha_v2_trace", "trtllm_fmha_v2_prefill_trace"]


def _prompt_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    bmm1_scale: float,
    sinks: Optional[torch.Tensor],
    soft_cap: Optional[float],
    window_left: int,
    chunk: int,
    causal: bool,
    alibi_slopes: Optional[torch.Tensor],
) -> torch.Tensor:
    """``[heads, queries, keys + 1]``: what a row does not see is -inf, the last column is the sink."""
    heads, qo_len, kv_len = q.shape[1], q.shape[0], k.shape[0]
    keys = k.float().repeat_interleave(heads // k.shape[1], dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * bmm1_scale
    row = torch.arange(qo_len, device=q.device)[:, None]
    key, position = torch.arange(kv_len, device=q.device), row + kv_len - qo_len
    if alibi_slopes is not None:
        logits = logits + alibi_slopes[:, None, None] * (key - row)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    hidden = key > position if causal else torch.zeros_like(key - position, dtype=torch.bool)
    if window_left >= 0:
        hidden = hidden | (key < position - window_left)
    if chunk:
        hidden = hidden | (key < position // chunk * chunk)
    sink = torch.full((heads,), -math.inf, device=q.device) if sinks is None else sinks.float()
    return torch.cat([logits.masked_fill(hidden, -math.inf), sink[:, None, None].expand(-1, qo_len, 1)], dim=-1)


def _prompts_reference(
    q: torch.Tensor,
    requests: list[tuple[torch.Tensor, ...]],
    cum_seq_lens_q: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    sinks: Optional[torch.Tensor],
    soft_cap: Optional[float],
    window_left: int,
    chunk: int,
    causal: bool,
    alibi_slopes: Optional[torch.Tensor],
    output_dtype: Optional[torch.dtype],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``requests`` has the keys and the values of each."""
    out = torch.zeros(q.shape, device=q.device)
    stats = torch.zeros(*q.shape[:2], 2, device=q.device)
    unit = math.sqrt(q.shape[-1]) * (1.0 if soft_cap else bmm1_scale)
    rows = cum_seq_lens_q.tolist()
    for i, (k, v) in enumerate(requests):
        mine = slice(rows[i], rows[i + 1])
        masks = (window_left, chunk, causal, alibi_slopes)
        logits = _prompt_logits(q[mine], k, bmm1_scale, sinks, soft_cap, *masks)
        largest = logits.amax(dim=-1, keepdim=True)
        weights = torch.exp(logits - largest.masked_fill(largest == -math.inf, 0))
        total = weights.sum(dim=-1, keepdim=True)
        values = v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        weights = (weights / total.masked_fill(total == 0, 1))[..., :-1]
        out[mine] = torch.einsum("hqk,khd->qhd", weights, values) * bmm2_scale
        stats[mine] = torch.cat([largest / unit, total], dim=-1).transpose(0, 1)
    return out.to(output_dtype or q.dtype), stats


def _separate_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    sinks: Optional[torch.Tensor] = None,
    logits_soft_cap_scale: Optional[float] = None,
    window_left: int = -1,
    chunked_attention_size: int = 0,
    causal: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    scales, masks = (bmm1_scale, bmm2_scale), (window_left, chunked_attention_size, causal)
    return _contiguous_stats_reference(
        *(q, torch.stack([k, v], dim=1), seq_lens, *scales, cum_seq_lens_q, cum_seq_lens_kv),
        *(sinks, logits_soft_cap_scale, *masks, alibi_slopes, output_dtype),
    )[0]


def _packed_reference(
    qkv: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    sinks: Optional[torch.Tensor] = None,
    logits_soft_cap_scale: Optional[float] = None,
    window_left: int = -1,
    chunked_attention_size: int = 0,
    causal: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    scales, masks = (bmm1_scale, bmm2_scale), (window_left, chunked_attention_size, causal)
    return _contiguous_stats_reference(
        *(qkv[:, 0], qkv[:, 1:], seq_lens, *scales, cum_seq_lens_q, cum_seq_lens_kv),
        *(sinks, logits_soft_cap_scale, *masks, alibi_slopes, output_dtype),
    )[0]


def _contiguous_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    sinks: Optional[torch.Tensor] = None,
    logits_soft_cap_scale: Optional[float] = None,
    window_left: int = -1,
    chunked_attention_size: int = 0,
    causal: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    scales, masks = (bmm1_scale, bmm2_scale), (window_left, chunked_attention_size, causal)
    return _contiguous_stats_reference(
        *(q, kv, seq_lens, *scales, cum_seq_lens_q, cum_seq_lens_kv),
        *(sinks, logits_soft_cap_scale, *masks, alibi_slopes, output_dtype),
    )[0]


def _contiguous_stats_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    sinks: Optional[torch.Tensor] = None,
    logits_soft_cap_scale: Optional[float] = None,
    window_left: int = -1,
    chunked_attention_size: int = 0,
    causal: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    starts, lengths = cum_seq_lens_kv.tolist(), seq_lens.tolist()
    requests = [kv[start : start + n].unbind(1) for start, n in zip(starts, lengths, strict=False)]  # starts has an end
    masks = (window_left, chunked_attention_size, causal, alibi_slopes)
    return _prompts_reference(
        q, requests, cum_seq_lens_q, bmm1_scale, bmm2_scale, sinks, logits_soft_cap_scale, *masks, output_dtype
    )


def _paged_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    heads_first: int,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: Optional[torch.Tensor] = None,
    logits_soft_cap_scale: Optional[float] = None,
    window_left: int = -1,
    chunked_attention_size: int = 0,
    causal: bool = True,
    alibi_slopes: Optional[torch.Tensor] = None,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    caches = [cache.transpose(1, 2) if heads_first else cache for cache in kv_cache.unbind(1)]
    requests = [
        tuple(cache[table.long()].flatten(0, 1)[:kv_len] for cache in caches)
        for table, kv_len in zip(block_tables, seq_lens.tolist(), strict=True)
    ]
    masks = (window_left, chunked_attention_size, causal, alibi_slopes)
    return _prompts_reference(
        q, requests, cum_seq_lens_q, bmm1_scale, bmm2_scale, sinks, logits_soft_cap_scale, *masks, output_dtype
    )[0]


def _trtllm_fmha_v2_prefill_reference(
    qkv: torch.Tensor,
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
    """The published definition has one tensor, which is queries, keys and values."""
    scales = (bmm1_scale, bmm2_scale)
    return _contiguous_stats_reference(
        qkv, torch.stack([qkv, qkv], dim=1), seq_lens, *scales, cum_seq_lens_q, cum_seq_lens_kv
    )[0]


def _trtllm_fmha_v2_prefill_init(
    *,
    num_tokens: int,
    batch_size: int = 2,
    batch_size_plus_1_q: int = 0,
    batch_size_plus_1_kv: int = 0,
    num_heads: int = 32,
    head_dim: int = 128,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    starts = even_indptr(num_tokens, batch_size, device)
    longest = -(-num_tokens // batch_size)
    return {
        "qkv": normal(seeded(seed, device), num_tokens, num_heads, head_dim),
        "seq_lens": starts.diff(),
        "max_q_len": longest,
        "max_kv_len": longest,
        "bmm1_scale": 1 / math.sqrt(head_dim),
        "bmm2_scale": 1.0,
        "batch_size": batch_size,
        "cum_seq_lens_q": starts,
        "cum_seq_lens_kv": starts.clone(),
    }


_AXES: dict[str, Axis] = {
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
    "head_dim": Const(abbrev="d"),
    "num_rows": Var("query tokens of all requests"),
    "batch_size": Var(),
    "indptr_len": Var("batch_size + 1"),
}
_TWO = Const("keys, then values", abbrev="", value=2)
_Q = ("num_rows", "num_qo_heads", "head_dim")
_KV = ("num_keys", "num_kv_heads", "head_dim")


def _template(
    name: str, axes: dict[str, Axis], tensors: dict[str, Tensor], reference: Any, tables: Any = None, stats: Any = None
) -> TraceTemplate:
    return TraceTemplate(
        "fmha_v2",
        axes=axes,
        inputs={
            **tensors,
            "seq_lens": Tensor(("batch_size",), dtype="int32", description="keys of each request"),
            "bmm1_scale": Scalar(description="of the logits"),
            "bmm2_scale": Scalar(description="of the output"),
            "cum_seq_lens_q": Tensor(("indptr_len",), dtype="int32", description="where each request's rows begin"),
            "cum_seq_lens_kv": Tensor(("indptr_len",), dtype="int32", description="where its keys begin, in rows"),
            **({} if tables is None else {"block_tables": tables}),
            "sinks": Tensor(("num_qo_heads",), dtype="float32", optional=True, description="in the denominator only"),
            "logits_soft_cap_scale": Scalar(optional=True),
            "window_left": Scalar("int32", optional=True, description="of mask_mode sliding_window, else -1"),
            "chunked_attention_size": Scalar("int32", optional=True, description="of mask_mode chunked, else 0"),
            "causal": Scalar("bool", optional=True, description="mask_mode is not padding"),
            "alibi_slopes": Tensor(
                ("num_qo_heads",), dtype="float32", optional=True, description="of pos_encoding_mode alibi"
            ),
        },
        outputs={
            "output": Tensor(_Q, param="out", dtype_from="out_dtype"),
            **({} if stats is None else {"stats": stats}),
        },
        name_prefix=f"fmha_v2_{name}",
        reference=reference,
        description="Attention of prompts: the last tokens of each request over its keys.",
    )


def _of_tuple(**dims: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: Tensor(axes, param="qkv", tuple_idx=i) for i, (name, axes) in enumerate(dims.items())}


def _paged(layout: str) -> TraceTemplate:
    inner = ("page_size", "num_kv_heads") if layout == "NHD" else ("num_kv_heads", "page_size")
    axes = {
        **_AXES,
        "page_size": Const(abbrev="ps"),
        "heads_first": Const("1 for the layout HND", abbrev="", value=int(layout == "HND")),
        "kv": _TWO,
        "num_pages": Var(),
        "max_pages": Var("of a request"),
    }
    tensors = _of_tuple(q=_Q, kv_cache=("num_pages", "kv", *inner, "head_dim"))
    tables = Tensor(("batch_size", "max_pages"), dtype="int32")
    return _template(f"paged_{layout.lower()}", axes, tensors, _paged_reference, tables)


def _contiguous(has_stats: bool) -> TraceTemplate:
    axes, tensors = {**_AXES, "kv": _TWO, "num_keys": Var()}, _of_tuple(q=_Q, kv=(_KV[0], "kv", *_KV[1:]))
    if not has_stats:
        return _template("contiguous", axes, tensors, _contiguous_reference)
    text = "largest logit, in units of q . k / sqrt(head_dim), and the sum of the exponentials relative to it"
    stats = Tensor(("num_rows", "num_qo_heads", "two"), dtype="float32", description=text)
    axes["two"] = Const(abbrev="", value=2)
    return _template("contiguous_stats", axes, tensors, _contiguous_stats_reference, stats=stats)


def _packed() -> TraceTemplate:
    axes = {**_AXES, "parts": Const("queries, keys, values", abbrev="", value=3)}
    del axes["num_kv_heads"]
    tensors = {"qkv": Tensor(("num_rows", "parts", "num_qo_heads", "head_dim"))}
    return _template("packed", axes, tensors, _packed_reference)


_TEMPLATES = {
    "PACKED_QKV": _packed(),
    "CONTIGUOUS_Q_KV": _contiguous(False),
    "SEPARATE_Q_K_V": _template(
        "separate", {**_AXES, "num_keys": Var()}, _of_tuple(q=_Q, k=_KV, v=_KV), _separate_reference
    ),
    "Q_PAGED_KV_NHD": _paged("NHD"),
    "Q_PAGED_KV_HND": _paged("HND"),
}
_STATS = _contiguous(True)

trtllm_fmha_v2_prefill_trace = template_of_text(
    "trtllm_fmha_v2_prefill_h{num_heads}_d{head_dim}",
    "trtllm_paged",
    var="num_tokens batch_size batch_size_plus_1_q batch_size_plus_1_kv",
    inputs="qkv[num_tokens, num_heads, head_dim]; seq_lens[batch_size]; max_q_len:int32; max_kv_len:int32;"
    "bmm1_scale:float32; bmm2_scale:float32; batch_size_scalar<-batch_size:int32;"
    "cum_seq_lens_q[batch_size_plus_1_q]; cum_seq_lens_kv[batch_size_plus_1_kv]",
    outputs="output[num_tokens, num_heads, head_dim]=qkv",
    reference=_trtllm_fmha_v2_prefill_reference,
    init=_trtllm_fmha_v2_prefill_init,
    description="Attention of prompts whose queries, keys and values are one tensor.",
)


def _choose(**arguments: Any) -> TraceTemplate:
    layout, qkv = str(arguments.get("input_layout")).upper(), arguments.get("qkv")
    if arguments.get("input_layout") is None:
        return trtllm_fmha_v2_prefill_trace
    if layout not in _TEMPLATES:
        raise ArgumentError(f"fmha_v2: input_layout must be one of {', '.join(_TEMPLATES)}, got {layout}")
    if isinstance(qkv, (tuple, list)) and any(isinstance(part, (tuple, list)) for part in qkv):
        raise ArgumentError(
            "fmha_v2: the cache must be one tensor (tables of a pair count blocks of one allocation, which a "
            "definition cannot say), got a pair"
        )
    return _STATS if layout == "CONTIGUOUS_Q_KV" and arguments.get("save_softmax_stats") else _TEMPLATES[layout]


fmha_v2_trace = TraceDispatch(_choose, (*_TEMPLATES.values(), _STATS, trtllm_fmha_v2_prefill_trace))
