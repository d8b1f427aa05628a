# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding, fp8 quantisation and append to a paged KV cache in one kernel."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.checks import as_int32
from .._runtime.dispatch import backend_of, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.rope_quantize import rope_quantize_fp8_append_paged_kv_cache_trace
from . import modules
from .modules import get_rope_module
from .quantize import output, target_dtype

_OP = "rope_quantize_fp8_append_paged_kv_cache"


@register_custom_op(
    "flashinfer::rope_quantize_append_paged_kv_cache",
    mutates_args=("q_rope_out", "q_nope_out", "first_cache", "second_cache"),
)
def _rope_quantize_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    q_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    first_cache: torch.Tensor,
    second_cache: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
    heads_first: bool,
    quant_scale_q: float,
    quant_scale_kv: float,
    interleave: bool,
    enable_pdl: Optional[bool],
) -> None:
    get_rope_module(backend_of(q_rope)).rope_quantize_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, q_rope_out, q_nope_out, first_cache, second_cache, cos_sin_cache, pos_ids,
        kv_indices, kv_indptr, batch_indices, positions, page_size, heads_first, quant_scale_q, quant_scale_kv,
        interleave, use_pdl(q_rope, enable_pdl), modules.VALIDATE,
    )  # fmt: skip


def _check_caches(
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    k_rope: torch.Tensor,
    v: Optional[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        count = f" of {len(paged_kv_cache)}" if isinstance(paged_kv_cache, (tuple, list, torch.Tensor)) else ""
        kind = type(paged_kv_cache).__name__ + count
        raise ArgumentError(f"{_OP}: paged_kv_cache must be a tuple of 2 tensors, got a {kind}")
    mla = k_rope.ndim == 2
    if mla and v is not None:
        raise ArgumentError(f"{_OP}: v must be None (k_rope is 2-D: MLA has no values of its own), got a value")
    if not mla and v is None:
        raise ArgumentError(f"{_OP}: v must be a tensor (k_rope is {k_rope.ndim}-D: not MLA), got None")
    names, rank = (("ckv_cache", "kpe_cache"), 3) if mla else (("k_cache", "v_cache"), 4)
    for name, cache in zip(names, paged_kv_cache, strict=True):
        if cache.ndim != rank:
            raise ArgumentError(
                f"{_OP}: {name} must have {rank} dimensions (k_rope is {k_rope.ndim}-D), got {cache.ndim}"
            )
        if cache.dtype != dtype:
            raise ArgumentError(
                f"{_OP}: {name} must have dtype {dtype} (the target of the quantisation), got {cache.dtype}"
            )


@flashinfer_api(trace=rope_quantize_fp8_append_paged_kv_cache_trace)
@explain_type_errors
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: Optional[torch.dtype] = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Optional[torch.Tensor] = None,
    q_nope_out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotate, quantise to fp8, and write keys and values into the pages of a cache: each is read and written once.

    Token ``i`` goes to slot ``positions[i]`` of request ``b = batch_indices[i]``: entry ``slot % page_size`` of page
    ``kv_indices[kv_indptr[b] + slot // page_size]``. A token with ``batch_indices[i] < 0`` is padding: nothing is
    written for it, neither to the cache nor to the outputs for q. So it is on CUDA for a token without a slot, whose
    position is beyond the pages of its request or whose page is outside of the cache; on the CPU, or with
    ``FLASHINFER_VALIDATE_INPUTS=1`` at import, that is an error.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids
        As in :func:`rope_quantize_fp8`. ``pos_ids`` need not equal ``positions``.
    v : Optional[torch.Tensor]
        ``(nnz, num_kv_heads, head_dim)``, scaled by ``quant_scale_kv``; None for MLA (2-D keys).
    paged_kv_cache : tuple[torch.Tensor, torch.Tensor]
        For MLA ``(pages, page_size, nope_dim)``, which takes ``k_nope``, and ``(pages, page_size, rope_dim)``, which
        takes the rotated part. Otherwise keys, rotated part first, and values, either of them
        ``(pages, page_size, num_kv_heads, head_dim)`` or, for the layout HND,
        ``(pages, num_kv_heads, page_size, head_dim)``. Their dtype is the quantised one.
    kv_indices, kv_indptr : torch.Tensor
        Pages of all requests, and where those of each request begin.
    batch_indices, positions : torch.Tensor
        ``(nnz,)``: request and slot of each token. Index tensors are int32; other integers are converted.
    is_neox, quantize_dtype, quant_scale_q, quant_scale_kv, enable_pdl
        As in :func:`rope_quantize_fp8`.
    page_size : int
        Slots of a page.
    kv_layout : str
        "NHD" or "HND".
    q_rope_out, q_nope_out : Optional[torch.Tensor]
        Written and returned when given; they may be slices of a wider buffer.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        ``q_rope_out, q_nope_out``.

    Examples
    --------
    >>> q_rope, k_rope = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 2, 64).bfloat16()
    >>> v = torch.randn(3, 2, 64).bfloat16()
    >>> table = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], dim=1)
    >>> pages = tuple(torch.zeros(1, 16, 2, 64, dtype=torch.float8_e4m3fn) for _ in "kv")
    >>> indices, indptr, tokens = torch.tensor([0]).int(), torch.tensor([0, 1]).int(), torch.arange(3).int()
    >>> q_rope_out, q_nope_out = flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(
    ...     q_rope, k_rope, None, None, v, table, tokens, pages, indices, indptr, torch.zeros_like(tokens), tokens
    ... )
    >>> torch.equal(pages[1][0, :3].float(), v.to(torch.float8_e4m3fn).float())
    True
    """
    if kv_layout not in ("NHD", "HND"):
        raise ArgumentError(f"{_OP}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    dtype = target_dtype(quantize_dtype, q_rope_out, q_nope_out)
    _check_caches(paged_kv_cache, k_rope, v, dtype)
    q_rope_out = output(_OP, "q_rope_out", q_rope_out, q_rope, q_rope, dtype)
    q_nope_out = output(_OP, "q_nope_out", q_nope_out, q_nope, q_rope, dtype)
    first_cache, second_cache = paged_kv_cache
    kv_indices, kv_indptr, batch_indices, positions = as_int32(
        _OP, kv_indices=kv_indices, kv_indptr=kv_indptr, batch_indices=batch_indices, positions=positions
    )
    _rope_quantize_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, q_rope_out, q_nope_out, first_cache, second_cache, cos_sin_cache, pos_ids,
        kv_indices, kv_indptr, batch_indices, positions, page_size, kv_layout == "HND", quant_scale_q,
        quant_scale_kv, not is_neox, enable_pdl,
    )  # fmt: skip
    return q_rope_out, q_nope_out
