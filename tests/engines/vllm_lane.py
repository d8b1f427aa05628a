# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler, bf16 experts, rotary embedding and Mamba decode on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .reference import counts_agree
from .table import case


@case("vllm", "sampler: top-k, top-p and both", "sampling.top_{p,k,k_top_p}_sampling_from_{probs,logits}")
def sampler() -> None:
    """Counts of 4,000 draws stay within five standard deviations of the filtered distribution."""
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sample

    torch.manual_seed(0)
    logits, draws = torch.randn(1, 32) * 2, 4000
    probs = logits.softmax(-1)[0]
    order = probs.argsort(descending=True)
    for k, p in ((5, None), (None, 0.7), (6, 0.8)):
        keep = torch.zeros(32, dtype=torch.bool)
        first = order[: k or 32]
        left = probs[first] / (probs[first].sum() if k else 1)  # top-p acts on what top-k leaves, renormalised
        keep[first[: int((left.cumsum(0) - left < (p or 2)).sum())]] = True
        expected = torch.where(keep, probs, 0) / probs[keep].sum()
        many = logits.expand(draws, -1).contiguous()
        k_tensor = None if k is None else torch.full((draws,), k, dtype=torch.int32)
        p_tensor = None if p is None else torch.full((draws,), p)
        counts_agree(flashinfer_sample(many, k_tensor, p_tensor), expected, draws)


def experts_config(count: int) -> Any:
    """The parts of vLLM's configuration of a mixture that FlashInferExperts reads."""
    ranks = SimpleNamespace(ep_rank=0, ep_size=1, tp_rank=0, tp_size=1, dp_size=1, use_ep=False)
    silent = dict.fromkeys(
        ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    )
    parts = {"num_local_experts": count, "moe_parallel_config": ranks, "in_dtype": torch.bfloat16}
    return SimpleNamespace(device=torch.device("cpu"), **parts, **silent)


@case("vllm", "experts, bf16: FlashInferExperts", "fused_moe.cutlass_fused_moe")
def experts() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts

    torch.manual_seed(0)
    tokens, experts_, hidden, inner, top_k = 9, 6, 64, 96, 2
    layer = FlashInferExperts(experts_config(experts_), FUSED_MOE_UNQUANTIZED_CONFIG)
    up, gate = (torch.randn(experts_, inner, hidden) * hidden**-0.5 for _ in range(2))
    down = torch.randn(experts_, hidden, inner) * inner**-0.5
    w1, w2 = torch.cat((up, gate), dim=1).bfloat16(), down.bfloat16()  # the order that vLLM prepares for this backend
    x, out = torch.randn(tokens, hidden).bfloat16(), torch.empty(tokens, hidden, dtype=torch.bfloat16)
    weights, ids = torch.randn(tokens, experts_).softmax(-1).topk(top_k)
    more = (MoEActivation.SILU, experts_, None, None, None, None, None, None, False)
    layer.apply(out, x, w1, w2, weights, ids, *more)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            u, g = (x[token].double() @ m[expert].bfloat16().double().T for m in (up, gate))
            expected[token] += weight.double() * (torch.nn.functional.silu(g) * u) @ w2[expert].double().T
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)


@case("vllm", "rotary embedding with a cache of cosines", "rope.apply_rope_with_cos_sin_cache_inplace")
def rotary() -> None:
    """The custom op of vLLM's rotary layers, as it is registered for FlashInfer."""
    from vllm.model_executor.layers.rotary_embedding import common

    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 7, 4, 2, 64
    angles = torch.outer(torch.arange(32).float(), 10000 ** (-torch.arange(0, dim, 2) / dim))
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q, k = torch.randn(tokens, heads * dim).bfloat16(), torch.randn(tokens, kv_heads * dim).bfloat16()
    positions = torch.tensor([3, 0, 31, 5, 5, 9, 2])
    expected = []
    for x, count in ((q, heads), (k, kv_heads)):
        first, second = x.float().view(tokens, count, dim).chunk(2, dim=-1)
        cos, sin = (part[positions][:, None] for part in cache.chunk(2, dim=-1))
        expected.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(tokens, -1))
    call = common._flashinfer_rotary_embedding
    call(positions, q, k, dim, cache, True)
    for found, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


@case("vllm", "Mamba-2 decode: FlashInferSSUBackend", "mamba.selective_state_update")
def mamba_decode() -> None:
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import FlashInferSSUBackend

    torch.manual_seed(0)
    batch, heads, dim, states, groups = 3, 4, 64, 128, 2
    settings = SimpleNamespace(
        ssu_algorithm=None, enable_stochastic_rounding=False, stochastic_rounding_philox_rounds=None
    )
    state = torch.randn(5, heads, dim, states)
    x, z = (torch.randn(batch, heads, dim).bfloat16() for _ in range(2))
    b, c = (torch.randn(batch, groups, states).bfloat16() for _ in range(2))
    step, bias, a, d = torch.randn(batch, heads), torch.randn(heads), -torch.rand(heads), torch.randn(heads)
    wide = [v[..., None].expand(*v.shape, dim) for v in (step, bias, d)]  # vLLM passes numbers of heads this way
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    before, out = state.double(), torch.empty_like(x)
    FlashInferSSUBackend(settings)(
        state, x, wide[0], a[:, None, None].expand(heads, dim, states), b, c, wide[2], wide[1], z=z, dt_softplus=True,
        state_batch_indices=slots, null_block_id=-1, out=out,
    )  # fmt: skip
    rate = torch.nn.functional.softplus(step.double() + bias.double())[..., None, None]
    b, c = (v.double().repeat_interleave(heads // groups, dim=1)[:, :, None] for v in (b, c))
    after = before[slots.long()] * (rate * a.double()[:, None, None]).exp() + rate * b * x.double()[..., None]
    y = (after * c).sum(-1) + d.double()[:, None] * x.double()
    expected = y * torch.nn.functional.silu(z.double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(state[slots.long()].double(), after, rtol=1e-4, atol=1e-4)
