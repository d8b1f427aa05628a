# SPDX-License-Identifier: Apache-2.0
"""Rounds of the soak (run.py): one random call of a family, compared with the reference of its tests."""

from __future__ import annotations

import random
from typing import Any, Callable

import torch

from flashinfer import BatchMLAPagedAttentionWrapper
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace

from ..attention.inputs import FORMS, LAYOUTS, Batch
from ..attention.reference import Attention
from ..attention.wrappers import close, paged, ragged
from ..fused_moe import layers
from ..mla.latent import Latent
from ..mla.latent import close as close_latent
from ..mla.latent import workspace as latent_workspace

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def is_hopper(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability() == (9, 0)


def lengths(draw: random.Random, device: str) -> tuple[list[int], list[int]]:
    """Return rows and keys of each request: prompts, decoding requests, empty ones, one long among many short."""
    longest, most = (160, 6) if device == "cpu" else (3000, 40)
    kind = draw.choice(["prompts", "mixed", "one long", "equal"])
    if kind == "equal":
        rows, count = draw.randint(1, longest), draw.randint(1, most // 2)
        return [rows] * count, [rows + draw.choice([0, draw.randint(0, longest)])] * count
    qo_lens, kv_lens = [], []
    for i in range(draw.randint(1, most)):
        is_prompt = kind == "prompts" or (i == 0 if kind == "one long" else draw.random() < 0.15)
        qo_lens.append(draw.randint(0, longest if kind != "prompts" else longest // 4) if is_prompt else 1)
        kv_lens.append(draw.choice([0, qo_lens[-1], qo_lens[-1] + draw.randint(0, longest)]))
    return qo_lens, kv_lens


def prefill(seed: int, device: str) -> None:
    """Run ragged or paged prefill with either backend."""
    draw = random.Random(seed)
    qo_lens, kv_lens = lengths(draw, device)
    dims = (64, 64) if device == "cpu" else draw.choice([(64, 64), (128, 128), (192, 128), (256, 256)])
    dtype = torch.float16 if device == "cpu" else draw.choice([torch.float16, torch.bfloat16])
    kv_heads, group = draw.choice([1, 2, 8]), draw.choice([1, 3, 4, 7, 8])
    batch = Batch(qo_lens, kv_lens, kv_heads * group, kv_heads, *dims, dtype, device=device)
    options: dict[str, Any] = {"causal": draw.random() < 0.7}
    if draw.random() < 0.3:
        options["window_left"] = draw.choice([0, 5, 100, 1000])
    if draw.random() < 0.2 and device != "cpu":
        options["logits_soft_cap"] = 8.0
    backend = draw.choice(["fa2", "fa3", "auto"]) if is_hopper(device) else "auto"
    plan = {**options, "head_dim_vo": batch.head_dim_vo, "q_data_type": dtype}
    if draw.random() < 0.65:
        layout, form = draw.choice(LAYOUTS), draw.choice(FORMS if dims[0] == dims[1] else FORMS[1:])  # [0]: one tensor
        pages = batch.pages(draw.choice([1, 5, 16, 16, 32, 64]))
        wrapper, inputs = paged(batch, pages, layout, backend, **plan), (batch.q, batch.cache(pages, layout, form))
    else:
        wrapper, inputs = ragged(batch, "NHD", backend, **plan), (batch.q, *batch.dense("NHD"))
    first, second = (wrapper.run(*inputs, return_lse=True) for _ in range(2))
    close(first, batch.expected(Attention(**options)), TOLERANCE[dtype])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def mla(seed: int, device: str) -> None:
    """Run latent attention with either backend."""
    draw = random.Random(seed)
    longest, most = (90, 4) if device == "cpu" else (5000, 60)
    qo_lens = [draw.choice([0, 1, 1, 1, 2, draw.randint(1, 20)]) for _ in range(draw.randint(1, most))]
    kv_lens = [rows + draw.randint(0, longest) for rows in qo_lens]
    heads = 16 if device == "cpu" else draw.choice([16, 40, 64, 128])
    dtype = torch.float16 if device == "cpu" else draw.choice([torch.float16, torch.bfloat16])
    batch = Latent(device, draw.choice([1, 16, 64]), qo_lens, kv_lens, dtype=dtype, heads=heads)
    if not sum(qo_lens):
        return
    causal, backend = draw.random() < 0.5, draw.choice(["fa2", "fa3"]) if is_hopper(device) else "auto"
    wrapper = batch.plan(BatchMLAPagedAttentionWrapper(latent_workspace(device), backend=backend), causal)
    first, second = (wrapper.run(*batch.arguments, return_lse=True) for _ in range(2))
    close_latent(first, batch.expected(causal), {torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def fused_moe(seed: int, device: str) -> None:
    """Run fused experts with random routing: even, skewed, all tokens to one expert."""
    draw = random.Random(seed)
    tokens = draw.randint(1, 20) if device == "cpu" else draw.choice([draw.randint(1, 64), draw.randint(1, 3000)])
    hidden, inner = (64, 64) if device == "cpu" else (draw.choice([256, 512, 1024]), draw.choice([128, 384, 512]))
    experts = draw.choice([4, 8] if device == "cpu" else [8, 32, 128])
    sizes = (tokens, hidden, inner, experts, draw.choice([1, 2, 4]))
    has_codes = draw.random() < 0.4
    call = layers.fp8_block(*sizes, device=device) if has_codes else layers.dense(*sizes, device)
    ids = call["token_selected_experts"]
    routing = draw.choice(["even", "skewed", "one"])
    if routing == "one":
        ids.fill_(draw.randrange(experts))
    elif routing == "skewed":
        ids.copy_(torch.where(torch.rand(ids.shape, device=device) < 0.8, draw.randrange(experts), ids))
    first, second = (cutlass_fused_moe(**call)[0] for _ in range(2))
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=False))
    expected = cutlass_fused_moe_trace(**call).reference(**call, **scales)
    if has_codes:
        layers.close_codes(first, expected, layers.spread_of_codes(call))
    else:
        layers.close(first, expected)
    assert torch.equal(first, second)


ROUNDS: dict[str, Callable[[int, str], None]] = {"prefill": prefill, "mla": mla, "fused_moe": fused_moe}
