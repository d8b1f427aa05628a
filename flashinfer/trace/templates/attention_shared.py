# SPDX-License-Identifier: Apache-2.0
"""Parts of the templates of decode and prefill: axes of caches and page tables, and the choice among forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Optional

import torch

from ..check import default_check
from ..template import Axis, Const, Tensor, TraceDispatch, TraceTemplate, Var
from .shared import even_indptr

__all__ = [
    *("PAGE_TABLE", "QO_INDPTR"),
    *("by_layout_and_lse", "by_wrapper", "cache_inputs", "halves_of", "heads", "keys_of_request", "paged_axes"),
    *("one_request_table", "table_of_all_pages"),
]

#: Known to ``plan``, not to ``run``: a trace of ``run`` describes them and leaves their sizes open.
PAGE_TABLE: dict[str, Tensor] = {
    "kv_indptr": Tensor(("indptr_len",), dtype="int32", optional=True, description="where each request's pages begin"),
    "kv_indices": Tensor(("num_indices",), dtype="int32", optional=True, description="pages of all requests"),
    "kv_last_page_len": Tensor(
        ("batch_size",), dtype="int32", optional=True, description="entries in use of the last page"
    ),
}

QO_INDPTR = Tensor(("indptr_len",), dtype="int32", optional=True, description="where each request's rows begin")


def heads(layout: str) -> dict[str, Axis]:
    return {
        "num_qo_heads": Const(abbrev="h"),
        "num_kv_heads": Const(abbrev="kv"),
        "head_dim": Const(abbrev="d"),
        "heads_first": Const("1 for the layout HND", abbrev="", value=int(layout == "HND")),
    }


def paged_axes(layout: str, pair: bool) -> dict[str, Axis]:
    return {
        **heads(layout),
        "page_size": Const(abbrev="ps"),
        "num_pages": Var(),
        "indptr_len": Var("batch_size + 1"),
        "num_indices": Var("pages of all requests"),
        "batch_size": Var(),
        **({} if pair else {"kv": Const("keys, then values", abbrev="", value=2)}),
    }


def cache_inputs(layout: str, pair: bool, param: str = "paged_kv_cache", part: str = "") -> dict[str, Tensor]:
    """The cache that ``param`` names; ``part`` ends the names of its halves and of its axis of pages.

    Where pages hold one token, a cache may lack their axis.
    """
    inner = ("page_size", "num_kv_heads") if layout == "NHD" else ("num_kv_heads", "page_size")
    pages = f"num_pages{part}"
    if not pair:
        return {param: Tensor((pages, "kv", *inner, "head_dim"), may_lack="page_size")}
    halves = (f"k_cache{part}", f"v_cache{part}")
    form = Tensor((pages, *inner, "head_dim"), param=param, may_lack="page_size")
    return {name: replace(form, tuple_idx=i) for i, name in enumerate(halves)}


def keys_of_request(layout: str, length: str, head_dim: str) -> Tensor:
    """Keys or values of one request, not in pages."""
    return Tensor((length, "num_kv_heads", head_dim) if layout == "NHD" else ("num_kv_heads", length, head_dim))


def _single_check(
    reference_outputs: Any, actual_outputs: Any, *, rtol: float = 1e-3, atol: float = 1e-3, **limits: Any
) -> bool:
    """The published tolerance of single requests; no cosine."""
    return default_check(reference_outputs, actual_outputs, rtol=rtol, atol=atol, **{"min_cos_sim": None, **limits})


def halves_of(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache: a pair, or a tensor that has both in its second dimension, or one for both."""
    if isinstance(cache, torch.Tensor):
        return cache.unbind(1) if cache.ndim == 5 else (cache, cache)  # type: ignore[return-value]
    return cache


def table_of_all_pages(num_requests: int, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the page table of a call without a plan: pages in order, split evenly among the requests, all full."""
    pages, page_size = cache.shape[:2]
    kv_indptr = even_indptr(pages, num_requests, cache.device)
    return kv_indptr, torch.arange(pages, device=cache.device), torch.full_like(kv_indptr[1:], page_size)


def one_request_table(num_pages: int, page_size: int, device: Any) -> dict[str, torch.Tensor]:
    """Arguments of plan: one request that has all pages, which are full."""
    return {
        "kv_indptr": torch.tensor([0, num_pages], dtype=torch.int32, device=device),
        "kv_indices": torch.arange(num_pages, dtype=torch.int32, device=device),
        "kv_last_page_len": torch.full((1,), page_size, dtype=torch.int32, device=device),
    }


def by_layout_and_lse(make: Callable[[str, bool], TraceTemplate], published: TraceTemplate) -> TraceDispatch:
    """Choose by the arguments of a function of one request.

    ``published`` describes the layout NHD without LSE, values as wide as keys; ``make(layout, return_lse)`` the rest.
    """
    ours = {(layout, lse): make(layout, lse) for layout in ("NHD", "HND") for lse in (False, True)}

    def choose(**arguments: Any) -> TraceTemplate:
        form = arguments.get("kv_layout", "NHD"), bool(arguments.get("return_lse"))
        k, v = (getattr(arguments.get(name), "shape", (0,))[-1:] for name in ("k", "v"))
        return published if form == ("NHD", False) and k == v else ours[form]

    return TraceDispatch(choose, (published, *ours.values()))


def by_wrapper(
    make: Callable[[str, bool], TraceTemplate],
    param: str = "paged_kv_cache",
    published: Optional[TraceTemplate] = None,
    one_tensor: bool = False,
) -> TraceDispatch:
    """Choose among ``make(layout, pair)`` by the layout of the wrapper and the form of its cache.

    ``published`` stands for a pair in the layout NHD, with ``one_tensor`` for both forms, and comes first.
    """
    forms = [(layout, pair) for layout in ("NHD", "HND") for pair in (False, True)]
    published_forms = [] if published is None else [("NHD", True), *([("NHD", False)] if one_tensor else [])]
    templates = {form: make(*form) for form in forms if form not in published_forms}

    def choose(**arguments: Any) -> TraceTemplate:
        layout = getattr(arguments.get("self"), "_kv_layout", "NHD")
        form = layout, isinstance(arguments.get(param), (tuple, list))
        return published if published is not None and form in published_forms else templates[form]

    return TraceDispatch(choose, (*([] if published is None else [published]), *templates.values()))
