# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.cudnn``. Rows of requests lie one after the other."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Mapping, Optional

import torch

from ..check import default_check
from ..notation import template_of_text
from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .attention_reference import attention_reference
from .xqa import block_table_reference

__all__ = [
    "cudnn_batch_decode_dispatch",
    "cudnn_batch_decode_trace",
    "cudnn_batch_prefill_dispatch",
    "cudnn_batch_prefill_trace",
]


def _cudnn_batch_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: Optional[torch.Tensor],
    max_sequence_kv: int,
    block_tables: Optional[torch.Tensor] = None,
    actual_seq_lens_kv: Optional[torch.Tensor] = None,
    **_: Any,
) -> torch.Tensor:
    """Without lengths all requests have ``max_sequence_kv`` keys, without a table the pages in order."""
    block_tables, lengths = published_table(len(q), k_cache, max_sequence_kv, block_tables, actual_seq_lens_kv)
    return block_table_reference(q, k_cache, v_cache, block_tables, lengths, 1, scale, 1.0, -1)


def published_table(
    batch_size: int,
    cache: torch.Tensor,
    max_sequence_kv: int,
    block_tables: Optional[torch.Tensor],
    lengths: Optional[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill in what a definition may lack: pages in order for each request, and full lengths."""
    if block_tables is None:
        pages = torch.arange(cache.shape[0] // batch_size * batch_size, device=cache.device)
        block_tables = pages.view(batch_size, -1)
    if lengths is None:
        lengths = torch.full((batch_size,), max_sequence_kv, device=cache.device)
    return block_tables, lengths.flatten()


def _cudnn_batch_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: Optional[torch.Tensor],
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    causal: bool,
    return_lse: bool,
    block_tables: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the natural logarithm of the sum of exp(logit) of each row."""
    qo_lens = actual_seq_lens_q.flatten()
    tables, kv_lens = published_table(len(qo_lens), k_cache, max_sequence_kv, block_tables, actual_seq_lens_kv)
    lengths = (max_token_per_sequence, qo_lens, kv_lens)
    out, lse = _prefill_lse_reference(q, k_cache, v_cache, scale, *lengths, tables, causal)
    return out, torch.cat([rows[:n] for rows, n in zip(lse, qo_lens.tolist(), strict=True)])


def _prefill_lse_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    max_token_per_sequence: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    block_tables: Optional[torch.Tensor],
    causal: bool,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    qo_lens, kv_lens = actual_seq_lens_q.flatten().tolist(), actual_seq_lens_kv.flatten().tolist()
    out = q.new_zeros((*q.shape[:2], v_cache.shape[-1]), dtype=output_dtype or q.dtype)
    lse = torch.full((len(qo_lens), max_token_per_sequence, q.shape[1]), -math.inf, device=q.device)
    row = key = 0
    for i, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        if block_tables is None:
            k, v = (x[key : key + kv_len] for x in (k_cache, v_cache))
        else:
            pages = block_tables[i].long()
            k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:kv_len] for x in (k_cache, v_cache))
        mine = slice(row, row + qo_len)
        out[mine], log2 = attention_reference(q[mine].float(), k, v, causal, sm_scale=scale)
        lse[i, :qo_len] = log2 * math.log(2)
        row, key = row + qo_len, key + kv_len
    return out, lse


def _prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    max_token_per_sequence: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor,
    causal: bool,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    lengths = (max_token_per_sequence, actual_seq_lens_q, actual_seq_lens_kv)
    return _prefill_lse_reference(q, k_cache, v_cache, scale, *lengths, block_tables, causal, output_dtype)[0]


def _prefill_rows_lse_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    max_token_per_sequence: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    causal: bool,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = (max_token_per_sequence, actual_seq_lens_q, actual_seq_lens_kv)
    return _prefill_lse_reference(q, k_cache, v_cache, scale, *lengths, None, causal, output_dtype)


def _prefill_rows_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    max_token_per_sequence: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    causal: bool,
    output_dtype: Optional[torch.dtype] = None,
    **_: Any,
) -> torch.Tensor:
    lengths = (max_token_per_sequence, actual_seq_lens_q, actual_seq_lens_kv)
    return _prefill_lse_reference(q, k_cache, v_cache, scale, *lengths, None, causal, output_dtype)[0]


def _check_written_rows(
    reference: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], **tolerances: Any
) -> bool:
    """Nobody writes the LSE of rows past the end of a request; the reference has -inf there."""
    expected, got = reference["lse"], actual["lse"]
    if expected.shape != got.shape:
        return False
    seen = torch.where(expected == -math.inf, expected, got)
    return default_check(dict(reference), {**actual, "lse": seen}, **tolerances)


_AXES: dict[str, Axis] = {
    "num_qo_heads": Const(abbrev="h"),
    "num_kv_heads": Const(abbrev="kv"),
    "head_dim": Const(abbrev="d"),
    "batch_size": Var(),
    "one": Const(abbrev="", value=1),
}
_PAGED: dict[str, Axis] = {"page_size": Const(abbrev="ps"), "num_pages": Var(), "max_pages": Var("of a request")}
_PAGES = Tensor(("num_pages", "num_kv_heads", "page_size", "head_dim"))
_TABLES = Tensor(("batch_size", "max_pages"), dtype="int32")


_PUBLISHED_CACHE = "; ".join(f"{half}_cache[total_num_pages, num_heads_kv, page_size, head_dim]" for half in "kv")


def _lengths(what: str) -> Tensor:
    return Tensor(("batch_size", "one", "one", "one"), dtype="int32", description=f"{what} of each request")


