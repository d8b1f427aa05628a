# SPDX-License-Identifier: Apache-2.0
"""Decoding over page tables with the interfaces of XQA and TensorRT-LLM, served by our own kernels."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.checks import canonicalize_torch_dtype
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.block_tables import as_rows, attend_block_tables, draft_rows, split_cache, to_output
from ..trace.templates.xqa import trtllm_batch_decode_dispatch, xqa_batch_decode_dispatch

__all__ = ["trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"]

_SEMAPHORE_BYTES = 8 << 20
Factor = Union[float, torch.Tensor]
KVCache = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def _scratch(workspace: torch.Tensor) -> torch.Tensor:
    """Return the workspace after the bytes that callers keep zero for the semaphores of the published kernels."""
    flat = workspace
    if flat.ndim != 1 or flat.dtype is not torch.uint8:
        flat = flat.view(-1).view(torch.uint8)
    return flat[_SEMAPHORE_BYTES:] if flat.numel() > _SEMAPHORE_BYTES else flat


def _decode(
    op: str,
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Factor,
    bmm2_scale: Factor,
    out: torch.Tensor,
    q_len: int,
    mask: Optional[torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    if q_len < 1:
        raise ArgumentError(f"{op}: q_len_per_req must be at least 1, got {q_len}")
    if out.numel() != query.numel():
        raise ArgumentError(f"{op}: out must have shape {tuple(query.shape)} (that of query), got {tuple(out.shape)}")
    k, v = split_cache(op, kv_cache)
    rows = query if query.ndim == 3 else query.reshape(-1, *query.shape[-2:])
    flat = out if out.ndim == 3 else as_rows(op, "out", out, out.shape[-2:])
    result = attend_block_tables(
        op,
        rows,
        k,
        v,
        block_tables,
        seq_lens,
        max_seq_len,
        _scratch(workspace),
        sm_scale=bmm1_scale,
        q_len=q_len,
        draft_mask=draft_rows(op, mask, rows.shape[0], q_len) if mask is not None and q_len > 1 else None,
        out=flat if flat.dtype == query.dtype else None,
        **options,
    )
    to_output(op, result, flat, bmm2_scale, "bmm2_scale")
    return out


@flashinfer_api(trace=xqa_batch_decode_dispatch)
@explain_type_errors
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    window_left: int = -1,
    out: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    kv_layout: str = "NHD",
    enable_pdl: Optional[bool] = None,
    q_len_per_req: int = 1,
    o_scale: float = 1.0,
    mask: Optional[torch.Tensor] = None,
    kv_cache_sf: Optional[KVCache] = None,
    q_cu_seq_lens: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""Attention of the last tokens of each request over a paged cache.

    ``out = softmax(bmm1_scale * q . k) v * bmm2_scale``. Nothing is planned after the first call with the same sizes,
    and nothing waits for the GPU, so calls can be captured in a CUDA graph; call once before the capture.

    Parameters
    ----------
    query : torch.Tensor
        ``(batch_size * q_len_per_req, num_qo_heads, head_dim)``, float16 or bfloat16.
    kv_cache : Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        Pages of keys and values, 4-D each, or 5-D with both in the second dimension; if that has size 1, keys are
        values too. dtype of ``query`` or float8_e4m3fn.
    workspace_buffer : torch.Tensor
        Scratch; its first 8 MiB are left as they are.
    block_tables : torch.Tensor
        ``(batch_size, max_pages)`` int32 page ids.
    seq_lens : torch.Tensor
        ``(batch_size,)`` int32 or uint32 on the device: keys of each request, the new tokens included.
    max_seq_len : int
        Upper bound of the keys of a request. A tight bound gives a better plan.
    bmm1_scale, bmm2_scale : Union[float, torch.Tensor]
        Scale of the logits (``1 / sqrt(head_dim)`` and the scales of q and k), and of the output.
    window_left : int
        Keys left of a token that it sees; negative: all.
    out : Optional[torch.Tensor]
        Output buffer; float8_e4m3fn is allowed.
    sinks : Optional[torch.Tensor]
        ``(num_qo_heads,)`` float32 logits that add to the denominator of the softmax.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None enables it where the device supports it.
    q_len_per_req : int
        New tokens of each request.
    o_scale : float
        Scale of an 8-bit output. It changes nothing here: ``bmm2_scale`` is ``v_scale / o_scale`` already.
    mask : Optional[torch.Tensor]
        ``(batch_size, q_len_per_req, 2 * ceil(q_len_per_req / 32))`` uint16: which new tokens a new token sees; causal
        without it.
    kv_cache_sf : Optional[Tuple[torch.Tensor, torch.Tensor]]
        Scale factors of an NVFP4 cache, which needs SM12x.
    q_cu_seq_lens : Optional[torch.Tensor]
        ``(batch_size + 1,)`` where requests have different numbers of new tokens; see :func:`flashinfer.xqa`.

    Returns
    -------
    torch.Tensor
        Shape of ``query``.
    """
    op = "xqa_batch_decode_with_kv_cache"
    if q_cu_seq_lens is not None:
        return _ragged(query, kv_cache, workspace_buffer, block_tables, seq_lens, bmm1_scale, bmm2_scale, window_left,
                       out, sinks, kv_layout, enable_pdl, q_len_per_req, mask, q_cu_seq_lens)  # fmt: skip
    return _decode(
        op,
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        torch.empty_like(query) if out is None else out,
        q_len_per_req,
        mask,
        window_left=window_left,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
    )


