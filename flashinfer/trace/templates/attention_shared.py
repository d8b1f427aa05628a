# SPDX-License-Identifier: Apache-2.0
"""What the templates of decode and prefill share: axes of caches and page tables, and the choice among forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Optional

from ..check import default_check
from ..template import Axis, Const, Tensor, TraceDispatch, TraceTemplate, Var

__all__ = [
    *("PAGE_TABLE", "QO_INDPTR"),
    *("by_layout_and_lse", "by_wrapper", "cache_inputs", "heads", "keys_of_request", "paged_axes"),
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
) -> TraceDispatch:
    """Choose among ``make(layout, pair)`` by the layout of the wrapper and the form of its cache.

    ``published`` stands for a pair in the layout NHD, and comes first.
    """
    forms = [(layout, pair) for layout in ("NHD", "HND") for pair in (False, True)]
    if published is not None:
        forms.insert(0, ("NHD", True))
    templates = {form: make(*form) for form in forms}
    if published is not None:
        templates["NHD", True] = published

    def choose(**arguments: Any) -> TraceTemplate:
        layout = getattr(arguments.get("self"), "_kv_layout", "NHD")
        return templates[layout, isinstance(arguments.get(param), tuple)]

    return TraceDispatch(choose, tuple(templates.values()))
