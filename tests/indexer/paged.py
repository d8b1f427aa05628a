# SPDX-License-Identifier: Apache-2.0
"""Calls of fp8_paged_mqa_logits for tests, and what is compared: scores within the limits of the rows."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.trace.templates.indexer import _unpacked, fp8_paged_mqa_logits_trace


def make(device: str, lengths: list[int], **axes: Any) -> dict[str, Any]:
    """Arguments with these lengths; page ids behind a request are out of range, because nothing may read them."""
    most = max(lengths, default=0)
    made = fp8_paged_mqa_logits_trace.init(batch_size=len(lengths), max_seq_len=most, device=device, **axes)
    made["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    block_size = made["kv_fused"].shape[1]
    for b, length in enumerate(lengths):
        made["block_tables"][b, -(-length // block_size) :] = 1 << 30
    return made


def limits(made: dict[str, Any]) -> torch.Tensor:
    next_n = made["q"].shape[1]
    newest = made["seq_lens"].long().repeat_interleave(next_n)
    slot = torch.arange(next_n, device=newest.device).repeat(len(made["seq_lens"]))
    return (newest - next_n + 1 + slot).clamp_min(0)


def fraction_bits(device: torch.device, dim: int) -> int:
    """Return the bits behind the point that products keep of the largest number of an instruction.

    Products of e4m3 on Hopper align 32 products and the sum before them to the largest of these, and cut off what lies
    below 13 bits. Other kernels multiply halves or floats, and add in float.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return 13 if is_hopper and dim % 128 == 0 else 22


def error_bound(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return the largest error of the scores ``(rows, keys)`` of ``q (rows, heads, dim)`` and ``k (keys, dim)``.

    An instruction adds 32 products to a sum. It cuts up to 2^-bits of the largest of these 33 numbers off each of them,
    and off its result: 34 times that. (A bound by the sum of their magnitudes would have to be 34 times as large where
    one of them is as large as all others together; 2^-13 of that sum, without the 34, was exceeded by 2 rows of
    60,374.) relu passes an error on or removes it. Sums over heads are added in float, in four chains: errors of 2^-23
    of the magnitudes, one for each of ``heads / 4 + 4`` additions.
    """
    rows, heads, dim = q.shape
    total = torch.zeros(rows, len(k), device=q.device)
    magnitude = torch.zeros_like(total)
    steps = k.float().view(len(k), dim // 32, 32)
    for h in range(heads):
        products = q[:, h].float().view(rows, 1, dim // 32, 32) * steps
        after = products.sum(-1).cumsum(-1)
        before = torch.nn.functional.pad(after[..., :-1], (1, 0))
        largest = torch.stack((products.abs().amax(-1), before.abs(), after.abs())).amax(0)
        weight = weights[:, h, None].float().abs()
        total += weight * 34 * 2.0**-bits * largest.sum(-1)
        magnitude += weight * after[..., -1].relu()
    return 1.01 * scales.float().abs() * (total + (heads / 4 + 4) * 2.0**-23 * magnitude)


def check(made: dict[str, Any], actual: torch.Tensor, is_half: bool = False, whole: float = 1e-3) -> None:
    """Compare scores with float64: each one within its own bound, and all together, where errors are random."""
    expected = fp8_paged_mqa_logits_trace.reference(**{**made, "output_dtype": torch.float64})
    next_n, dim = made["q"].shape[1], made["q"].shape[3]
    values, scales = _unpacked(made["kv_fused"], dim)
    block_size, bits = made["kv_fused"].shape[1], fraction_bits(made["q"].device, dim)
    seen = torch.arange(actual.shape[1], device=actual.device)[None, :] < limits(made)[:, None]
    bound = torch.zeros(expected.shape, device=actual.device)
    for b, length in enumerate(made["seq_lens"].tolist()):
        pages, rows = made["block_tables"][b, : -(-length // block_size)].long(), slice(b * next_n, (b + 1) * next_n)
        keys, scale = values[pages].reshape(-1, dim)[:length], scales[pages].reshape(-1)[:length]
        bound[rows, :length] = error_bound(made["q"][b], keys, made["weights"][rows], scale, bits)
    check_scores(actual, expected, seen, bound, is_half, whole)


def check_scores(
    actual: torch.Tensor,
    expected: torch.Tensor,
    seen: torch.Tensor,
    bound: torch.Tensor,
    is_half: bool = False,
    whole: float = 1e-3,
) -> None:
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual[seen]).all())
    error = (actual.double() - expected).abs()[seen]
    rounding = 2**-11 * expected[seen].abs() + 2**-25 if is_half else 0.0
    limit = bound[seen].double() + rounding + 1e-30
    assert bool((error <= limit).all()), f"largest error {float((error / limit).max()):.3g} of its bound"
    assert float(error.norm()) <= whole * float(expected[seen].norm()), "relative error of all scores"
