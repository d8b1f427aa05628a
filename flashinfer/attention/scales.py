# SPDX-License-Identifier: Apache-2.0
"""Calibration scales: ``value = stored * scale``. Scales of q and k multiply the logits, scales of v the output."""

from __future__ import annotations

from numbers import Real
from typing import Optional, Sequence, TypeVar, Union

import torch

from .._runtime.errors import ArgumentError

__all__ = [
    "Scale",
    "convert_fp8_query",
    "fp8_scales",
    "number_on_host",
    "product_of_numbers",
    "scale_logits",
    "scale_output",
    "scale_output_per_head",
]

Scale = Union[float, torch.Tensor, None]
_S = TypeVar("_S")


def _number(op: str, name: str, scale: Union[float, torch.Tensor]) -> Union[float, torch.Tensor]:
    """Return a float or a 0-dimensional tensor.

    A one-element tensor with dimensions could change the shape of a product, so its dimensions are removed.
    """
    if isinstance(scale, torch.Tensor) and scale.numel() == 1:
        return scale.reshape(())
    if isinstance(scale, (float, int, Real)):  # torch.compile traces isinstance with float and int, not with Real
        return float(scale)
    got = f"shape {tuple(scale.shape)}" if isinstance(scale, torch.Tensor) else f"a {type(scale).__name__}"
    raise ArgumentError(f"{op}: {name} must be a number or a tensor of one element, got {got}")


def number_on_host(scale: _S) -> Union[_S, float]:
    """Return a one-element tensor in host memory as a float, since reading it does not wait; return others unchanged.

    A float multiplies ``sm_scale``, while a tensor would multiply 16-bit q, which may overflow. A compiled graph cannot
    read the value, so the tensor stays a tensor there.
    """
    if not isinstance(scale, torch.Tensor) or scale.is_cuda or scale.numel() != 1 or torch.compiler.is_compiling():
        return scale
    return float(scale)


def scale_logits(op: str, q: torch.Tensor, sm_scale: float, **scales: Scale) -> tuple[torch.Tensor, float]:
    """Fold the scales of q and k into ``sm_scale``; GPU tensors multiply q instead, because reading them would wait."""
    for name, given in scales.items():
        scale = number_on_host(given)
        if scale is None:
            continue
        number = _number(op, name, scale)
        if isinstance(number, torch.Tensor):
            q = (q * number).to(q.dtype)
        else:
            sm_scale *= number
    return q, sm_scale


def product_of_numbers(*scales: Scale) -> float:
    """Return the factor by which :func:`scale_logits` multiplied ``sm_scale``; GPU tensors multiplied q instead."""
    product = 1.0
    for scale in map(number_on_host, scales):
        if scale is not None and not isinstance(scale, torch.Tensor):
            product *= float(scale)
    return product


def scale_output(op: str, out: torch.Tensor, scale: Scale, name: str = "v_scale") -> None:
    """Multiply ``out`` in place by a number or a one-element tensor; None and 1.0 do nothing."""
    if scale is not None and not (isinstance(scale, float) and scale == 1.0):
        out.mul_(_number(op, name, scale))


def _per_head(
    op: str, name: str, scale: Scale, num_heads: int, expected: int, like: torch.Tensor
) -> Optional[torch.Tensor]:
    """Expand one scale, or ``expected`` scales, to float32 ``(num_heads, 1)`` by repeating each for its heads."""
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor) and scale.numel() not in (1, expected, num_heads):
        raise ArgumentError(f"{op}: {name} must have 1 or {expected} elements (one for each head), got {scale.numel()}")
    if not isinstance(scale, torch.Tensor):
        return torch.full((num_heads, 1), scale, dtype=torch.float32, device=like.device)
    scale = scale.to(device=like.device, dtype=torch.float32).reshape(-1)
    return scale.repeat_interleave(num_heads // scale.numel()).unsqueeze(-1)


def convert_fp8_query(
    op: str, q: torch.Tensor, scale_q: Scale, scale_k: Scale, num_kv_heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """Convert 8-bit queries to ``dtype`` and multiply them by the per-head scales of q and k.

    Every 8-bit float is exact in 16 bits; only the product with the scales is rounded.
    """
    result, heads = q.to(torch.float32), q.shape[-2]
    of_q = _per_head(op, "scale_q", scale_q, heads, heads, q)
    for scale in (of_q, _per_head(op, "scale_k", scale_k, heads, num_kv_heads, q)):
        if scale is not None:
            result = result * scale
    return result.to(dtype)


def fp8_scales(
    op: str, q: torch.Tensor, sm_scale: float, scales: Sequence[Scale], num_kv_heads: int, **more: Scale
) -> tuple[list[Optional[torch.Tensor]], float]:
    """Return the scales of q, k and v for kernels that multiply 8 bits: float32 of each head, or None for 1.

    Numbers for q and k multiply ``sm_scale``, which is returned too; so do ``more`` of them, or else the scales of q.
    """
    of_heads: list[Optional[torch.Tensor]] = []
    counts = (q.shape[-2], num_kv_heads, num_kv_heads)
    for name, given, heads in zip(("scale_q", "scale_k", "scale_v"), scales, counts, strict=True):
        scale = number_on_host(given)
        if name != "scale_v" and isinstance(scale, (float, int)):
            sm_scale *= scale
            scale = None
        if isinstance(scale, torch.Tensor) and scale.numel() == heads:  # used in place where it can be
            of_heads.append(scale.to(device=q.device, dtype=torch.float32).reshape(-1).contiguous())
            continue
        of_head = _per_head(op, name, scale, heads, heads, q)
        of_heads.append(None if of_head is None else of_head.reshape(-1))
    for name, given in more.items():
        scale = number_on_host(given)
        if scale is None:
            continue
        number = _number(op, name, scale)
        if isinstance(number, torch.Tensor):
            of_head = _per_head(op, name, number, counts[0], counts[0], q).reshape(-1)  # type: ignore[union-attr]
            of_heads[0] = of_head if of_heads[0] is None else of_heads[0] * of_head
        else:
            sm_scale *= number
    return of_heads, sm_scale


def scale_output_per_head(op: str, out: torch.Tensor, scale_v: Scale, num_kv_heads: int) -> None:
    scale = _per_head(op, "scale_v", scale_v, out.shape[-2], num_kv_heads, out)
    if scale is not None:
        out.mul_(scale)
