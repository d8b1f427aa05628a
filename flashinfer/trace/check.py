# SPDX-License-Identifier: Apache-2.0
"""Is an output right? Tolerances by dtype, and the comparison that templates use unless they bring their own."""

from __future__ import annotations

from typing import Any, Optional

import torch

__all__ = ["default_check", "default_tolerances", "standard_check"]

_TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 1e-1,
    torch.float8_e5m2: 1e-1,
    torch.float4_e2m1fn_x2: 1.0,
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the three low bits; the fourth is the sign


def default_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """``(rtol, atol)`` of a dtype; exact for integers."""
    tolerance = _TOLERANCES.get(dtype, 0.0)
    return tolerance, tolerance


def default_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    rtol: Optional[float] = None,
    atol: Optional[float] = None,
    max_mismatch_pct: float = 0.0,
    min_cos_sim: Optional[float] = 0.999,
) -> bool:
    """Compare outputs with those of a reference.

    Parameters
    ----------
    reference_outputs, actual_outputs
        A tensor or number, or lists, tuples or dicts of them. Lengths, keys and shapes must agree; dtypes need not.
    rtol, atol
        Of floating-point values; the looser of the two dtypes' defaults when omitted.
    max_mismatch_pct
        Elements, in percent of each tensor, that may be outside the tolerance.
    min_cos_sim
        Lower bound of the cosine similarity over the elements that are finite on both sides; ``None`` skips it.

    Returns
    -------
    bool
        NaN equals NaN. A tensor of zeros has no direction, so its cosine is not looked at.
    """

    def same(reference: Any, actual: Any) -> bool:
        if isinstance(reference, dict):
            return (
                isinstance(actual, dict)
                and reference.keys() == actual.keys()
                and all(same(reference[key], actual[key]) for key in reference)
            )
        if isinstance(reference, (list, tuple)):
            return (
                isinstance(actual, (list, tuple))
                and len(reference) == len(actual)
                and all(same(r, a) for r, a in zip(reference, actual, strict=True))
            )
        if isinstance(actual, (dict, list, tuple)):
            return False
        if reference is None or actual is None:
            return reference is actual
        return _tensors_agree(
            torch.as_tensor(reference), torch.as_tensor(actual), rtol, atol, max_mismatch_pct, min_cos_sim
        )

    return same(reference_outputs, actual_outputs)


def _tensors_agree(
    reference: torch.Tensor,
    actual: torch.Tensor,
    rtol: Optional[float],
    atol: Optional[float],
    max_mismatch_pct: float,
    min_cos_sim: Optional[float],
) -> bool:
    if reference.shape != actual.shape:
        return False
    if reference.numel() == 0:
        return True
    actual = actual.to(reference.device)
    if not (reference.is_floating_point() or actual.is_floating_point()):
        return _mismatch_pct(reference == actual) <= max_mismatch_pct
    defaults = zip(default_tolerances(reference.dtype), default_tolerances(actual.dtype), strict=True)
    default_rtol, default_atol = (max(pair) for pair in defaults)
    r, a = _comparable(reference), _comparable(actual)
    close = torch.isclose(
        a,
        r.to(a.dtype),
        rtol=default_rtol if rtol is None else rtol,
        atol=default_atol if atol is None else atol,
        equal_nan=True,
    )
    if _mismatch_pct(close) > max_mismatch_pct:
        return False
    return min_cos_sim is None or _cosine(r, a) >= min_cos_sim


def _mismatch_pct(good: torch.Tensor) -> float:
    return 100.0 * (good.numel() - int(good.sum())) / good.numel()


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """fp32 values; fp64 stays, since its tolerance is finer than fp32."""
    if x.dtype == torch.float4_e2m1fn_x2:
        table = torch.tensor([sign * m for sign in (1.0, -1.0) for m in _E2M1], device=x.device)
        packed = x.view(torch.uint8).long()
        return table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)]
    return x if x.dtype == torch.float64 else x.float()


def _cosine(reference: torch.Tensor, actual: torch.Tensor) -> float:
    finite = reference.isfinite() & actual.isfinite()
    # fp64, because squares of large fp32 values overflow
    r, a = reference[finite].double(), actual[finite].double()
    norm = float(r.norm() * a.norm())
    return float(r @ a) / norm if norm > 0.0 else 1.0


standard_check = default_check  # its second public name
