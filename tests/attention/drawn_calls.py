# SPDX-License-Identifier: Apache-2.0
"""Calls of attention for test_drawn_calls.py: plan and run of a wrapper are one call."""

from __future__ import annotations

from typing import Any, Optional

import torch

import flashinfer

from ..sparse.inputs import pattern_of, tensors
from ..traced_calls import traced
from .inputs import Batch
from .wrappers import workspace

_F16 = torch.float16
_HEADS = (4, 2, 64)
_LAYOUTS = {"layout": ("NHD", "HND"), "page_size": (1, 4, 16)}
_UNREAD = ("last_page_len",)  # requests without pages have none
_LENGTHS = {"batch": (1, 3), "longest": (0, 1, 9, 70)}


def batch_attention(
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    kv_lens: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_size: int,
    layout: str,
    out: Optional[torch.Tensor] = None,
) -> Any:
    attention = flashinfer.BatchAttention(layout, device="cpu")
    types = {"q_data_type": _F16, "kv_data_type": _F16}
    attention.plan(qo_indptr, indptr, indices, kv_lens, *_HEADS, _HEADS[2], page_size, causal=True, **types)
    return attention.run(q, (k, v), out)[0]


def block_sparse(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    M: int,
    N: int,
    R: int,
    C: int,
    out: Optional[torch.Tensor] = None,
) -> Any:
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace("cpu", 4 << 20))
    wrapper.plan(indptr, indices, M, N, R, C, *_HEADS)
    return wrapper.run(q, k, v, out=out)


def pod(
    q_p: torch.Tensor,
    k_p: torch.Tensor,
    v_p: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_size: int,
    layout: str,
) -> Any:
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu", 8 << 20), layout)
    wrapper.plan(indptr, indices, last_page_len, *_HEADS, page_size, q_data_type=_F16)
    return wrapper.run(q_p, k_p, v_p, q, (k, v), causal_p=True)


def _repeated(wrapper: Any, q: torch.Tensor, kv: tuple[torch.Tensor, ...], **options: Any) -> Any:
    """Run twice: the first call is of other tensors, the second one repeats its launch."""
    if all(isinstance(x, torch.Tensor) for x in (q, *kv)):
        wrapper.run(torch.zeros_like(q), *_passed(tuple(torch.zeros_like(x) for x in kv), wrapper))
    return wrapper.run(q, *_passed(kv, wrapper), **options)


def _passed(kv: tuple[torch.Tensor, ...], wrapper: Any) -> tuple[Any, ...]:
    return kv if isinstance(wrapper, flashinfer.BatchPrefillWithRaggedKVCacheWrapper) else (kv,)


def batch_decode(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_size: int,
    layout: str,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 4 << 20), layout)
    wrapper.plan(indptr, indices, last_page_len, *_HEADS, page_size, q_data_type=_F16)
    return _repeated(wrapper, q, (k, v), out=out, lse=lse)


