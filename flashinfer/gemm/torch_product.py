# SPDX-License-Identifier: Apache-2.0
"""Products of torch (cuBLASLt). Kept launches return the result, or None where torch would not give the same.

Torch refuses shapes that do not fit, records gradients, and computes in another dtype under autocast.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .._runtime.allocation import reshaped

__all__ = ["torch_bf16", "torch_bmm_fp8", "torch_product", "torch_scaled_mm"]

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_is_grad_enabled = torch.is_grad_enabled  # an attribute of torch takes 0.05 us

OptionalTensor = Optional[torch.Tensor]


def torch_product(
    multiply: Callable[..., Any],
    a: torch.Tensor,
    b: torch.Tensor,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    shape: Sequence[int],
) -> OptionalTensor:
    """Multiply bf16 matrices or batches with ``torch.mm`` or ``torch.bmm``; ``shape`` is that of the result."""
    if not (a.dtype is b.dtype is out_dtype is _BF16) or (_is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return None
    if out is None:
        out = multiply(a, b)
        return out if out.dtype is _BF16 else None  # another dtype: autocast is on
    if out.dtype is not _BF16 or out.shape != shape or out is a or out is b:
        return None
    return multiply(a, b, out=out)


def torch_scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: OptionalTensor,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
) -> OptionalTensor:
    """Multiply e4m3 ``(1, m, k)`` and ``(1, k, n)`` with one scale for each. Reading a shape again takes 0.2 us."""
    (batch, m, k), (weights_batch, weights_k, n) = a_shape, b_shape
    a, b = A.stride(), B.stride()
    if (
        not (A.dtype is B.dtype is _E4M3)
        or not (A_scale.numel() == B_scale.numel() == 1)
        or not (batch == weights_batch == 1 and weights_k == k)
        or a[2] != 1
        or b[1] != 1
        or (k | n | a[1] | b[2]) % 16 != 0
        or (out is not None and (out.dtype is not dtype or out.shape != (1, m, n) or not out.is_contiguous()))
    ):
        return None
    tokens, weights = reshaped(A, (m, k), a[1:], 0), reshaped(B, (k, n), b[1:], 0)
    if out is not None:
        to = reshaped(out, (m, n), (n, 1), 0)
        torch._scaled_mm(tokens, weights, A_scale, B_scale, out_dtype=dtype, use_fast_accum=True, out=to)
        return out
    made = torch._scaled_mm(tokens, weights, A_scale, B_scale, out_dtype=dtype, use_fast_accum=True)
    return reshaped(made, (1, m, n), (m * n, n, 1), 0)


def torch_bf16(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: Optional[torch.Tensor] = None) -> None:
    """Write ``a @ b + bias`` to ``out`` with cuBLASLt: sums and bias in float32, one rounding."""
    if a.requires_grad or b.requires_grad:  # torch refuses out= for them
        a, b = a.detach(), b.detach()
    multiply: Any = torch.mm if a.ndim == 2 else torch.bmm
    if bias is None and out.dtype is a.dtype:
        multiply(a, b, out=out)
    elif bias is None and out.dtype is torch.float32:
        multiply(a, b, torch.float32, out=out)
    else:
        wide = multiply(a, b, out_dtype=torch.float32)
        if bias is None:
            out.copy_(wide)
        else:
            torch.add(wide, bias.detach(), out=out)


def torch_bmm_fp8(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor
) -> None:
    """Multiply one batch entry with cuBLASLt; ``has_scaled_mm`` says for which layouts."""
    torch._scaled_mm(
        A.squeeze(0),
        B.squeeze(0),
        A_scale,
        B_scale,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out.squeeze(0),
    )
