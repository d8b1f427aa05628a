# SPDX-License-Identifier: Apache-2.0
"""The form of ``plan`` and ``run`` that declares what a call will bring: layouts, LSE, scales, sinks.

``plan`` turns every table into the four arrays of the older form, and keeps what was declared. ``run`` holds a call to
it, splits packed tensors, and calls the older form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..attention.outputs import add_sinks
from .metadata import MLAPlanMetadata, csr_of_dense

__all__ = ["Declared", "plan_tables", "split_query", "with_sinks"]

Pair = tuple[torch.Tensor, torch.Tensor]
Halves = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor], None]

_LAYOUTS = ("packed", "split")
_LSE_MODES = ("none", "base2", "basee")
_SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")
_OUTPUT_SCALES = ("none", "per-tensor")
_SM100 = "needs an SM100 device; no kernel here has it"


def _one_of(op: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{op}: {name} must be {', '.join(map(repr, choices))}, got {value!r}")


@dataclass(frozen=True)
class Declared:
    """Properties of calls of ``run`` that ``plan`` declared; None leaves one to each call."""

    query_layout: Optional[str] = None
    kv_cache_layout: Optional[str] = None
    lse_mode: str = "none"
    is_lse_fixed: bool = False  #: True if ``lse_mode`` binds ``run``: in the older form, "none" only means "not said"
    output_dtype: Optional[torch.dtype] = None
    scale_mode: str = "default"
    use_sinks: bool = False

    def check(self, op: str, q_dtype: torch.dtype, output_scale: str, skip_softmax: bool) -> Declared:
        for name in ("query_layout", "kv_cache_layout"):
            if getattr(self, name) is not None:
                _one_of(op, name, getattr(self, name), _LAYOUTS)
        _one_of(op, "lse_mode", self.lse_mode, _LSE_MODES)
        _one_of(op, "scale_mode", self.scale_mode, _SCALE_MODES)
        _one_of(op, "output_scale", output_scale, _OUTPUT_SCALES)
        if self.output_dtype not in (None, q_dtype):
            raise ArgumentError(f"{op}: output_dtype must be {q_dtype} (that of the queries), got {self.output_dtype}")
        if output_scale != "none":
            raise ArgumentError(f"{op}: output_scale must be 'none' (another {_SM100}), got {output_scale!r}")
        if self.scale_mode == "bmm-tensor":
            raise ArgumentError(f"{op}: scale_mode must not be 'bmm-tensor', which {_SM100}, got 'bmm-tensor'")
        if skip_softmax:
            raise ArgumentError(f"{op}: skip_softmax must be False (it {_SM100}), got True")
        return self

    def check_call(self, op: str, is_packed: tuple[bool, bool], return_lse: bool, is_natural: bool) -> bool:
        """Hold a call to what was declared; return whether the LSE is in natural logarithms."""
        for name, layout, packed in zip(
            ("query", "kv_cache"), (self.query_layout, self.kv_cache_layout), is_packed, strict=True
        ):
            if layout is not None and (layout == "packed") != packed:
                got = "one tensor" if packed else "a pair"
                must = "one tensor" if layout == "packed" else "a pair"
                raise ArgumentError(f"{op}: {name} must be {must} ({layout!r}, as planned), got {got}")
        if not self.is_lse_fixed:
            return is_natural
        if return_lse and self.lse_mode == "none":
            raise ArgumentError(f"{op}: return_lse must be False (plan had lse_mode='none'), got True")
        if is_natural and self.lse_mode != "basee":
            raise ArgumentError(
                f"{op}: return_lse_base_on_e must be False (plan had lse_mode={self.lse_mode!r}), got True"
            )
        return self.lse_mode == "basee"


def plan_tables(
    op: str,
    csr: dict[str, Optional[torch.Tensor]],
    dense: dict[str, Any],
    metadata: Optional[MLAPlanMetadata],
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four arrays of the older form from whichever form was given."""
    has_csr = any(x is not None for x in csr.values())
    has_dense = any(x is not None for x in dense.values())
    if metadata is not None:
        if has_csr or has_dense:
            given = next(name for name, x in {**csr, **dense}.items() if x is not None)
            raise ArgumentError(f"{op}: {given} must be None (metadata has the tables), got a value")
        if not isinstance(metadata, MLAPlanMetadata):
            raise TypeError(f"{op}: metadata must be MLAPlanMetadata, got a {type(metadata).__name__}")
    elif has_csr and has_dense:
        raise ArgumentError(
            f"{op}: the arrays {', '.join(csr)} and the tables {', '.join(dense)} cannot be mixed, got some of both"
        )
    elif has_dense:
        missing = [name for name in ("cum_seq_lens_q", "block_tables", "seq_lens") if dense[name] is None]
        if missing:
            raise TypeError(f"{op}: {missing[0]} must be Tensor, got a NoneType")
        metadata = MLAPlanMetadata.dense(**dense)
    elif not has_csr:
        raise TypeError(f"{op}: metadata, {', '.join(csr)}, or cum_seq_lens_q and block_tables must be given, got none")
    else:
        missing = [name for name, x in csr.items() if x is None]
        if missing:
            raise TypeError(f"{op}: {missing[0]} must be Tensor, got a NoneType")
        return tuple(csr.values())  # type: ignore[return-value]
    if metadata.has_csr:
        if metadata.has_dense:
            _check_pages(op, metadata, page_size)
        return metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr  # type: ignore[return-value]
    tables = metadata.cum_seq_lens_q, metadata.block_tables, metadata.seq_lens, metadata.max_q_len
    return csr_of_dense(op, *tables, page_size)  # type: ignore[arg-type]