def _ragged(
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: Factor,
    bmm2_scale: Factor,
    window_left: int,
    out: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    kv_layout: str,
    enable_pdl: Optional[bool],
    q_len: int,
    mask: Optional[torch.Tensor],
    q_cu_seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Call ``xqa()``, which has one scale for keys and values; ``bmm2_scale`` is passed as the scale of the output."""
    from ..xqa import xqa

    k, v = split_cache("xqa_batch_decode_with_kv_cache", kv_cache)
    page_size, heads = (k.shape[1], k.shape[2]) if kv_layout == "NHD" else (k.shape[2], k.shape[1])
    out = torch.empty_like(query) if out is None else out
    xqa(
        query,
        k,
        v,
        block_tables,
        seq_lens,
        out,
        _scratch(workspace),
        workspace,
        heads,
        page_size,
        sinks=sinks,
        q_scale=bmm1_scale * query.shape[-1] ** 0.5,
        sliding_win_size=window_left + 1,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        rcp_out_scale=bmm2_scale,
        q_seq_len=q_len,
        mask=mask,
        q_cu_seq_lens=q_cu_seq_lens,
    )
    return out


@flashinfer_api(trace=trtllm_batch_decode_dispatch)
@explain_type_errors
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KVCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Factor = 1.0,
    bmm2_scale: Factor = 1.0,
    window_left: int = -1,
    out: Optional[torch.Tensor] = None,
    out_dtype: Union[torch.dtype, str, None] = None,
    o_sf_scale: Optional[float] = None,
    o_sf_vec_size: Optional[int] = None,
    sinks: Optional[torch.Tensor] = None,
    kv_layout: str = "HND",
    enable_pdl: Optional[bool] = None,
    backend: str = "auto",
    q_len_per_req: int = 1,
    o_scale: float = 1.0,
    mask: Optional[torch.Tensor] = None,
    max_q_len: Optional[int] = None,
    cum_seq_lens_q: Optional[torch.Tensor] = None,
    skip_softmax_threshold_scale_factor: Optional[float] = None,
    kv_cache_sf: Optional[KVCache] = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    bmm1_scale_log2: Optional[torch.Tensor] = None,
    multi_ctas_kv_counter_buffer: Optional[torch.Tensor] = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Optional[str] = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Optional[torch.Tensor] = None,
    request_order: Optional[torch.Tensor] = None,
    request_order_plan: Any = None,
) -> torch.Tensor:
    r""":func:`xqa_batch_decode_with_kv_cache` with more arguments and HND caches by default.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, \
    sinks, kv_layout, enable_pdl, q_len_per_req, o_scale, mask
        As in :func:`xqa_batch_decode_with_kv_cache`; ``kv_layout`` is ``"HND"`` unless said otherwise.
    out : Optional[torch.Tensor]
        Output buffer.
    out_dtype : Optional[Union[torch.dtype, str]]
        dtype of the result: that of ``out`` or of ``query`` if None; float8_e4m3fn too.
    backend : str
        ``"auto"`` or ``"xqa"``. ``"trtllm-gen"`` needs SM100.
    skip_softmax_threshold_scale_factor, multi_ctas_kv_counter_buffer
        Ignored: hints for kernels of SM100.
    o_sf_scale, o_sf_vec_size, max_q_len, cum_seq_lens_q, uses_shared_paged_kv_idx, bmm1_scale_log2, \
    enable_block_sparse_attention, bf16q_fp8kv_transform_mode, lse, return_lse, cp_world, cp_rank, \
    causal_seqlens_kv_global, request_order, request_order_plan
        Need SM100; refused here unless they have their defaults.

    Returns
    -------
    torch.Tensor
        Shape of ``query``.
    """
    op = "trtllm_batch_decode_with_kv_cache"
    _check_backend(op, backend)
    if (cp_world != 1 or cp_rank != 0) and causal_seqlens_kv_global is None:
        raise ArgumentError(f"{op}: cp_world and cp_rank need causal_seqlens_kv_global, got {cp_world} and {cp_rank}")
    if request_order is not None or request_order_plan is not None:
        raise ArgumentError(f"{op}: request_order requires the explicit backend='cake', got backend {backend!r}")
    for name, value, default in (
        ("causal_seqlens_kv_global", causal_seqlens_kv_global, None),
        ("o_sf_scale", o_sf_scale, None),
        ("o_sf_vec_size", o_sf_vec_size, None),
        ("max_q_len", max_q_len, None),
        ("cum_seq_lens_q", cum_seq_lens_q, None),
        ("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx, True),
        ("bmm1_scale_log2", bmm1_scale_log2, None),
        ("enable_block_sparse_attention", enable_block_sparse_attention, False),
        ("bf16q_fp8kv_transform_mode", bf16q_fp8kv_transform_mode, None),
    ):
        if value is not default:
            raise ArgumentError(f"{op}: {name} must be {default} (backend xqa has no such feature), got another value")
    if return_lse or lse is not None:
        raise NotImplementedError(
            f"{op}: return_lse must be False and lse None (backend xqa returns no LSE; "
            "BatchDecodeWithPagedKVCacheWrapper.run does), got another value"
        )
    if out_dtype == "nvfp4":
        raise ArgumentError(f"{op}: out_dtype must be a torch.dtype (NVFP4 outputs need SM100), got {out_dtype!r}")
    if out_dtype is not None:
        out_dtype = canonicalize_torch_dtype(out_dtype)
    if out is not None and not isinstance(out, torch.Tensor):
        raise ArgumentError(f"{op}: out must be a tensor (NVFP4 outputs need SM100), got a {type(out).__name__}")
    if out is None:
        out = torch.empty_like(query, dtype=out_dtype)
    elif out_dtype is not None and out.dtype != out_dtype:
        raise ArgumentError(f"{op}: out must have dtype {out_dtype} (out_dtype), got {out.dtype}")
    return _decode(
        op,
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        out,
        q_len_per_req,
        mask,
        window_left=window_left,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
    )


def _check_backend(op: str, backend: str) -> None:
    if backend == "trtllm-gen":
        raise ArgumentError(f"{op}: backend must be 'auto' or 'xqa', got 'trtllm-gen', which needs SM100; usable: xqa")
    if backend not in ("auto", "xqa"):
        raise KeyError(f"{op}: backend must be 'auto' or 'xqa', got {backend!r}")
