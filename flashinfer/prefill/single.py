# SPDX-License-Identifier: Apache-2.0
"""Prefill attention of one request."""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.checks import canonicalize_torch_dtype, check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.kv_cache import scale_factors
from ..attention.masks import check_packed_mask, pack_mask
from ..attention.options import (
    CAUSAL,
    CUSTOM,
    FP8,
    NON_CAUSAL,
    default_scale,
    fa3_is_faster,
    fa3_multiplies_fp8,
    fa3_serves,
    layout_code,
    pos_encoding_code,
    resolve_backend,
)
from ..attention.scales import (
    Scale,
    convert_fp8_query,
    fp8_scales,
    scale_logits,
    scale_output,
    scale_output_per_head,
)
from ..attention.single import run_module, single_prefill
from ..jit.define_variant import AttentionVariant
from ..trace.templates.prefill import single_prefill_trace

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


@flashinfer_api(trace=single_prefill_trace)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: Scale = None,
    scale_k: Scale = None,
    scale_v: Scale = None,
    o_dtype: Union[torch.dtype, str, None] = None,
    custom_mask: Optional[torch.Tensor] = None,
    packed_custom_mask: Optional[torch.Tensor] = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Result:
    r"""Attention of the last tokens of one request over its keys.

    Parameters
    ----------
    q : torch.Tensor
        ``(qo_len, num_qo_heads, head_dim_qk)``, float16, bfloat16, an 8-bit float, or float32 on the CPU. Any strides
        but the last.
    k, v : torch.Tensor
        ``(kv_len, num_kv_heads, head_dim)``, or ``(num_kv_heads, kv_len, head_dim)`` with ``"HND"``; v may have another
        head dimension. dtype of q, an 8-bit float, or uint8 (NVFP4, see ``kv_cache_sf``).
    scale_q, scale_k, scale_v : Union[float, torch.Tensor, None]
        With 8-bit q only: ``(num_qo_heads,)``, ``(num_kv_heads,)``, ``(num_kv_heads,)``, what stored values are
        multiplied by.
    o_dtype : Union[torch.dtype, str, None]
        dtype of q if None (bfloat16 for 8-bit q).
    custom_mask : Optional[torch.Tensor]
        ``(qo_len, kv_len)`` bool, True where a query sees a key. Replaces ``causal``.
    packed_custom_mask : Optional[torch.Tensor]
        uint8 bits of the same, lowest bit first; wins over ``custom_mask``.
    causal : bool
        A query sees keys up to its own position, the last query all of them.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    pos_encoding_mode : str
        ``"NONE"``, ``"ROPE_LLAMA"`` (rotate q and k here) or ``"ALIBI"``.
    use_fp16_qk_reduction : bool
        Ignored: products are always accumulated in float32.
    sm_scale : Optional[float]
        1 / sqrt(head_dim_qk) if None.
    window_left : int
        Keys left of the query's own that are visible, -1 for all.
    logits_soft_cap : Optional[float]
        ``cap * tanh(logit / cap)``; None or 0 for none.
    rope_scale, rope_theta : Optional[float]
        1 and 1e4 if None.
    backend : str
        ``"auto"`` (the faster one), ``"fa2"`` or, on an SM90 GPU with 16-bit or FP8 keys, ``"fa3"``, which multiplies
        e4m3 q, k and v as they are; other 8-bit q are converted to 16 bits.
    return_lse : bool
        Also return the logarithm to base 2 of the sum of ``exp(logit)``.
    kv_cache_sf : Optional[Tuple[torch.Tensor, torch.Tensor]]
        Scale factors of uint8 (NVFP4) keys and values, one e4m3 number for 16 elements.
    k_scale, v_scale : Union[float, torch.Tensor, None]
        What stored keys and values are multiplied by.

    Returns
    -------
    Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        ``(qo_len, num_qo_heads, head_dim_vo)``, and the LSE, float32 ``(qo_len, num_qo_heads)``. A query that sees no
        key has output 0 and LSE -inf.

    Examples
    --------
    >>> q, k, v = torch.randn(7, 32, 64).half(), torch.randn(99, 8, 64).half(), torch.randn(99, 8, 64).half()
    >>> o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    """
    op = "single_prefill_with_kv_cache"
    layout, pos_encoding = layout_code(op, kv_layout), pos_encoding_code(op, pos_encoding_mode)
    requested = backend
    backend = resolve_backend(op, backend, q.device if backend == "fa3" else None)
    try:
        q_shape, k_shape, v_shape, q_dtype = q.shape, k.shape, v.shape, q.dtype  # read once: each access takes 0.1 us
    except AttributeError:
        check_tensors(op, q=q, k=k, v=v)
        raise
    if len(q_shape) != 3 or len(k_shape) != 3 or len(v_shape) != 3:
        raise ArgumentError(f"{op}: q, k, v must have 3 dimensions each, got {q.ndim}, {k.ndim}, {v.ndim}")
    qo_len, num_qo_heads, head_dim = q_shape
    fp8 = q_dtype in FP8
    o_dtype = canonicalize_torch_dtype(o_dtype) if o_dtype else torch.bfloat16 if fp8 else q_dtype
    if fp8:
        _check_fp8(op, q, k, v, window_left, o_dtype)
        num_kv_heads = k_shape[1 - layout]
    if packed_custom_mask is not None:
        check_packed_mask(op, packed_custom_mask, -(-qo_len * k_shape[layout] // 8))
        packed_custom_mask = packed_custom_mask.contiguous()
    elif custom_mask is not None:
        packed_custom_mask = pack_mask(op, custom_mask, qo_len, k_shape[layout])
    mask_mode = CUSTOM if packed_custom_mask is not None else CAUSAL if causal else NON_CAUSAL
    sm_scale = default_scale(op, sm_scale, head_dim)
    if requested == "auto" and q.is_cuda:
        rows = qo_len * num_qo_heads // max(k_shape[1 - layout], 1)
        dtypes = (q_dtype, k.dtype, o_dtype)
        if fa3_is_faster(rows, 1, mask_mode) and fa3_serves(q.device, *dtypes, head_dim, v_shape[-1], pos_encoding):
            backend = "fa3"
    scales: list[Optional[torch.Tensor]] = [None, None, None]
    if fp8:
        given = (scale_q, scale_k, scale_v)
        if backend == "fa3" and fa3_multiplies_fp8(q_dtype, k.dtype, o_dtype, head_dim, v_shape[-1], pos_encoding):
            scales, sm_scale = fp8_scales(op, q, sm_scale, given, num_kv_heads, k_scale=k_scale)
            k_scale = scale_v = None
        else:
            q = convert_fp8_query(op, q, scale_q, scale_k, num_kv_heads, o_dtype)
    if k_scale is not None:
        q, sm_scale = scale_logits(op, q, sm_scale, k_scale=k_scale)
    head_dim_vo, k_sf, v_sf = v_shape[-1], None, None
    if factors := scale_factors(op, k, v, kv_cache_sf, layout, False):
        head_dim_vo, (k_sf, v_sf) = 2 * head_dim_vo, factors
    out = new_empty(q, o_dtype, qo_len, num_qo_heads, head_dim_vo)
    lse = new_empty(q, torch.float32, qo_len, num_qo_heads) if return_lse else None
    single_prefill(
        q, k, v, out, lse, packed_custom_mask, k_sf, v_sf, head_dim, head_dim_vo, mask_mode, layout, pos_encoding,
        use_fp16_qk_reduction, window_left, logits_soft_cap or 0.0, sm_scale, rope_scale or 1.0, rope_theta or 1e4,
        backend, *scales,
    )  # fmt: skip
    if fp8:
        scale_output_per_head(op, out, scale_v, num_kv_heads)
    if v_scale is not None:
        scale_output(op, out, v_scale)
    return out if lse is None else (out, lse)


def _check_fp8(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window_left: int, o_dtype: torch.dtype
) -> None:
    if window_left != -1:
        raise ArgumentError(f"{op}: window_left must be -1 (8-bit q), got {window_left}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ArgumentError(f"{op}: k and v must be {q.dtype} (8-bit q), got {k.dtype} and {v.dtype}")
    if k.shape[-1] != q.shape[-1] or v.shape[-1] != q.shape[-1]:
        raise ArgumentError(
            f"{op}: head dimensions of k and v must be {q.shape[-1]} (8-bit q), got {k.shape[-1]} and {v.shape[-1]}"
        )
    if o_dtype.itemsize < 2:
        raise ArgumentError(f"{op}: o_dtype must be a 16-bit type, got {o_dtype}")


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


@explain_type_errors
def single_prefill_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = NON_CAUSAL,
    window_left: int = -1,
    return_lse: bool = False,
) -> Result:
    """Prefill attention of one request by a module of ``gen_customize_single_prefill_module``.

    Parameters
    ----------
    jit_module
        The loaded module.
    q, k, v : torch.Tensor
        As in :func:`single_prefill_with_kv_cache`.
    *args
        The additional tensors and scalars of the variant, in the order of their declaration.
    kv_layout : str
    mask_mode : int
        A value of ``flashinfer.utils.MaskMode``.
    window_left : int
    return_lse : bool

    Returns
    -------
    Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        ``(qo_len, num_qo_heads, head_dim of v)`` in the dtype of q, and the LSE.
    """
    layout = layout_code("single_prefill_with_kv_cache_with_jit_module", kv_layout)
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32) if return_lse else None
    run_module(jit_module, q, k, v, out, lse, (mask_mode, layout, window_left), args)
    return out if lse is None else (out, lse)


AttentionVariant.attend = staticmethod(single_prefill_with_kv_cache_with_jit_module)
