# SPDX-License-Identifier: Apache-2.0
"""vLLM's own backends on CPU tensors: what they build and pass on reaches our kernels, and comes back right."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from typing import Any, Iterator
from unittest import mock

import torch

from .table import case

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
#: Two requests that decode, one that continues a prompt and one that begins one.
QUERY_LENS, SEQ_LENS = [1, 1, 7, 20], [33, 5, 40, 20]


def _copy_page_indices(out: torch.Tensor, table: torch.Tensor, stride: int, indptr: torch.Tensor, **_: Any) -> None:
    """Do what vLLM's Triton kernel does: page ids of all requests, one after the other."""
    for i in range(len(indptr) - 1):
        begin, end = int(indptr[i]), int(indptr[i + 1])
        out[begin:end] = table[i, : end - begin]


class _OnHost:
    """Triton kernel replaced by a function of the host; the grid has one program per request."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda out, table, stride, indptr, **more: _copy_page_indices(out, table, stride, indptr[: grid[0] + 1])


def _config(dtype: torch.dtype) -> Any:
    """The parts of vLLM's configuration that the attention backend reads; what it does not read raises."""
    from vllm.config.compilation import CUDAGraphMode

    ns = SimpleNamespace
    return ns(
        cache_config=ns(cache_dtype="auto", get_resolved_kv_cache_layout=lambda: _layout()),
        model_config=ns(dtype=dtype, max_model_len=256, get_num_attention_heads=lambda parallel: HEADS),
        attention_config=ns(disable_flashinfer_q_quantization=False, use_trtllm_attention=False),
        compilation_config=ns(cudagraph_mode=CUDAGraphMode.NONE, max_cudagraph_capture_size=None),
        scheduler_config=ns(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=ns(cp_kv_cache_interleave_size=1, dcp_comm_backend="", decode_context_parallel_size=1),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def _layout() -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.LBNHC


@contextlib.contextmanager
def _attention_on_the_host(window: int) -> Iterator[Any]:
    from vllm.v1.attention.backends import flashinfer as backend

    layer = SimpleNamespace(window_left=window, logits_soft_cap=None, sm_scale=DIM**-0.5, has_sinks=False)
    patches = {
        "_copy_page_indices_kernel": _OnHost(),
        "get_dcp_world_size_and_rank": lambda sharded: (1, 0),
        "get_num_attention_heads_from_layers": lambda config, names: HEADS,
        "get_per_layer_parameters": lambda config, names, cls: {"layer": layer},
        "can_use_trtllm_attention": lambda *args, **kwargs: False,
        "use_trtllm_attention": lambda *args, **kwargs: False,
        "PIN_MEMORY": False,
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(backend, name, value))
        stack.enter_context(mock.patch.object(backend, "pin_host_range_buf", lambda n: None))
        yield backend


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention of the last tokens of one request, in float64."""
    group, (rows, keys) = HEADS // KV_HEADS, (len(q), len(k))
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(DIM)
    behind = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    visible = (behind >= 0) & ((behind <= window) if window >= 0 else True)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~visible, -math.inf).softmax(-1), v)


@case("vllm", "attention: metadata builder, prefill and decode", "BatchPrefill..., BatchDecodeWithPagedKVCacheWrapper")
def attention() -> None:
    run_attention(window=-1)


@case("vllm", "attention with a sliding window", "BatchPrefill..., BatchDecodeWithPagedKVCacheWrapper")
def attention_with_window() -> None:
    run_attention(window=11)


def run_attention(window: int, dtype: torch.dtype = torch.bfloat16) -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    torch.manual_seed(0)
    counts = [-(-n // PAGE) for n in SEQ_LENS]
    pages = torch.randperm(sum(counts) + 3)[: sum(counts)].int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    cache = torch.zeros(sum(counts) + 3, PAGE, KV_HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)  # logical order: B H N C
    keys = [torch.randn(n, KV_HEADS, 2 * DIM).to(dtype) for n in SEQ_LENS]
    for i, count in enumerate(counts):
        mine = pages[sum(counts[:i]) :][:count]
        table[i, :count] = mine
        for token, row in enumerate(keys[i]):
            cache[mine[token // PAGE], :, token % PAGE] = row
    starts = torch.tensor([0, *torch.tensor(QUERY_LENS).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    known = {
        "query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lens, "num_reqs": len(lens),
        "num_actual_tokens": int(starts[-1]), "max_query_len": max(QUERY_LENS), "max_seq_len": max(SEQ_LENS),
        "block_table_tensor": table, "slot_mapping": torch.zeros(int(starts[-1]), dtype=torch.int64), "causal": True,
        "seq_lens_cpu_upper_bound": lens,
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    batch = CommonAttentionMetadata(**{name: value for name, value in known.items() if name in fields})
    with _attention_on_the_host(window) as backend:
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=dtype)
        builder = backend.FlashInferMetadataBuilder(spec, ["layer"], _config(dtype), torch.device("cpu"))
        builder.set_workspace_buffer(torch.zeros(32 << 20, dtype=torch.uint8))
        metadata = builder.build(0, batch)
        assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
        with mock.patch.object(backend, "get_current_vllm_config_or_none", lambda: None):
            sliding = None if window < 0 else window + 1
            impl = backend.FlashInferImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, sliding, "auto")
        impl.dcp_world_size = 1
        q = torch.randn(int(starts[-1]), HEADS, DIM).to(dtype)
        out = torch.zeros_like(q)
        layer = SimpleNamespace(_q_scale=None, _k_scale_float=1.0, _v_scale_float=1.0, _q_scale_float=1.0)
        impl.forward(layer, q, None, None, cache, metadata, out)
    for i, both in enumerate(keys):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        expected = _reference(q[rows], *both.split(DIM, dim=-1), window)
        torch.testing.assert_close(out[rows].double(), expected, rtol=2e-2, atol=2e-2)


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
        counts = torch.bincount(flashinfer_sample(many, k_tensor, p_tensor), minlength=32)
        assert not counts[~keep].any(), (k, p, "a token outside of the filter was drawn")
        spread = 5 * (draws * expected * (1 - expected)).sqrt() + 1
        assert ((counts - draws * expected).abs() <= spread).all(), (k, p)


@case("vllm", "experts, bf16: FlashInferExperts", "fused_moe.cutlass_fused_moe")
def experts() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts

    torch.manual_seed(0)
    tokens, experts_, hidden, inner, top_k = 9, 6, 64, 96, 2
    ranks = SimpleNamespace(ep_rank=0, ep_size=1, tp_rank=0, tp_size=1, dp_size=1, use_ep=False)
    silent = dict.fromkeys(
        ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    )
    parts = {"num_local_experts": experts_, "moe_parallel_config": ranks, "in_dtype": torch.bfloat16}
    config = SimpleNamespace(device=torch.device("cpu"), **parts, **silent)
    layer = FlashInferExperts(config, FUSED_MOE_UNQUANTIZED_CONFIG)
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
