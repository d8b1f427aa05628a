# SPDX-License-Identifier: Apache-2.0
"""Calls of fp8_paged_mqa_logits for tests, and what is compared: scores within the limits of the rows."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.trace.templates.indexer import fp8_paged_mqa_logits_trace


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


def check(made: dict[str, Any], actual: torch.Tensor, is_half: bool = False) -> None:
    """Compare scores with float64: each one, and all together.

    Products of e4m3 on Hopper keep 13 fraction bits of the largest term, so the error of a score is relative to the
    products before they cancel, not to the score. Errors are random: together they are far smaller.
    """
    reference = fp8_paged_mqa_logits_trace.reference
    expected = reference(**{**made, "output_dtype": torch.float64})
    values = made["kv_fused"].shape[1] * made["q"].shape[3]
    magnitudes = made["kv_fused"].reshape(len(made["kv_fused"]), -1).clone()
    magnitudes[:, :values] &= 0x7F
    absolute = {"kv_fused": magnitudes.view(made["kv_fused"].shape), "weights": made["weights"].abs()}
    absolute["q"] = made["q"].float().abs().to(made["q"].dtype)
    size = reference(**{**made, **absolute, "output_dtype": torch.float64})
    seen = torch.arange(actual.shape[1], device=actual.device)[None, :] < limits(made)[:, None]
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual[seen]).all())
    error = (actual.double() - expected).abs()[seen]
    bound = 2**-13 * size[seen] + (2**-11 * expected[seen].abs() if is_half else 0.0) + 1e-6
    assert bool((error <= bound).all()), f"largest error {float(error.max()):.3g}"
    assert float(error.norm()) <= 1e-3 * float(expected[seen].norm()), "relative error of all scores"
