# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of q and k with 3-D rotary embedding, from a packed qkv tensor. CUDA only."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.norm import fused_qk_rmsnorm_rope_trace
from .modules import get_qk_rmsnorm_rope_module

HEAD_DIMS = (64, 128, 256)
MAX_HEADS = 32


@register_custom_op("flashinfer::fused_qk_rmsnorm_rope", mutates_args=("q_out", "k_out", "v_out"), device_types="cuda")
def _qk_rmsnorm_rope(
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    head_dim: int,
    eps: float,
    base: float,
    interleave: bool,
    factor: float,
    low: float,
    high: float,
    attention_factor: float,
    is_qk_norm: bool,
    qk_scale: float,
    v_scale: float,
) -> None:
    if qkv.numel() == 0:
        return
    get_qk_rmsnorm_rope_module().qk_rmsnorm_rope(
        *(out.flatten(0, -3) for out in (q_out, k_out, v_out)),
        *(qkv.flatten(0, -2), q_weight, k_weight, ppf, pph, ppw),
        *(num_frame_channels, num_height_channels, num_width_channels, head_dim, eps, base, interleave),
        *(factor, low, high, attention_factor, is_qk_norm, qk_scale, v_scale),
    )


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise ArgumentError(f"fused_qk_rmsnorm_rope: {text}")


@flashinfer_api(trace=fused_qk_rmsnorm_rope_trace)
@explain_type_errors
def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: Optional[torch.Tensor] = None,
    k_out: Optional[torch.Tensor] = None,
    v_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""RMSNorm over all heads of q, and of k, then rotary embedding by (frame, height, width); v is copied.

    Parameters
    ----------
    qkv : torch.Tensor
        ``(batch, ppf * pph * ppw, (num_heads_q + num_heads_k + num_heads_v) * head_dim)``, or 2-D with the first two
        dimensions flattened; bfloat16, contiguous, CUDA. Columns are q, k, v, heads inside each.
    q_weight, k_weight : torch.Tensor
        ``(num_heads * head_dim,)`` bfloat16.
    ppf, pph, ppw : int
        Frames, rows and columns of a sequence; token ``t`` is at ``(t // (pph*ppw), t % (pph*ppw) // ppw, t % ppw)``.
    num_frame_channels, num_height_channels, num_width_channels : int
        Even; how many of a head's channels turn with each axis, in this order. They sum to ``head_dim``.
    head_dim : int
        64, 128 or 256; at most 32 heads each.
    eps : float
        Added to the mean square before the root.
    base : float
        Of the frequencies: pair ``i`` of an axis of ``n`` channels turns by ``base ** (-2 * i / n)`` a step.
    interleave : bool
        Pairs ``(2i, 2i + 1)``, or ``(i, i + head_dim / 2)`` when False.
    factor, low, high, attention_factor : float
        YaRN: frequencies are blended with ``frequency / factor`` by a ramp from ``low`` to ``high`` over the pair
        index, and the result is multiplied by ``attention_factor``. ``factor`` 1 is plain rotation.
    is_qk_norm : bool
        False leaves out the norm and the weights.
    output_fp8 : bool
        float8_e4m3fn outputs: q and k times ``output_quant_scale``, v times ``v_quant_scale``, saturated.
    q_out, k_out, v_out : Optional[torch.Tensor]
        Written and returned when given.

    Returns
    -------
    Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        ``(batch, seq, heads, head_dim)``, or ``(tokens, heads, head_dim)`` for 2-D input.
    """
    heads = (num_heads_q, num_heads_k, num_heads_v)
    channels = (num_frame_channels, num_height_channels, num_width_channels)
    _check_qkv(qkv, heads, head_dim, (ppf, pph, ppw))
    _expect(
        all(c >= 0 and c % 2 == 0 for c in channels) and sum(channels) == head_dim,
        f"channels must be even numbers that sum to head_dim = {head_dim}, got {channels}",
    )
    _expect(
        factor != 1.0 or attention_factor == 1.0, f"attention_factor must be 1 (factor is 1), got {attention_factor}"
    )
    _check_weight("q_weight", q_weight, num_heads_q * head_dim, qkv)
    _check_weight("k_weight", k_weight, num_heads_k * head_dim, qkv)
    dtype = torch.float8_e4m3fn if output_fp8 else torch.bfloat16
    q, k, v = (
        _output(name, given, (*qkv.shape[:-1], n, head_dim), dtype, qkv)
        for name, given, n in zip(("q_out", "k_out", "v_out"), (q_out, k_out, v_out), heads, strict=True)
    )
    _qk_rmsnorm_rope(
        q, k, v, qkv, q_weight, k_weight, ppf, pph, ppw, *channels, head_dim, eps, base, interleave,
        factor, low, high, attention_factor, is_qk_norm, output_quant_scale, v_quant_scale,
    )  # fmt: skip
    return q, k, v


def _check_qkv(qkv: torch.Tensor, heads: tuple[int, int, int], head_dim: int, patches: tuple[int, int, int]) -> None:
    """Validate qkv; ``patches`` are ppf, pph and ppw."""
    _expect(qkv.is_cuda, f"qkv must be on a CUDA device, got {qkv.device}")
    _expect(qkv.dtype == torch.bfloat16, f"qkv must have dtype torch.bfloat16, got {qkv.dtype}")
    _expect(qkv.ndim in (2, 3), f"qkv must have 2 or 3 dimensions, got {qkv.ndim}")
    _expect(qkv.is_contiguous(), f"qkv must be contiguous, got strides {qkv.stride()}")
    _expect(head_dim in HEAD_DIMS, f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")
    _expect(min(heads) > 0 and max(heads) <= MAX_HEADS, f"heads must be 1 to {MAX_HEADS} each, got {heads}")
    columns = sum(heads) * head_dim
    _expect(qkv.shape[-1] == columns, f"qkv.shape[-1] must be {columns} (all heads * head_dim), got {qkv.shape[-1]}")
    _expect(min(patches) > 0, f"ppf, pph, ppw must be positive, got {patches}")
    seq = math.prod(patches)
    if qkv.ndim == 3:
        _expect(qkv.shape[1] == seq, f"qkv.shape[1] must be {seq} (ppf * pph * ppw), got {qkv.shape[1]}")
    else:
        _expect(
            qkv.shape[0] % seq == 0, f"qkv.shape[0] must be a multiple of {seq} (ppf * pph * ppw), got {qkv.shape[0]}"
        )


def _check_weight(name: str, weight: torch.Tensor, size: int, qkv: torch.Tensor) -> None:
    fits = weight.dtype == torch.bfloat16 and weight.numel() == size and weight.device == qkv.device
    _expect(
        fits and weight.is_contiguous(),
        f"{name} must be ({size},) torch.bfloat16 on {qkv.device}, got {tuple(weight.shape)} {weight.dtype} on "
        f"{weight.device}",
    )


def _output(
    name: str, given: Optional[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, qkv: torch.Tensor
) -> torch.Tensor:
    """Allocate the buffer of one result, or return the caller's."""
    out = torch.empty(shape, dtype=dtype, device=qkv.device) if given is None else given
    fits = out.shape == shape and out.dtype == dtype and out.device == qkv.device and out.is_contiguous()
    _expect(
        fits,
        f"{name} must be contiguous {shape} {dtype} on {qkv.device}, got {tuple(out.shape)} {out.dtype} on "
        f"{out.device}",
    )
    return out
