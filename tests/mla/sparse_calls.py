# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse_mla for tests: caches of each kind, and which errors of an output are allowed."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from flashinfer.trace.templates.sparse_mla import _sparse_mla_rows, sparse_mla_trace

BF16, F16, F32, FP8, U8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8
SCALE = 192**-0.5


def packed(latent: torch.Tensor, scales: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Return rows of 656 bytes: e4m3 numbers, float32 scales of 128 of them each, bfloat16 numbers."""
    parts = (latent.to(FP8).view(U8), scales.float().contiguous().view(U8), rotary.bfloat16().contiguous().view(U8))
    return torch.cat(parts, -1)


def make(
    device: str,
    tokens: int = 3,
    heads: int = 16,
    top_k: int = 70,
    kind: torch.dtype = BF16,
    dim: int = 576,
    pages: int = 5,
    page_size: int = 16,
    dtype: torch.dtype = BF16,
    seed: int = 0,
    with_lengths: bool = False,
    with_sinks: bool = False,
) -> dict[str, Any]:
    """Arguments of a call. Of the indices, some occur twice and some are -1, also in the middle of lists."""
    g = torch.Generator().manual_seed(seed)
    rows = pages * page_size
    if kind is U8:
        scales = torch.rand(pages, page_size, 4, generator=g) + 0.25
        latent, rotary = (torch.randn(pages, page_size, n, generator=g) for n in (512, 64))
        cache = packed(latent, scales, rotary)
    else:
        cache = torch.randn(pages, page_size, dim, generator=g).to(kind)
    indices = torch.randint(0, max(rows, 1), (tokens, top_k), generator=g, dtype=torch.int32)
    indices[torch.rand(tokens, top_k, generator=g) < 0.2] = -1
    made: dict[str, Any] = {
        "q": torch.randn(tokens, heads, dim, generator=g).to(dtype),
        "kv_cache": cache,
        "indices": indices,
        "sm_scale": SCALE,
        "lengths": torch.randint(0, top_k + 1, (tokens,), generator=g, dtype=torch.int32) if with_lengths else None,
        "sinks": torch.randn(heads, generator=g) if with_sinks else None,
        "kv_scale": 0.5 if kind is FP8 else None,
    }
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in made.items()}


def check(made: dict[str, Any], out: torch.Tensor, lse: Optional[torch.Tensor] = None) -> int:
    """Compare a result with float64, each number within its own bound; return the rows.

    Errors of an output: weights are rounded to the type of the queries, so an output is wrong by at most half a unit of
    the last place of the sum of weights times magnitudes of values, and it is rounded itself. An error of the logits
    changes each weight by that factor, and the sum that divides them too. Logits are sums in float, of bfloat16 keys:
    those of 656 bytes are rounded to that, at random, so that errors add up as squares (six times their deviation).
    """
    expected, scores = sparse_mla_trace.reference(**{**made, "q": made["q"].double()})
    keys = _sparse_mla_rows(made["kv_cache"], made["kv_scale"])
    q, used = made["q"].double(), keys[made["indices"].clamp_min(0).long()]
    products = torch.einsum("thd,tkd->thkd", q, used)
    logits = products.sum(-1) * made["sm_scale"]
    counts = made["indices"] >= 0
    if made["lengths"] is not None:
        counts &= torch.arange(counts.shape[1], device=counts.device)[None, :] < made["lengths"][:, None]
    natural = scores.double() * math.log(2)
    weights = torch.where(counts[:, None, :], torch.exp(logits - natural[..., None]), 0.0)
    size = torch.einsum("thk,tkd->thd", weights, used[..., :512].abs())
    half_unit = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-20}[made["q"].dtype]
    logit_error = 2.0**-18 * products.abs().sum(-1)
    if made["kv_cache"].dtype is U8:
        logit_error = logit_error + 6 * 3**-0.5 * 2.0**-8 * products.norm(dim=-1)
    logit_error = (logit_error * abs(made["sm_scale"])).amax(-1) if logits.shape[-1] else torch.zeros_like(natural)
    bound = (half_unit * (2 if made["kv_cache"].dtype is U8 else 1) + 2 * logit_error + 2.0**-18)[..., None] * size
    bound = bound + half_unit * expected.abs() + 1e-30
    error = (out.double() - expected).abs()
    assert out.shape == expected.shape and out.dtype == made["q"].dtype
    assert bool((error <= bound).all()), f"largest error {float((error / bound).max()):.3g} of its bound"
    if lse is not None:
        seen = scores > -math.inf
        assert lse.dtype is F32 and torch.equal(lse > -math.inf, seen)
        limit = (2 * logit_error + 2.0**-18 * (1 + scores.abs()))[seen]
        assert bool(((lse - scores).abs()[seen] <= limit).all())
    return out.shape[0] * out.shape[1]
