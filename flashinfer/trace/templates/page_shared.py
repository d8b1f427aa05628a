# SPDX-License-Identifier: Apache-2.0
"""Parts of the templates of ``flashinfer.page``: axes, index tensors, and the slots they name."""

from __future__ import annotations

from typing import Any, Callable, Union

import torch

from ..template import Axis, Const, Tensor, TraceDispatch, TraceTemplate, Var
from .shared import even_indptr

__all__ = [
    "TABLES",
    "append_init",
    "append_tables",
    "by_cache_form",
    "cache_axes",
    "cache_dims",
    "slots_of",
    "write_slots",
]

Cache = Union[torch.Tensor, tuple[torch.Tensor, ...]]

TABLES: dict[str, Tensor] = {
    "batch_indices": Tensor(("nnz",), dtype="int32", description="request of each row; negative: the row is skipped"),
    "positions": Tensor(("nnz",), dtype="int32", description="place of each row in its request"),
    "kv_indices": Tensor(("num_indices",), dtype="int32", description="pages of all requests"),
    "kv_indptr": Tensor(("indptr_len",), dtype="int32", description="where each request's pages begin"),
    "kv_last_page_len": Tensor(("batch_size",), dtype="int32", description="entries in use of the last page"),
}
TABLE_NOTES = {name: tensor.description for name, tensor in TABLES.items()}


def cache_axes(layout: str, pair: bool) -> dict[str, Axis]:
    return {
        "nnz": Var("rows"),
        "num_kv_heads": Const(abbrev="h"),
        "head_dim": Const(abbrev="d"),
        "num_pages": Var(),
        **({} if pair else {"kv": Const("keys, then values", abbrev="", value=2)}),
        "page_size": Const(abbrev="ps"),
        "num_indices": Var("pages of all requests"),
        "indptr_len": Var("batch_size + 1"),
        "batch_size": Var(),
        "heads_first": Const("1 for the layout HND", abbrev="", value=int(layout == "HND")),
    }


def cache_dims(layout: str, pair: bool, head_dim: str) -> tuple[str, ...]:
    """Axes of a cache that holds keys and values, or of one of a pair."""
    inner = ("page_size", "num_kv_heads") if layout == "NHD" else ("num_kv_heads", "page_size")
    return ("num_pages", *(() if pair else ("kv",)), *inner, head_dim)


def by_cache_form(
    make: Callable[[str, bool], TraceTemplate],
    published: TraceTemplate,
    fits: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> TraceDispatch:
    """Choose by the layout and the type of the cache.

    ``published`` is the template of a pair in the layout NHD, for calls that fit; ``make(layout, pair)`` are those of
    the rest.
    """
    ours = {(layout, pair): make(layout, pair) for layout in ("NHD", "HND") for pair in (False, True)}

    def choose(**arguments: Any) -> TraceTemplate:
        form = arguments.get("kv_layout", "NHD"), isinstance(arguments.get("paged_kv_cache"), tuple)
        return published if form == ("NHD", True) and fits(arguments) else ours[form]

    return TraceDispatch(choose, (published, *ours.values()))


def halves_of(cache: Cache) -> tuple[torch.Tensor, ...]:
    """Keys and values of a cache in either form. One tensor of four dimensions is keys alone."""
    if isinstance(cache, (tuple, list)):
        return tuple(cache)
    return cache.unbind(1) if cache.ndim == 5 else (cache,)


def slots_of(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that are written, and the page and the entry of each."""
    rows = torch.nonzero(batch_indices >= 0).flatten()
    positions = positions[rows].long()
    pages = kv_indices[kv_indptr[batch_indices[rows].long()].long() + positions // page_size].long()
    return rows, pages, positions % page_size


def write_slots(
    cache: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor], values: torch.Tensor, heads_first: int
) -> None:
    """Rows of values into their slots of a cache, as bytes: torch cannot index every dtype."""
    rows, pages, entries = slots
    values = values.contiguous().view(torch.uint8)
    cache.view(torch.uint8).movedim(2 if heads_first else 1, 1)[pages, entries] = values[rows]


def append_init(
    nnz: int, batch_size: int, num_pages: int, page_size: int, num_indices: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Pages in any order, shared out evenly; rows are the last tokens of their requests, the first row is skipped."""
    pages_each, rows_each = num_indices // batch_size, -(-nnz // batch_size)
    order = torch.randperm(num_pages, device=device)[:num_indices]
    row = torch.arange(nnz, device=device)
    batch_indices = row // rows_each
    positions = pages_each * page_size - rows_each + row % rows_each
    batch_indices[:1] = -1
    return {
        "batch_indices": batch_indices.to(torch.int32),
        "positions": positions.to(torch.int32),
        "kv_indices": order.to(torch.int32),
        "kv_indptr": torch.arange(batch_size + 1, dtype=torch.int32, device=device) * pages_each,
        "kv_last_page_len": torch.full((batch_size,), page_size, dtype=torch.int32, device=device),
    }


def append_tables(
    generator: torch.Generator, nnz: int, batch_size: int, page_size: int, num_pages: int, num_kv_indices: int
) -> tuple[int, dict[str, torch.Tensor]]:
    """Pages in any order, shared out evenly; rows are the last tokens of their requests, whose pages are full.

    Returns the number of pages, which is larger than ``num_pages`` where the rows need more, and the tables.
    """
    needed = max(-(-nnz // (batch_size * page_size)), 1)
    used = num_kv_indices or batch_size * max(num_pages // batch_size, needed)
    num_pages, device = max(num_pages, used), generator.device
    starts, kv_indptr = even_indptr(nnz, batch_size, device), even_indptr(used, batch_size, device)
    rows = torch.arange(nnz, dtype=torch.int32, device=device)
    batch_indices = torch.repeat_interleave(starts.diff())
    ends = kv_indptr.diff() * page_size - starts[1:]  # end of the tokens of each request minus the end of its rows
    return num_pages, {
        "batch_indices": batch_indices.int(),
        "positions": rows + ends[batch_indices],
        "kv_indices": torch.randperm(num_pages, generator=generator, device=device)[:used].int(),
        "kv_indptr": kv_indptr,
        "kv_last_page_len": torch.full((batch_size,), page_size, dtype=torch.int32, device=device),
    }