def _check_pages(op: str, metadata: MLAPlanMetadata, page_size: int) -> None:
    tables = metadata.cum_seq_lens_q, metadata.block_tables, metadata.seq_lens, metadata.max_q_len
    _, begins, pages, _ = csr_of_dense(op, *tables, page_size)  # type: ignore[arg-type]
    assert metadata.kv_indptr is not None and metadata.kv_indices is not None
    mine = metadata.kv_indptr.cpu()[: begins.numel()]
    if not torch.equal(mine.long(), begins.long()):
        raise ArgumentError(
            f"{op}: kv_indptr and block_tables must agree, got {mine.tolist()} and {begins.tolist()} pages"
        )
    if not torch.equal(metadata.kv_indices[: pages.numel()].cpu().long(), pages.cpu().long()):
        raise ArgumentError(f"{op}: kv_indices and block_tables must agree, got different page ids")


def split_query(
    op: str, halves: dict[str, Any], query: Halves, kv_cache: Halves, width: int
) -> tuple[list[Any], tuple[bool, bool]]:
    """Return the four tensors of the older form, and whether queries and cache were packed.

    ``halves`` are the four by name, None where a call did not give them; ``width`` is the columns of the value.
    """
    old = [name for name, x in halves.items() if x is not None]
    parts: list[Any] = []
    packed: list[bool] = []
    if query is None and kv_cache is None and not old:
        raise TypeError(f"{op}: query and kv_cache must be given, got neither")
    for name, value, pair in (("query", query, ("q_nope", "q_pe")), ("kv_cache", kv_cache, ("ckv_cache", "kpe_cache"))):
        given = [half for half in pair if halves[half] is not None]
        if value is not None and given:
            raise TypeError(f"{op}: {name} or {given[0]} must be given, not both, got both")
        if value is None:
            if len(given) == 1:
                raise ArgumentError(f"{op}: {pair[0]} and {pair[1]} must both be provided, got {given[0]} alone")
            if not given:
                raise TypeError(f"{op}: {name} must be given, got None")
            parts += [halves[half] for half in pair]
            packed.append(False)
        elif isinstance(value, torch.Tensor):
            if value.ndim != 3 or value.shape[-1] < width:
                raise ArgumentError(
                    f"{op}: {name} must have 3 dimensions and at least {width} columns, got {tuple(value.shape)}"
                )
            parts += [value[..., :width], value[..., width:]]
            packed.append(True)
        else:
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise TypeError(f"{op}: {name} must be Tensor or a pair of them, got a {type(value).__name__}")
            parts += list(value)
            packed.append(False)
    return parts, (packed[0], packed[1])


def with_sinks(
    call: Callable[[Optional[torch.Tensor]], Pair], sinks: torch.Tensor, lse: Optional[torch.Tensor], is_natural: bool
) -> Pair:
    """Run a call that gives a base-2 LSE, add a logit without a value for each head, and convert the LSE."""
    out, scores = call(lse)
    add_sinks(out, scores, sinks)
    if is_natural:
        scores.mul_(math.log(2))
    return out, scores