def batch_prefill(
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_size: int,
    layout: str,
    custom_mask: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu", 4 << 20), layout)
    options: dict[str, Any] = {"causal": True} if custom_mask is None else {"custom_mask": custom_mask}
    wrapper.plan(qo_indptr, indptr, indices, last_page_len, *_HEADS, page_size, q_data_type=_F16, **options)
    return _repeated(wrapper, q, (k, v), out=out, lse=lse)


def ragged_prefill(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu", 4 << 20))
    wrapper.plan(qo_indptr, kv_indptr, *_HEADS, causal=True, q_data_type=_F16)
    return _repeated(wrapper, q, (k, v), out=out, lse=lse)


def _batch(batch: int, longest: int, is_decode: bool) -> Batch:
    kv_lens = torch.randint(0, longest + 1, (batch,)).tolist()
    qo_lens = [1] * batch if is_decode else [int(torch.randint(0, n + 1, ())) for n in kv_lens]
    return Batch(qo_lens, kv_lens, *_HEADS)


def _paged(batch: int, longest: int, page_size: int, layout: str, is_decode: bool = False) -> dict[str, Any]:
    inputs = _batch(batch, longest, is_decode)
    pages = inputs.pages(page_size, spare=0)
    k, v = (pages.scatter(x, layout) for x in (inputs.k, inputs.v))
    made = dict(zip(("indptr", "indices", "last_page_len"), pages.table, strict=True))
    made |= {"q": inputs.q, "k": k, "v": v, "page_size": page_size, "layout": layout}
    return made if is_decode else {"qo_indptr": inputs.qo_indptr, **made}


def _masked(**sizes: Any) -> dict[str, Any]:
    made = _paged(**sizes)
    pages = made["indptr"].diff() - 1
    keys = torch.where(pages < 0, 0, pages * made["page_size"] + made["last_page_len"])
    return made | {"custom_mask": torch.rand(int((made["qo_indptr"].diff() * keys).sum())) < 0.7}


def _decode(**sizes: Any) -> dict[str, Any]:
    return _paged(**sizes, is_decode=True)


def _ragged(batch: int, longest: int) -> dict[str, Any]:
    x = _batch(batch, longest, False)
    return {"qo_indptr": x.qo_indptr, "kv_indptr": x.kv_indptr, "q": x.q, "k": x.k, "v": x.v}


def _single(keys: int, rows: int, layout: str) -> dict[str, Any]:
    shape = (keys, 2, 64) if layout == "NHD" else (2, keys, 64)
    q = torch.randn(*(rows,) * (rows > 0), 4, 64).half()
    return {"q": q, "k": torch.randn(shape).half(), "v": torch.randn(shape).half(), "kv_layout": layout}


def _mixed(**sizes: Any) -> dict[str, Any]:
    made = _paged(**sizes)
    pages, last = made["indptr"].diff(), made.pop("last_page_len")
    return made | {"kv_lens": torch.where(pages > 0, (pages - 1) * made["page_size"] + last, 0).int()}


def _blocks(M: int, N: int, R: int, C: int) -> dict[str, Any]:
    indptr, indices, _ = pattern_of(M, N, R, C, 0.5)
    return dict(zip(("q", "k", "v"), tensors(M, N, "cpu"), strict=True)) | {
        "indptr": indptr,
        "indices": indices,
        "M": M,
        "N": N,
        "R": R,
        "C": C,
    }


def _pod(rows: int, layout: str, **sizes: Any) -> dict[str, Any]:
    q, k, v = torch.randn(rows, 4, 64).half(), torch.randn(40, 2, 64).half(), torch.randn(40, 2, 64).half()
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return {"q_p": q, "k_p": k, "v_p": v, **_decode(layout=layout, **sizes)}


CALLS = {
    "batch_attention": traced(batch_attention, init=_mixed, **_LENGTHS, **_LAYOUTS),
    "block_sparse": traced(block_sparse, init=_blocks, M=(40,), N=(64,), R=(1, 7, 16), C=(1, 4, 16)),
    "pod": traced(pod, init=_pod, any_number=_UNREAD, rows=(1, 9), **_LENGTHS, **_LAYOUTS),
    "batch_decode": traced(batch_decode, init=_decode, any_number=_UNREAD, **_LENGTHS, **_LAYOUTS),
    "batch_prefill": traced(batch_prefill, init=_paged, any_number=_UNREAD, **_LENGTHS, **_LAYOUTS),
    "batch_prefill with a mask": traced(batch_prefill, init=_masked, any_number=_UNREAD, **_LENGTHS, **_LAYOUTS),
    "ragged_prefill": traced(ragged_prefill, init=_ragged, **_LENGTHS),
    "single_decode": traced(
        flashinfer.single_decode_with_kv_cache, init=_single, keys=(1, 9, 300), rows=(0,), layout=("NHD", "HND")
    ),
    "single_prefill": traced(
        flashinfer.single_prefill_with_kv_cache, init=_single, keys=(1, 9, 300), rows=(1, 5), layout=("NHD", "HND")
    ),
}
