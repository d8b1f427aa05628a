# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache with a page table row per request, shared by the calls without ``plan()``.

No call here waits for the GPU. The page table, flattened, is used directly as the array of page ids; the row of request
``i`` begins at ``i`` times the table's width. Sequence lengths stay on the device.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.checks import narrowed
from .._runtime.dispatch import backend_of, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import register_custom_op
from ..jit.attention.front_doors import draft_decl
from ..jit.attention.variants import attention_sink_decl
from ..jit.utils import filename_safe_dtype_map as _short
from .modules import (
    get_batch_decode_module,
    get_batch_prefill_module,
    get_customize_batch_decode_module,
    get_customize_batch_prefill_module,
)
from .options import CAUSAL, CUSTOM, FP8, layout_code
from .scales import Scale, scale_logits, scale_output
from .uniform_plan import UniformSizes, uniform_plan

__all__ = ["as_int32", "as_rows", "attend_block_tables", "draft_rows", "split_cache", "to_output"]

_INT32 = torch.int32
_NO_ROPE = (1.0, 1.0)
_DRAFT_WORD = 16  # bits


def split_cache(op: str, kv_cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a cache into 4-D keys and values. A 5-D tensor holds both, or one that serves as both, in dimension 1."""
    if isinstance(kv_cache, torch.Tensor):
        if kv_cache.ndim != 5 or kv_cache.shape[1] not in (1, 2):
            shape = tuple(kv_cache.shape)
            raise ArgumentError(f"{op}: kv_cache must have 5 dimensions, the second of size 1 or 2, got shape {shape}")
        return kv_cache[:, 0], kv_cache[:, -1]
    if not isinstance(kv_cache, (tuple, list)) or len(kv_cache) != 2:
        raise ArgumentError(f"{op}: kv_cache must be a tensor or a tuple of two, got a {type(kv_cache).__name__}")
    return kv_cache[0], kv_cache[1]


def as_rows(op: str, name: str, out: torch.Tensor, row: Sequence[int]) -> torch.Tensor:
    """View an output buffer as rows of shape ``row``."""
    try:
        return out.view(-1, *row)
    except RuntimeError:
        raise ArgumentError(
            f"{op}: {name} must be contiguous in the dimensions before the last two, got strides {out.stride()}"
        ) from None


def to_output(op: str, result: torch.Tensor, out: torch.Tensor, scale: Scale, name: str) -> None:
    """Write ``result * scale`` to ``out``, which may be ``result`` itself or an FP8 tensor."""
    if out.dtype in FP8:
        wide = result.float()
        scale_output(op, wide, scale, name)
        limit = torch.finfo(out.dtype).max
        out.copy_(wide.clamp_(-limit, limit))
        return
    if out is not result:
        out.copy_(result)
    scale_output(op, out, scale, name)


def draft_rows(op: str, mask: torch.Tensor, rows: int, q_len: int) -> torch.Tensor:
    """Reshape a mask of draft tokens to the form that kernels read: one row of 16-bit words per draft token."""
    words = mask.numel() // max(rows, 1)
    if words * rows != mask.numel() or words * _DRAFT_WORD < q_len:
        raise ArgumentError(
            f"{op}: mask must have {rows} rows of at least {q_len} bits in words of {_DRAFT_WORD} (a row for each of "
            f"{q_len} draft tokens of a request), got shape {tuple(mask.shape)}"
        )
    return mask.reshape(rows, words)


def _check(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    if q.dtype in FP8 or k.dtype == torch.uint8:
        raise ArgumentError(
            f"{op}: q must have 16 bits and the cache 16 bits or FP8 (NVFP4 caches need SM12x), got {q.dtype} and "
            f"{k.dtype}"
        )
    if k.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ArgumentError(f"{op}: k and v must have 4 equal dimensions, got {tuple(k.shape)} and {tuple(v.shape)}")
    if tables.ndim != 2:
        raise ArgumentError(f"{op}: block_tables must have shape (batch_size, pages), got {tuple(tables.shape)}")
    if seq_lens.numel() != tables.shape[0]:
        raise ArgumentError(f"{op}: seq_lens must have {tables.shape[0]} elements (batch size), got {seq_lens.numel()}")


def attend_block_tables(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    workspace: torch.Tensor,
    *,
    kv_layout: str,
    sm_scale: Union[float, torch.Tensor],
    q_scale: Scale = None,
    k_scale: Scale = None,
    window_left: int = -1,
    sinks: Optional[torch.Tensor] = None,
    q_len: int = 1,
    draft_mask: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = None,
) -> torch.Tensor:
    """Compute attention for the last ``q_len`` tokens of each request.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch_size * q_len, num_qo_heads, head_dim)``.
    k, v : torch.Tensor
        Pages, 4-D in ``kv_layout``.
    block_tables, seq_lens : torch.Tensor
        ``(batch_size, pages)`` and ``batch_size`` lengths, on the device.
    max_seq_len : int
        Upper bound of the keys of a request.
    draft_mask : Optional[torch.Tensor]
        ``(batch_size * q_len, words)`` uint16: bit ``j`` of a row says whether it sees row ``j`` of its request. Causal
        without it.
    out : Optional[torch.Tensor]
        Shape of ``q``, where the result goes.
    """
    _check(op, q, k, v, block_tables, seq_lens)
    if sinks is not None and sinks.numel() != q.shape[1]:
        raise ArgumentError(f"{op}: sinks must have {q.shape[1]} elements (query heads), got {sinks.numel()}")
    if isinstance(sm_scale, torch.Tensor):
        q, sm_scale = scale_logits(op, q, 1.0, bmm1_scale=sm_scale)
    if q_scale is not None or k_scale is not None:
        q, sm_scale = scale_logits(op, q, sm_scale, q_scale=q_scale, k_scale=k_scale)
    out = q.new_empty((*q.shape[:2], v.shape[-1])) if out is None else out
    _attend(
        op, out, q, k, v, block_tables, seq_lens, workspace, sinks, draft_mask,
        max_seq_len, layout_code(op, kv_layout), sm_scale, window_left, q_len, enable_pdl,
    )  # fmt: skip
    return out


@register_custom_op("flashinfer::attend_block_tables", mutates_args=("out",))  # the workspace is scratch
def _attend(
    op: str,
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: torch.Tensor,
    sinks: Optional[torch.Tensor],
    draft_mask: Optional[torch.Tensor],
    max_seq_len: int,
    layout: int,
    sm_scale: float,
    window_left: int,
    q_len: int,
    enable_pdl: Optional[bool],
) -> None:
    batch_size, pages = block_tables.shape
    if q.shape[0] != batch_size * q_len:
        raise ArgumentError(f"{op}: q must have {batch_size * q_len} rows ({batch_size} requests), got {q.shape[0]}")
    page_size, num_kv_heads = (k.shape[1], k.shape[2]) if layout == 0 else (k.shape[2], k.shape[1])
    causal = q_len > 1 and draft_mask is None
    sizes = UniformSizes(batch_size, q_len, pages, page_size, max_seq_len, q.shape[1], num_kv_heads, causal)
    if sinks is not None:
        sinks = sinks.reshape(-1).float()  # no copy if already float32 and contiguous
    module, extras = _module_of(q, k, v, sm_scale, sinks, q_len, draft_mask)
    plan = uniform_plan(op, module, q.device, workspace, sizes)
    lengths = as_int32(seq_lens)
    if not q.is_cuda:
        _check_lengths(op, lengths, min(max_seq_len, pages * page_size))
        lengths = lengths - (pages - 1) * page_size  # keys in the last page (see UniformPlan)
    tables = (plan.kv_indptr, as_int32(block_tables), lengths)
    head = (workspace, plan.int_workspace, plan.info, q, k, v)
    tail = (layout, window_left, use_pdl(q, enable_pdl), *extras)
    if q_len == 1:
        module.run(*head, *tables, out, None, *tail)
    else:
        mask_mode = CUSTOM if draft_mask is not None else CAUSAL
        module.paged_run(*head, plan.qo_indptr, *tables, out, None, mask_mode, *tail)


def _check_lengths(op: str, lengths: torch.Tensor, limit: int) -> None:
    """Check, on the CPU only, that no length exceeds the plan or the page table. A GPU check would wait."""
    if not lengths.numel():
        return
    low, high = (int(x) for x in lengths.aminmax())
    if low < 0 or high > limit:
        bad = low if low < 0 else high
        raise ArgumentError(
            f"{op}: seq_lens must be 0 to {limit} (max_seq_len, and what the pages of a request hold), got {bad}"
        )


def as_int32(x: torch.Tensor) -> torch.Tensor:
    """Convert lengths or page ids to a flat contiguous int32 tensor, as kernels read them."""
    if x.dtype is torch.uint32:
        x = x.view(_INT32)
    elif x.dtype is not _INT32:
        x = narrowed(x, "block_tables or seq_lens")
    return x.reshape(-1).contiguous()


@functools.cache
def _get_module(kind: str, q: torch.dtype, kv: torch.dtype, head_dim_qk: int, head_dim_vo: int, device: str) -> Any:
    """Return the module for a kind of call: "decode", "prefill", "decode_sinks", "prefill_sinks" or "drafts"."""
    types, dims = (q, kv, q, torch.int32), (head_dim_qk, head_dim_vo)
    name = f"q_{_short[q]}_kv_{_short[kv]}_head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}"
    sink = (("sink",), ("float",), ("sm_scale",), ("double",), "AttentionSink", attention_sink_decl["fa2"])
    if kind == "decode":
        return get_batch_decode_module(*types, *dims, 0, False, False, device=device)
    if kind == "prefill":
        return get_batch_prefill_module("fa2", *types, *dims, 0, False, False, False, device=device)
    if kind == "decode_sinks":
        uri = f"batch_decode_attention_sink_{name}"
        return get_customize_batch_decode_module(uri, *types, *dims, *sink, device=device)
    if kind == "prefill_sinks":
        uri = f"batch_prefill_attention_sink_{name}_posenc_0"
        return get_customize_batch_prefill_module("fa2", uri, *types, *dims, *sink, device=device)
    return get_customize_batch_prefill_module(*draft_module_arguments(q, kv, head_dim_qk, head_dim_vo), device=device)


def draft_module_arguments(q: torch.dtype, kv: torch.dtype, head_dim_qk: int, head_dim_vo: int) -> tuple[Any, ...]:
    """Return the arguments of the customized batch prefill generator for calls with masks of draft tokens."""
    name = f"q_{_short[q]}_kv_{_short[kv]}_head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}"
    tensors = (("maybe_sink", "draft_mask"), ("float", "uint16_t"))
    scalars = (("sm_scale", "draft_words"), ("double", "int64_t"))
    variant = (*tensors, *scalars, "DraftAttention", draft_decl)
    types, dims = (q, kv, q, torch.int32), (head_dim_qk, head_dim_vo)
    return ("fa2", f"batch_prefill_drafts_{name}", *types, *dims, *variant)


def _module_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    sinks: Optional[torch.Tensor],
    q_len: int,
    draft_mask: Optional[torch.Tensor],
) -> tuple[Any, tuple[Any, ...]]:
    """Return the module that serves a call, and the last arguments of its ``run()``."""
    identity = (q.dtype, k.dtype, q.shape[-1], v.shape[-1], backend_of(q))
    if draft_mask is not None:
        return _get_module("drafts", *identity), (sinks, draft_mask, sm_scale, draft_mask.shape[-1])
    kind = "decode" if q_len == 1 else "prefill"
    if sinks is not None:
        return _get_module(f"{kind}_sinks", *identity), (sinks, sm_scale)
    extras = (None,) if q_len == 1 else (None,) * 6
    items = () if q_len == 1 else (0,)
    return _get_module(kind, *identity), (*extras, 0.0, sm_scale, *_NO_ROPE, *items)
