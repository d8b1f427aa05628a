# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``fused_qk_rmsnorm_rope``: RMSNorm over all heads of q and of k, then 3-D RoPE."""

from __future__ import annotations

from typing import Any

import torch

from ..._runtime.errors import ArgumentError
from ..check import default_check
from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var
from .shared import fp8_check, normalize, to_fp8

__all__ = ["fused_qk_rmsnorm_rope_trace"]


def _frequencies(channels: int, base: float, factor: float, low: float, high: float) -> torch.Tensor:
    """base^(-2 i / channels) for one spatial axis. YaRN divides by ``factor``: not at index low, fully from high on."""
    index = torch.arange(channels // 2, dtype=torch.float64)
    frequency = base ** (-2 * index / channels)
    if factor == 1:
        return frequency
    end = high + 0.001 if abs(high - low) <= 1e-6 else high
    blend = ((index - low) / (end - low)).clamp(0, 1)
    return frequency * (1 - blend) + frequency / factor * blend


def _rotate(x: torch.Tensor, angle: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Turn the pairs of the last dimension: neighbours when interleaved, otherwise element i with i + D/2."""
    cos, sin = angle.cos().float(), angle.sin().float()
    if interleave:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _fused_qk_rmsnorm_rope_reference(
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
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Angles in fp64: what remains is the error of the kernel under test, not of the table.
    token = torch.arange(qkv.numel() // qkv.shape[-1]) % (ppf * pph * ppw)
    positions = (token // (pph * ppw), token % (pph * ppw) // ppw, token % ppw)
    channels = (num_frame_channels, num_height_channels, num_width_channels)
    angle = torch.cat(
        [
            position[:, None] * _frequencies(count, base, factor, low, high)
            for position, count in zip(positions, channels, strict=True)
        ],
        dim=-1,
    )
    angle = angle.reshape(*qkv.shape[:-1], 1, head_dim // 2).to(qkv.device)

    def stored(x: torch.Tensor, scale: float) -> torch.Tensor:
        return to_fp8(x.float() * scale, torch.float8_e4m3fn) if output_fp8 else x.to(qkv.dtype)

    def embedded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        if is_qk_norm:
            y = (normalize(y.flatten(-2), eps) * weight.float()).view(y.shape)
            y = y if output_fp8 else y.to(qkv.dtype).float()  # one more rounding by contract, absent for fp8
        return stored(_rotate(y, angle, interleave) * attention_factor, output_quant_scale)

    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([num_heads_q, num_heads_k, num_heads_v], dim=-2)
    return embedded(q, q_weight), embedded(k, k_weight), stored(v, v_quant_scale).contiguous()


def _bf16_check(reference_outputs: Any, actual_outputs: Any, *, atol: float = 0.05, **tolerances: Any) -> bool:
    # The rounding before the rotation may fall either way: one step below |x| = 4 is 0.016, and a pair has two.
    return default_check(reference_outputs, actual_outputs, atol=atol, **tolerances)


def _qk_template(rank: int, fp8: bool) -> TraceTemplate:
    tokens = ("batch_size", "seq_len") if rank == 3 else ("num_tokens",)
    dtype: dict[str, Any] = {"dtype": "float8_e4m3fn"} if fp8 else {"dtype_from": "qkv"}
    prefix = "fused_qk_rmsnorm_rope" + ("_flat" if rank == 2 else "") + ("_fp8" if fp8 else "")
    axes: dict[str, Any] = {axis: Var() for axis in tokens}
    axes |= {
        "num_heads_q": Const(abbrev="q"),
        "num_heads_k": Const(abbrev="k"),
        "num_heads_v": Const(abbrev="v"),
        "head_dim": Const(abbrev="d"),
        "num_frame_channels": Const("channels that turn with the frame", abbrev="f"),
        "num_height_channels": Const("channels that turn with the row", abbrev="h"),
        "num_width_channels": Const("channels that turn with the column", abbrev="w"),
        "qkv_dim": Const("columns q | k | v, heads inside each", abbrev=""),
        "q_dim": Const("num_heads_q * head_dim", abbrev=""),
        "k_dim": Const("num_heads_k * head_dim", abbrev=""),
        "output_fp8": Const("1 for fp8 outputs", abbrev="", value=int(fp8)),
    }
    return TraceTemplate(
        "qk_rmsnorm_rope",
        axes=axes,
        inputs={
            "qkv": Tensor((*tokens, "qkv_dim")),
            "q_weight": Tensor(("q_dim",)),
            "k_weight": Tensor(("k_dim",)),
            "ppf": Scalar("int32", description="frames"),
            "pph": Scalar("int32", description="patch rows of a frame"),
            "ppw": Scalar("int32", description="patch columns of a frame"),
            "eps": Scalar(),
            "base": Scalar(),
            "interleave": Scalar("bool", description="pairs are neighbours, otherwise half a head apart"),
            "factor": Scalar(description="YaRN stretch, 1 for none"),
            "low": Scalar(),
            "high": Scalar(),
            "attention_factor": Scalar(),
            "is_qk_norm": Scalar("bool"),
            "output_quant_scale": Scalar(),
            "v_quant_scale": Scalar(),
        },
        outputs={f"{x}_out": Tensor((*tokens, f"num_heads_{x}", "head_dim"), param=f"{x}_out", **dtype) for x in "qkv"},
        name_prefix=prefix,
        reference=_fused_qk_rmsnorm_rope_reference,
        check=fp8_check if fp8 else _bf16_check,
        constraints=[
            "qkv_dim == (num_heads_q + num_heads_k + num_heads_v) * head_dim",
            "q_dim == num_heads_q * head_dim",
            "k_dim == num_heads_k * head_dim",
            "num_frame_channels + num_height_channels + num_width_channels == head_dim",
            "seq_len == ppf * pph * ppw" if rank == 3 else "num_tokens % (ppf * pph * ppw) == 0",
        ],
        description="RMSNorm over all heads of q and of k, 3-D rotary embedding; v is copied.",
    )


_TEMPLATES = {(rank, fp8): _qk_template(rank, fp8) for rank in (3, 2) for fp8 in (False, True)}


def _choose(qkv: torch.Tensor, output_fp8: bool = False, **_: Any) -> TraceTemplate:
    key = (qkv.ndim, bool(output_fp8))
    if key not in _TEMPLATES:
        raise ArgumentError(f"fi_trace: qkv must have rank 2 or 3, got {qkv.ndim}")
    return _TEMPLATES[key]


fused_qk_rmsnorm_rope_trace = TraceDispatch(_choose, tuple(_TEMPLATES.values()))
