# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one request."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from ..api_logging import flashinfer_api
from ..attention.options import NON_CAUSAL, default_scale, layout_code, pos_encoding_code
from ..attention.scales import scale_logits, scale_output
from ..attention.single import run_module, single_decode, single_prefill
from ..trace.templates.decode import single_decode_trace

Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


@flashinfer_api(trace=single_decode_trace)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Optional[float] = None,
    k_scale: Optional[float] = None,
    v_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    return_lse: bool = False,
) -> Result:
    r"""Attention of one query token over the keys of its request.

    Parameters
    ----------
    q : torch.Tensor
        ``(num_qo_heads, head_dim)``, float16 or bfloat16 (float32 on the CPU too).
    k, v : torch.Tensor
        ``(kv_len, num_kv_heads, head_dim)``, or ``(num_kv_heads, kv_len, head_dim)`` with ``"HND"``; dtype of q, or an
        8-bit float. ``num_qo_heads`` is a multiple of ``num_kv_heads``.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    pos_encoding_mode : str
        ``"NONE"``, ``"ROPE_LLAMA"`` (rotate q and k here) or ``"ALIBI"``.
    use_tensor_cores : bool
        Use the kernels of the prefill family. The result is the same.
    q_scale, k_scale, v_scale : Optional[float]
        What stored values are multiplied by.
    window_left : int
        Keys left of the query's own, which is the last, that are visible; -1 for all.
    logits_soft_cap : Optional[float]
        ``cap * tanh(logit / cap)``; None or 0 for none.
    sm_scale : Optional[float]
        1 / sqrt(head_dim) if None.
    rope_scale, rope_theta : Optional[float]
        1 and 1e4 if None.
    return_lse : bool
        Also return the logarithm to base 2 of the sum of ``exp(logit)``.

    Returns
    -------
    Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
        ``(num_qo_heads, head_dim)`` in the dtype of q, and the LSE, float32 ``(num_qo_heads,)``. Without keys the
        output is 0 and the LSE -inf.

    Examples
    --------
    >>> q, k, v = torch.randn(32, 64).half(), torch.randn(99, 8, 64).half(), torch.randn(99, 8, 64).half()
    >>> o = flashinfer.single_decode_with_kv_cache(q, k, v)
    """
    op = "single_decode_with_kv_cache"
    layout, pos_encoding = layout_code(op, kv_layout), pos_encoding_code(op, pos_encoding_mode)
    try:
        shape, v_shape = q.shape, v.shape
    except AttributeError:
        check_tensors(op, q=q, v=v)
        raise
    if len(shape) != 2:
        raise ArgumentError(f"{op}: q must have 2 dimensions (num_qo_heads, head_dim), got {len(shape)}")
    if len(v_shape) != 3:
        raise ArgumentError(f"{op}: v must have 3 dimensions, got {len(v_shape)}")
    num_qo_heads, head_dim = shape
    head_dim_vo = v_shape[2]
    sm_scale = default_scale(op, sm_scale, head_dim)
    if q_scale is not None or k_scale is not None:
        q, sm_scale = scale_logits(op, q, sm_scale, q_scale=q_scale, k_scale=k_scale)
    out = new_empty(q, q.dtype, num_qo_heads, head_dim_vo)
    lse = new_empty(q, torch.float32, num_qo_heads) if return_lse else None
    if use_tensor_cores:
        row_lse = None if lse is None else lse.unsqueeze(0)
        single_prefill(
            q.unsqueeze(0), k, v, out.unsqueeze(0), row_lse, None, None, None, head_dim, head_dim_vo, NON_CAUSAL,
            layout, pos_encoding, False, window_left, logits_soft_cap or 0.0, sm_scale, rope_scale or 1.0,
            rope_theta or 1e4,
        )  # fmt: skip
    else:
        single_decode(
            q, k, v, out, lse, head_dim, head_dim_vo, layout, pos_encoding, window_left, logits_soft_cap or 0.0,
            sm_scale, rope_scale or 1.0, rope_theta or 1e4,
        )  # fmt: skip
    if v_scale is not None:
        scale_output(op, out, v_scale)
    return out if lse is None else (out, lse)


@explain_type_errors
def single_decode_with_kv_cache_with_jit_module(
    jit_module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> torch.Tensor:
    """Decode attention of one request by a module of ``gen_customize_single_decode_module``.

    Parameters
    ----------
    jit_module
        The loaded module.
    q, k, v : torch.Tensor
        As in :func:`single_decode_with_kv_cache`.
    *args
        The additional tensors and scalars of the variant, in the order of their declaration.
    kv_layout, window_left
        See :func:`single_decode_with_kv_cache`.
    return_lse : bool
        Whether the module computes the LSE. It is not returned, as in published releases.

    Returns
    -------
    torch.Tensor
    """
    layout = layout_code("single_decode_with_kv_cache_with_jit_module", kv_layout)
    out = q.new_empty((q.shape[0], v.shape[-1]))
    lse = q.new_empty((q.shape[0],), dtype=torch.float32) if return_lse else None
    run_module(jit_module, q, k, v, out, lse, (layout, window_left), args)
    return out
