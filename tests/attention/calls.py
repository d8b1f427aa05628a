# SPDX-License-Identifier: Apache-2.0
"""One signature for every attention API: ``call(batch, what, layout=, page_size=, form=, ...) -> (out, lse)``.

``what`` is an Attention, or one for each request where their masks differ; everything else in it must be the same.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Optional, Sequence

import torch
from hypothesis import assume

import flashinfer

from .inputs import Batch, Pages, combine, int32, to_layout
from .reference import Attention, Result

What = Attention | Sequence[Attention]

#: Largest difference of outputs and scores from the reference, relative and absolute. P is rounded to the dtype of V
#: on CUDA; scores are sums in float32 everywhere.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@functools.cache
def workspace(device: str) -> torch.Tensor:
    """Return the workspace that all calls share, filled with bytes (0x7F) that no result may contain."""
    return torch.full((64 << 20,), 0x7F, dtype=torch.uint8, device=device)


def grow_workspace(wrapper: Any, size: int) -> None:
    """Replace the workspace by one of exactly ``size`` bytes if it is smaller, as fixed split sizes may require."""
    if size > wrapper._float_workspace_buffer.nbytes:
        assume(size <= 1 << 30)
        buffer = torch.full((size,), 0x7F, dtype=torch.uint8, device=wrapper.device)
        wrapper.reset_workspace_buffer(buffer, wrapper._int_workspace_buffer)


def first(what: What) -> Attention:
    return what if isinstance(what, Attention) else what[0]


def settings(what: What) -> dict[str, Any]:
    """Return the arguments that have the same names in every API."""
    one = first(what)
    return {
        "pos_encoding_mode": "ROPE_LLAMA" if one.rope else "ALIBI" if one.alibi else "NONE",
        "window_left": one.window_left,
        "logits_soft_cap": one.logits_soft_cap or None,
        "sm_scale": one.sm_scale,
        "rope_scale": one.rope_scale if one.rope else None,
        "rope_theta": one.rope_theta if one.rope else None,
    }


def scales(what: What) -> dict[str, float]:
    """Return values of ``q_scale``, ``k_scale`` and ``v_scale`` other than 1."""
    one = first(what)
    return {name: value for name in ("q_scale", "k_scale", "v_scale") if (value := getattr(one, name)) != 1}


def sinks(what: What) -> dict[str, Any]:
    one = first(what)
    return {} if one.sinks is None else {"sinks": one.sinks}


def masks(what: What) -> Optional[torch.Tensor]:
    """Return the masks of all requests, flattened and concatenated."""
    each = [what] if isinstance(what, Attention) else what
    if each[0].mask is None:
        return None
    return torch.cat([one.mask.reshape(-1) for one in each if one.mask is not None])


def items(what: What, device: str) -> dict[str, Any]:
    """Return the arguments of multi-item scoring."""
    each = [what] if isinstance(what, Attention) else what
    if each[0].prefix_len is None:
        return {}
    places = [one.token_pos for one in each if one.token_pos is not None]
    width = max(len(x) for x in places)
    table = torch.zeros(len(each), width, dtype=torch.int32)
    for row, place in zip(table, places, strict=True):
        row[: len(place)] = place
    return {
        "prefix_len_ptr": torch.tensor([one.prefix_len for one in each], dtype=torch.int32).to(torch.uint32).to(device),
        "token_pos_in_items_ptr": table.to(torch.uint16).reshape(-1).to(device),
        "token_pos_in_items_len": width,
        "max_item_len_ptr": torch.tensor([int(x.max()) for x in places], dtype=torch.int32).to(torch.uint16).to(device),
    }


def single_decode(batch: Batch, what: What, *, layout: str = "NHD", tensor_cores: bool = False, **_: Any) -> Result:
    k, v = batch.dense(layout)
    o, lse = flashinfer.single_decode_with_kv_cache(
        batch.q[0], k, v, layout, use_tensor_cores=tensor_cores, return_lse=True, **settings(what), **scales(what)
    )
    return o[None], lse[None]


def single_prefill(batch: Batch, what: What, *, layout: str = "NHD", **_: Any) -> Result:
    k, v = batch.dense(layout)
    factors = None if batch.k_sf is None else tuple(to_layout(x, layout) for x in (batch.k_sf, batch.v_sf))
    one = first(what)
    return flashinfer.single_prefill_with_kv_cache(
        batch.q,
        *(k, v),
        custom_mask=one.mask,
        causal=one.causal,
        kv_layout=layout,
        kv_cache_sf=factors,
        return_lse=True,
        **settings(what),
        **scales(what),
    )


def batch_decode(
    batch: Batch,
    what: What,
    *,
    layout: str = "NHD",
    page_size: int = 4,
    form: str = "pair",
    tensor_cores: bool = False,
    plan: Optional[dict[str, Any]] = None,
    **_: Any,
) -> Result:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(batch.device), layout, use_tensor_cores=tensor_cores
    )
    pages = batch.pages(page_size)
    arguments = (*pages.table, *batch.heads, batch.head_dim_qk, page_size)
    options = {
        "q_data_type": batch.dtype,
        "kv_data_type": batch.kv_dtype,
        "q_len_per_req": batch.qo_lens[0] if batch.qo_lens else 1,
        **settings(what),
        **(plan or {}),
    }
    grow_workspace(wrapper, wrapper.workspace_size(*arguments, **options)[0])
    wrapper.plan(*arguments, **options)
    factors = None if batch.k_sf is None else batch.cache_sf(pages, layout)
    cache = batch.cache(pages, layout, form)
    return wrapper.run(batch.q, cache, kv_cache_sf=factors, return_lse=True, **scales(what), **sinks(what))


def tensor_core_decode(batch: Batch, what: What, **options: Any) -> Result:
    return batch_decode(batch, what, tensor_cores=True, **options)


def prefill_options(batch: Batch, what: What, plan: Optional[dict[str, Any]]) -> dict[str, Any]:
    return {
        "custom_mask": masks(what),
        "causal": first(what).causal,
        "q_data_type": batch.dtype,
        "kv_data_type": batch.kv_dtype,
        **settings(what),
        **items(what, batch.device),
        **(plan or {}),
    }


def paged_prefill(
    batch: Batch,
    what: What,
    *,
    layout: str = "NHD",
    page_size: int = 4,
    form: str = "pair",
    plan: Optional[dict[str, Any]] = None,
    **_: Any,
) -> Result:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(batch.device), layout)
    pages = batch.pages(page_size)
    arguments = (batch.qo_indptr, *pages.table, *batch.heads, batch.head_dim_qk, page_size, batch.head_dim_vo)
    options = prefill_options(batch, what, plan)
    grow_workspace(wrapper, wrapper.workspace_size(*arguments, **options)[0])
    wrapper.plan(*arguments, **options)
    factors = None if batch.k_sf is None else batch.cache_sf(pages, layout)
    cache = batch.cache(pages, layout, form)
    return wrapper.run(batch.q, cache, kv_cache_sf=factors, return_lse=True, **scales(what), **sinks(what))


def ragged_workspace_size(batch: Batch, options: dict[str, Any]) -> int:
    """Return the workspace size as the paged wrapper computes it: rows are planned like pages of one token."""
    pages = batch.pages(1)
    probe = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(batch.device))
    arguments = (batch.qo_indptr, *pages.table, *batch.heads, batch.head_dim_qk, 1, batch.head_dim_vo)
    return probe.workspace_size(*arguments, **options)[0]


def ragged_prefill(
    batch: Batch, what: What, *, layout: str = "NHD", plan: Optional[dict[str, Any]] = None, **_: Any
) -> Result:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(batch.device), layout)
    options = prefill_options(batch, what, plan)
    grow_workspace(wrapper, ragged_workspace_size(batch, options))
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, batch.head_dim_qk, batch.head_dim_vo, **options)
    factors = None if batch.k_sf is None else tuple(to_layout(x, layout) for x in (batch.k_sf, batch.v_sf))
    return wrapper.run(batch.q, *batch.dense(layout), kv_cache_sf=factors, return_lse=True, **scales(what))


def batch_attention(
    batch: Batch, what: What, *, layout: str = "NHD", page_size: int = 4, form: str = "pair", **_: Any
) -> Result:
    one = first(what)
    wrapper = flashinfer.BatchAttention(layout, device=batch.device)
    pages = batch.pages(page_size)
    wrapper.plan(
        batch.qo_indptr,
        *(pages.indptr, pages.indices, pages.lens),
        *batch.heads,
        *(batch.head_dim_qk, batch.head_dim_vo),
        page_size,
        causal=one.causal,
        sm_scale=one.sm_scale,
        logits_soft_cap=one.logits_soft_cap or None,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
    )
    factors = None if batch.k_sf is None else batch.cache_sf(pages, layout)
    cap = one.logits_soft_cap
    given = {name: value for name, value in scales(what).items() if name != "q_scale"}
    return wrapper.run(batch.q, batch.cache(pages, layout, form), logits_soft_cap=cap, kv_cache_sf=factors, **given)


def attention_sink(
    batch: Batch, what: What, *, layout: str = "NHD", page_size: int = 4, form: str = "pair", **_: Any
) -> Result:
    one = first(what)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(batch.device),
        layout,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        head_dim_qk=batch.head_dim_qk,
        head_dim_vo=batch.head_dim_vo,
        window_left=one.window_left,
    )
    pages = batch.pages(page_size)
    wrapper.plan(
        batch.qo_indptr,
        *pages.table,
        *batch.heads,
        batch.head_dim_qk,
        page_size,
        head_dim_vo=batch.head_dim_vo,
        causal=one.causal,
        window_left=one.window_left,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
    )
    scale = batch.head_dim_qk**-0.5 if one.sm_scale is None else one.sm_scale
    return wrapper.run(batch.q, batch.cache(pages, layout, form), one.sinks, scale, return_lse=True)


def cascade(
    batch: Batch, what: What, *, layout: str = "NHD", page_size: int = 4, form: str = "pair", **_: Any
) -> Result:
    """Run a cascade of two levels: the common prefix of all requests, and the remaining keys of each request."""
    prefix, one = batch.shared_prefix, first(what)
    own = [slice(a + prefix, b) for a, b in itertools.pairwise(batch.kv_indptr_host)]
    pages = Pages([prefix, *(n - prefix for n in batch.kv_lens)], page_size, batch.device)
    k, v = (pages.scatter(torch.cat([x[:prefix], *(x[part] for part in own)]), layout) for x in (batch.k, batch.v))
    cut = pages.indptr_host[1]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(batch.device), layout)
    given = {name: value for name, value in settings(what).items() if name != "pos_encoding_mode"}
    wrapper.plan(
        [int32([0, len(batch.q)], batch.device), batch.qo_indptr],
        [pages.indptr[:2], pages.indptr[1:] - cut],
        [pages.indices[:cut], pages.indices[cut:]],
        [pages.last_page_len[:1], pages.last_page_len[1:]],
        *batch.heads,
        batch.head_dim_qk,
        page_size,
        causal=one.causal,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        **given,
    )
    return wrapper.run(batch.q, combine(k, v, form)), None  # type: ignore[return-value]


def pod(batch: Batch, what: What, *, layout: str = "NHD", page_size: int = 4, form: str = "pair", **_: Any) -> Result:
    """Run the first request as prefill and the others as decode."""
    one, new, old = first(what), batch.part(0, 1), batch.part(1, len(batch.qo_lens))
    given = {name: value for name, value in settings(what).items() if name != "logits_soft_cap"}
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(batch.device), layout)
    pages = old.pages(page_size)
    dtypes = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
    wrapper.plan(*pages.table, *batch.heads, batch.head_dim_qk, page_size, **dtypes, **given)
    results = wrapper.run(
        *(new.q, *new.dense(layout), old.q, old.cache(pages, layout, form)),
        causal_p=one.causal,
        kv_layout_p=layout,
        **{f"{name}_p": value for name, value in given.items()},
    )
    return torch.cat(results), None  # type: ignore[return-value]


def batch_pod(
    batch: Batch, what: What, *, layout: str = "NHD", page_size: int = 4, form: str = "pair", **_: Any
) -> Result:
    """Run the first two requests as prefill and the others as decode."""
    new, old = batch.part(0, 2), batch.part(2, len(batch.qo_lens))
    given = {name: value for name, value in settings(what).items() if name != "logits_soft_cap"}
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(batch.device), layout)
    tables = [(some, some.pages(page_size)) for some in (new, old)]
    wrapper.plan(
        *(x for some, pages in tables for x in (some.qo_indptr, *pages.table)),
        *batch.heads,
        batch.head_dim_qk,
        page_size,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        **given,
    )
    halves = (x for some, pages in tables for x in (some.q, some.cache(pages, layout, form)))
    outputs, scores = wrapper.run(*halves, causal_p=first(what).causal, return_lse=True, **scales(what))
    return torch.cat(outputs), torch.cat(scores)


BLOCK = 16


def block_sparse(batch: Batch, what: What, **_: Any) -> Result:
    """Run block-sparse attention on the 16 x 16 blocks that the mask touches; pass the mask if it cuts blocks."""
    one = first(what)
    assert one.mask is not None
    (rows, columns), whole = one.mask.shape, one.mask
    assert columns % BLOCK == 0
    padded = torch.nn.functional.pad(whole, (0, 0, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
    used = blocks.any(-1).any(-1)
    indptr = int32([0, *used.sum(1).cumsum(0).tolist()], batch.device)
    inner = blocks[used]
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(batch.device))
    wrapper.plan(
        *(indptr, used.nonzero()[:, 1].int(), rows, columns, BLOCK, BLOCK),
        *batch.heads,
        batch.head_dim_qk,
        mask=None if rows % BLOCK == 0 and inner.all() else inner,
        logits_soft_cap=one.logits_soft_cap or None,
        sm_scale=one.sm_scale,
        q_data_type=batch.dtype,
        kv_data_type=batch.kv_dtype,
        o_data_type=batch.dtype,
    )
    return wrapper.run(batch.q, *batch.dense(), return_lse=True)


def mla(batch: Batch, what: What, *, page_size: int = 4, **_: Any) -> Result:
    """Run MLA: keys are [compressed part, rotary part], and values are the compressed part."""
    one, width = first(what), batch.head_dim_vo
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(batch.device))
    pages = batch.pages(page_size)
    scale = 192**-0.5 if one.sm_scale is None else one.sm_scale
    wrapper.plan(
        *(batch.qo_indptr, pages.indptr, pages.indices, pages.lens),
        *(batch.num_qo_heads, width, batch.head_dim_qk - width),
        *(page_size, one.causal, scale, batch.dtype, batch.kv_dtype),
    )
    ckv, kpe = (pages.scatter(x.contiguous(), "NHD").squeeze(2) for x in batch.k.tensor_split([width], dim=-1))
    return wrapper.run(*(x.contiguous() for x in batch.q.tensor_split([width], dim=-1)), ckv, kpe, return_lse=True)


def check(got: Result, expected: Result, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Check that outputs and scores match the reference and that no NaN occurs."""
    tolerance = TOLERANCES[dtype] * factor
    o, lse = got
    assert o.shape == expected[0].shape and o.dtype == dtype
    torch.testing.assert_close(o.float(), expected[0], rtol=tolerance, atol=tolerance)
    if lse is None:  # this API returns no LSE
        return
    assert lse.shape == expected[1].shape
    torch.testing.assert_close(lse, expected[1], rtol=min(tolerance, 2e-3), atol=min(tolerance, 2e-3))