cudnn_batch_decode_trace = template_of_text(
    "cudnn_batch_decode_h{num_heads_qo}_kv{num_heads_kv}_d{head_dim}_ps{page_size}",
    "cudnn_paged",
    var="batch_size total_num_pages num_pages_per_seq",
    inputs=f"q[batch_size, num_heads_qo, head_dim]; {_PUBLISHED_CACHE}; scale:float32; max_sequence_kv:int32;"
    "block_tables[batch_size, num_pages_per_seq]:int32?",
    outputs="output[batch_size, num_heads_qo, head_dim]<-out=q",
    reference=_cudnn_batch_decode_reference,
    description="Attention of one token per request over its table of pages.",
)
_DECODE_LENGTHS = template_of_text(
    "cudnn_batch_decode_lengths_h{num_heads_qo}_kv{num_heads_kv}_d{head_dim}_ps{page_size}",
    "cudnn_paged",
    hidden="one",
    var="batch_size total_num_pages num_pages_per_seq",
    inputs=f"q[batch_size, num_heads_qo, head_dim]; {_PUBLISHED_CACHE}; scale:float32; max_sequence_kv:int32;"
    "block_tables[batch_size, num_pages_per_seq]:int32?; actual_seq_lens_kv[batch_size, one, one, one]:int32",
    outputs="output[batch_size, num_heads_qo, head_dim]<-out=q",
    reference=_cudnn_batch_decode_reference,
    description="Attention of one token per request over its table of pages, with the keys of each request counted.",
)


def _choose_decode(**arguments: Any) -> TraceTemplate:
    """The published definition has no lengths: a call that has them is recorded with them."""
    return cudnn_batch_decode_trace if arguments.get("actual_seq_lens_kv") is None else _DECODE_LENGTHS


cudnn_batch_decode_dispatch = TraceDispatch(_choose_decode, (cudnn_batch_decode_trace, _DECODE_LENGTHS))
cudnn_batch_prefill_trace = template_of_text(
    "cudnn_batch_prefill_h{num_heads_qo}_kv{num_heads_kv}_d{head_dim}_ps{page_size}",
    "cudnn_paged",
    var="batch_size total_num_pages num_pages_per_seq num_tokens",
    inputs=f"q[num_tokens, num_heads_qo, head_dim]; {_PUBLISHED_CACHE}; scale:float32; max_token_per_sequence:int32;"
    "max_sequence_kv:int32; actual_seq_lens_q[batch_size]:int32; actual_seq_lens_kv[batch_size]:int32;"
    "block_tables[batch_size, num_pages_per_seq]:int32?; causal:int32; return_lse:int32",
    outputs="output[num_tokens, num_heads_qo, head_dim]<-out=q; lse[num_tokens, num_heads_qo]:float32?",
    reference=_cudnn_batch_prefill_reference,
    description="Attention of the last tokens of each request over its table of pages.",
)

_PREFILL_REFERENCES: dict[tuple[bool, bool], Callable[..., Any]] = {
    (True, True): _prefill_lse_reference,
    (True, False): _prefill_reference,
    (False, True): _prefill_rows_lse_reference,
    (False, False): _prefill_rows_reference,
}


def _prefill(paged: bool, return_lse: bool) -> TraceTemplate:
    keys = _PAGES if paged else Tensor(("num_keys", "num_kv_heads", "head_dim"))
    lse = Tensor(
        ("batch_size", "max_token_per_sequence", "num_qo_heads"),
        param="lse",
        dtype="float32",
        description="log of the sum of exp(logit)",
    )
    return TraceTemplate(
        "batch_prefill",
        axes={
            **_AXES,
            **(_PAGED if paged else {"num_keys": Var("keys of all requests")}),
            "num_rows": Var("query tokens of all requests"),
            "max_token_per_sequence": Var(),
        },
        inputs={
            "q": Tensor(("num_rows", "num_qo_heads", "head_dim")),
            "k_cache": keys,
            "v_cache": keys,
            "scale": Scalar(),
            "max_token_per_sequence": Scalar("int32"),
            "actual_seq_lens_q": _lengths("rows"),
            "actual_seq_lens_kv": _lengths("keys"),
            **({"block_tables": _TABLES} if paged else {}),
            "causal": Scalar("bool"),
        },
        outputs={
            "output": Tensor(("num_rows", "num_qo_heads", "head_dim"), param="out", dtype_from="o_data_type"),
            **({"lse": lse} if return_lse else {}),
        },
        name_prefix=f"cudnn_batch_prefill_{'paged' if paged else 'ragged'}{'_lse' if return_lse else ''}",
        reference=_PREFILL_REFERENCES[paged, return_lse],
        check=_check_written_rows if return_lse else default_check,
        description="Attention of the last tokens of each request over its keys.",
    )


_PREFILL = {key: _prefill(*key) for key in itertools.product((True, False), (False, True))}


def _choose_prefill(**arguments: Any) -> TraceTemplate:
    """The published definition has lengths of one dimension and a cache in pages; other forms are ours."""
    lengths = [getattr(arguments.get(f"actual_seq_lens_{part}"), "ndim", 0) for part in ("q", "kv")]
    if lengths == [1, 1] and getattr(arguments.get("k_cache"), "ndim", 0) == 4:
        return cudnn_batch_prefill_trace
    return _PREFILL[arguments.get("block_tables") is not None, bool(arguments.get("return_lse"))]


cudnn_batch_prefill_dispatch = TraceDispatch(_choose_prefill, (cudnn_batch_prefill_trace, *_PREFILL.values()))
