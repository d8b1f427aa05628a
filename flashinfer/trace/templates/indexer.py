# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.indexer``. Scores after the limit of a row are 0 in the reference."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..check import default_check
from ..notation import template_of_text
from ..template import Const, Tensor, TraceTemplate, Var
from .shared import normal, randint, seeded

__all__ = ["compute_paged_mqa_logits_schedule_trace", "fp8_paged_mqa_logits_trace", "fp8_ragged_mqa_logits_trace"]


def _unpacked(kv_fused: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys ``(pages, block_size, head_dim)`` as they are stored, and their scales ``(pages, block_size)``."""
    pages, block_size = kv_fused.shape[:2]
    flat = kv_fused.reshape(pages, -1)
    values = flat[:, : block_size * head_dim].reshape(pages, block_size, head_dim).view(torch.float8_e4m3fn)
    scales = flat[:, block_size * head_dim :].contiguous().view(torch.float32)
    return values, scales


def _fp8_paged_mqa_logits_reference(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    output_dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """Compute in float64 what lies within the limits of the rows."""
    batch, next_n, heads, head_dim = q.shape
    values, scales = _unpacked(kv_fused, head_dim)
    logits = torch.zeros(batch * next_n, max_seq_len, dtype=torch.float64, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        pages = block_tables[b, : -(-length // kv_fused.shape[1])].long()
        keys, scale = values[pages].reshape(-1, head_dim)[:length], scales[pages].reshape(-1)[:length]
        products = (q[b].double().reshape(-1, head_dim) @ keys.double().T).relu().view(next_n, heads, len(keys))
        rows = slice(b * next_n, (b + 1) * next_n)
        scores = (products * weights[rows].double()[:, :, None]).sum(1) * scale.double()
        limits = length - next_n + 1 + torch.arange(next_n, device=q.device)
        seen = torch.arange(length, device=q.device)[None, :] < limits[:, None]
        logits[rows, :length] = torch.where(seen, scores, 0.0)
    return logits.to(output_dtype)


def _fp8_paged_mqa_logits_init(
    *,
    batch_size: int,
    max_seq_len: int = 300,
    next_n: int = 1,
    num_heads: int = 64,
    head_dim: int = 128,
    block_size: int = 64,
    num_pages: int = 0,
    num_rows: int = 0,
    max_blocks: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Requests of one length, so that all scores are defined; pages are a permutation."""
    g = seeded(seed, device)
    width = -(-max_seq_len // block_size)
    pages = max(batch_size * width, 1)
    values = normal(g, pages, block_size * head_dim).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (normal(g, pages, block_size, dtype=torch.float32).abs() + 0.5).view(torch.uint8).reshape(pages, -1)
    order = torch.randperm(pages, generator=g, device=device).int()
    return {
        "q": normal(g, batch_size, next_n, num_heads, head_dim).to(torch.float8_e4m3fn),
        "kv_fused": torch.cat((values, scales), 1).view(pages, block_size, 1, head_dim + 4),
        "weights": normal(g, batch_size * next_n, num_heads, dtype=torch.float32),
        "block_tables": order[: batch_size * width].view(batch_size, width),
        "seq_lens": torch.full((batch_size,), max_seq_len, dtype=torch.int32, device=device),
        "max_seq_len": max_seq_len,
    }


def _fp8_paged_mqa_logits_check(reference_outputs: Any, actual_outputs: Any, **tolerances: Any) -> bool:
    """Compare what lies within the limits: the reference has zeros behind them, where a result may be anything."""
    expected, actual = _only(reference_outputs), _only(actual_outputs)
    seen = torch.where(expected == 0, expected, actual.to(expected.dtype))
    return default_check(expected, seen, **{"rtol": 2e-2, "atol": 2e-2, **tolerances})


def _only(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def _fp8_ragged_mqa_logits_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scales: torch.Tensor,
    weights: torch.Tensor,
    k_starts: torch.Tensor,
    k_ends: torch.Tensor,
    output_dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """Compute in float64 what lies within the ranges of the tokens."""
    products = torch.einsum("thd,kd->thk", q.double(), k.double()).relu()
    logits = torch.einsum("thk,th->tk", products, weights.double()) * k_scales.double()
    place = torch.arange(len(k), device=q.device)[None, :]
    seen = (place >= k_starts[:, None]) & (place < k_ends[:, None])
    return torch.where(seen, logits, 0.0).to(output_dtype)


def _fp8_ragged_mqa_logits_init(
    *,
    num_tokens: int,
    num_heads: int = 64,
    head_dim: int = 128,
    num_keys: int = 300,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Tokens that see all keys, so that all scores are defined."""
    g = seeded(seed, device)
    return {
        "q": normal(g, num_tokens, num_heads, head_dim).to(torch.float8_e4m3fn),
        "k": normal(g, num_keys, head_dim).to(torch.float8_e4m3fn),
        "k_scales": normal(g, num_keys, dtype=torch.float32).abs() + 0.5,
        "weights": normal(g, num_tokens, num_heads, dtype=torch.float32),
        "k_starts": torch.zeros(num_tokens, dtype=torch.int32, device=device),
        "k_ends": torch.full((num_tokens,), num_keys, dtype=torch.int32, device=device),
    }


def _compute_paged_mqa_logits_schedule_reference(
    seq_lens: torch.Tensor, out: Optional[torch.Tensor] = None, **_: Any
) -> torch.Tensor:
    """Row i is where split ``i * (total // blocks) + min(i, total % blocks)`` of 256 keys lies."""
    if out is not None:
        num_rows = len(out)
    elif seq_lens.is_cuda:
        num_rows = torch.cuda.get_device_properties(seq_lens.device).multi_processor_count + 1
    else:
        num_rows = 2
    ends = ((seq_lens.clamp_min(0).long() + 255) // 256).cumsum(0)
    total, blocks = int(ends[-1]) if len(ends) else 0, num_rows - 1
    row = torch.arange(num_rows, device=seq_lens.device)
    split = row * (total // blocks) + row.clamp_max(total % blocks)
    request = torch.searchsorted(ends, split, right=True)
    begins = torch.cat((ends.new_zeros(1), ends))[request]
    within = torch.where(request < len(seq_lens), split - begins, 0)
    return torch.stack((request, within), 1).int()


def _compute_paged_mqa_logits_schedule_init(
    *, batch_size: int, max_seq_len: int = 8192, num_rows: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"seq_lens": randint(seeded(seed, device), max_seq_len + 1, batch_size)}


fp8_paged_mqa_logits_trace = template_of_text(
    "fp8_paged_mqa_logits_nn{next_n}_H{num_heads}_D{head_dim}_bs{block_size}",
    "paged_mqa_logits",
    var="batch_size num_pages num_rows max_blocks max_seq_len",
    hidden="num_kv_heads block_row_bytes",
    inputs="q[batch_size, next_n, num_heads, head_dim]; kv_fused[num_pages, block_size, num_kv_heads, block_row_bytes];"
    "weights[num_rows, num_heads]; block_tables[batch_size, max_blocks]; seq_lens[batch_size]; max_seq_len:int32",
    outputs="logits[num_rows, max_seq_len]:float32",
    notes={
        "kv_fused": "pages of block_size * head_dim e4m3 numbers, then block_size float32 scales",
        "seq_lens": "keys that the newest token of each request sees",
    },
    reference=_fp8_paged_mqa_logits_reference,
    init=_fp8_paged_mqa_logits_init,
    check=_fp8_paged_mqa_logits_check,
    description="Scores of cached keys for sparse attention: weighted sums over heads of relu(q . k).",
)

fp8_ragged_mqa_logits_trace = template_of_text(
    "fp8_ragged_mqa_logits_H{num_heads}_D{head_dim}",
    "ragged_mqa_logits",
    var="num_tokens num_keys",
    inputs="q[num_tokens, num_heads, head_dim]; k[num_keys, head_dim]; k_scales[num_keys];"
    "weights[num_tokens, num_heads]; k_starts[num_tokens]; k_ends[num_tokens]",
    outputs="logits[num_tokens, num_keys]:float32",
    notes={"k_starts": "first key that each token sees", "k_ends": "end of the keys that each token sees"},
    reference=_fp8_ragged_mqa_logits_reference,
    init=_fp8_ragged_mqa_logits_init,
    check=_fp8_paged_mqa_logits_check,
    description="Scores of keys of a prefill for sparse attention: weighted sums over heads of relu(q . k).",
)

compute_paged_mqa_logits_schedule_trace = TraceTemplate(
    "paged_mqa_logits",
    axes={"batch_size": Var(), "num_rows": Var("blocks and one more"), "two": Const(abbrev="", value=2)},
    inputs={"seq_lens": Tensor(("batch_size",), dtype="int32")},
    outputs={"schedule": Tensor(("num_rows", "two"), dtype="int32")},
    name_prefix="compute_paged_mqa_logits_schedule",
    reference=_compute_paged_mqa_logits_schedule_reference,
    init=_compute_paged_mqa_logits_schedule_init,
    description="Shares of the blocks of fp8_paged_mqa_logits, in splits of 256 keys.",
)
