# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layers on CPU tensors: sparse MLA, gated delta rule, experts in fp8 and MXFP4, norms, top-k, probes."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .reference import dequantize_mxfp4, gated_delta_rule, mixture, random_mxfp4, run_linear
from .table import case
from .vllm_lane import experts_config

F64 = torch.float64


@case("vllm", "what vLLM asks this package for at start: has_flashinfer_*", "names, inspect.signature(...run)")
def probes() -> None:
    """The answers that a Hopper machine depends on. ninja and nvcc are looked up first, which say nothing about us."""
    from vllm.utils import flashinfer as names

    wanted = (
        "has_flashinfer_autotune_v2", "has_flashinfer_comm", "has_flashinfer_moe", "has_flashinfer_nvlink_one_sided",
        "has_flashinfer_nvlink_two_sided",
        "has_flashinfer_sm90_nope_mla", "has_flashinfer_cutlass_fused_moe", "has_flashinfer_trtllm_fused_moe",
        "has_flashinfer_bf16_gemm", "has_flashinfer_packed_fused_kda_decode",
    )  # fmt: skip
    with mock.patch.object(names, "has_flashinfer", lambda: True):
        missing = [name for name in wanted if not getattr(names, name).__wrapped__()]
    assert not missing, missing


class _Sparse:
    """Requests whose rows chose some of their tokens, and a paged cache of compressed keys for them."""

    HEADS, CKV, TOP_K, BLOCK = 16, 512, 128, 64

    def __init__(self, rope: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.rope, self.dtype = rope, dtype
        self.query_lens, self.lens = [1, 3, 1], [200, 40, 131]
        blocks = [-(-n // self.BLOCK) for n in self.lens]
        self.block_table = torch.zeros(3, max(blocks), dtype=torch.int32)
        order = torch.randperm(sum(blocks) + 2).int()
        for i, count in enumerate(blocks):
            self.block_table[i, :count] = order[sum(blocks[:i]) :][:count]
        plain = torch.randn(sum(blocks) + 2, self.BLOCK, self.CKV + rope)
        self.cache = plain.to(dtype)
        self.request = torch.repeat_interleave(torch.arange(3), torch.tensor(self.query_lens)).int()
        starts = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0)])
        row_in_request = torch.arange(5) - starts[self.request.long()]
        own = torch.tensor(self.query_lens)[self.request.long()]
        self.contexts = torch.tensor(self.lens)[self.request.long()] - own + row_in_request + 1
        self.chosen = torch.full((5, self.TOP_K), -1, dtype=torch.int32)
        for row, context in enumerate(self.contexts.tolist()):
            picked = torch.randperm(context)[: self.TOP_K]
            self.chosen[row, : len(picked)] = picked.int()
        self.batch = SimpleNamespace(
            num_reqs=3, query_start_loc_cpu=starts.int(), query_start_loc=starts.int(),
            seq_lens=torch.tensor(self.lens, dtype=torch.int32), seq_lens_cpu_upper_bound=None,
        )  # fmt: skip

    def expected(self, q: torch.Tensor, rope: torch.Tensor, scale: float, key_scale: float) -> torch.Tensor:
        out = []
        for row, request in enumerate(self.request.tolist()):
            tokens = self.chosen[row][self.chosen[row] >= 0].long()
            blocks = self.block_table[request, tokens // self.BLOCK].long()
            keys = self.cache[blocks, tokens % self.BLOCK].to(F64) * key_scale
            both = torch.cat([q[row], rope[row]], dim=-1).to(F64)
            out.append((both @ keys.T * scale).softmax(-1) @ keys[:, : self.CKV])
        return torch.stack(out)


def _run_sparse(rope: int, dtype: torch.dtype, upper_bound: bool) -> None:
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90 as backend

    requests, scale, key_scale = _Sparse(rope, dtype), 192**-0.5, 0.5 if dtype == torch.float8_e4m3fn else 1.0
    heads, ckv, top_k = requests.HEADS, requests.CKV, requests.TOP_K
    state = backend._SM90State(
        torch.device("cpu"), heads, dtype, 8, top_k, kv_lora_rank=ckv, qk_rope_head_dim=rope, sm_scale=scale,
        index_topk=top_k, index_kpool=1,
    )  # fmt: skip
    builder = object.__new__(backend.FlashInferMLASparseSM90Builder)
    builder.state, builder._adaptive_verification = state, False
    impl = object.__new__(backend.FlashInferMLASparseSM90Impl)
    impl.num_heads, impl.qk_rope_head_dim, impl.head_size, impl.kv_lora_rank = heads, rope, ckv + rope, ckv
    impl.topk_indices_buffer, impl.use_fp8_kv_cache = requests.chosen, dtype == torch.float8_e4m3fn
    cache = requests.cache.view(torch.uint8) if impl.use_fp8_kv_cache else requests.cache
    batch = requests.batch
    if upper_bound:
        batch.seq_lens_cpu_upper_bound = batch.seq_lens + torch.tensor([3, 0, 7], dtype=torch.int32)
    for _ in range(2):  # the second plan is the first one, clamped again
        torch.cuda.is_current_stream_capturing = lambda: False  # raises in a torch without CUDA
        rows, lens, exact = builder._kv_lens_host(batch)
        assert exact is not upper_bound
        state.plan(rows, lens, *((None, None) if exact else (batch, requests.request)))
        metadata = SimpleNamespace(
            block_size=requests.BLOCK, req_id_per_token=requests.request, block_table=requests.block_table, state=state
        )
        q, q_rope = torch.randn(rows, heads, ckv).bfloat16(), torch.randn(rows, heads, rope).bfloat16()
        out, _ = impl.forward_mqa((q, q_rope), cache, metadata, SimpleNamespace(_k_scale_float=key_scale))
        expected = requests.expected(q, q_rope, scale, key_scale)
        torch.testing.assert_close(out.to(F64), expected, rtol=2e-2, atol=2e-2)


SPARSE = "mla.BatchMLAPagedAttentionWrapper, its _plan_info and work list"


@case("vllm", "sparse MLA for Hopper: planned from exact lengths", SPARSE)
def sparse_mla() -> None:
    _run_sparse(64, torch.bfloat16, upper_bound=False)
    _run_sparse(0, torch.bfloat16, upper_bound=False)


@case("vllm", "sparse MLA for Hopper: upper bounds, its kernel clamps our work list", SPARSE)
def sparse_mla_bounds() -> None:
    _run_sparse(64, torch.bfloat16, upper_bound=True)
    _run_sparse(0, torch.bfloat16, upper_bound=True)


@case("vllm", "sparse MLA for Hopper: fp8 cache without the rope part", SPARSE)
def sparse_mla_fp8() -> None:
    _run_sparse(0, torch.float8_e4m3fn, upper_bound=False)
    _run_sparse(0, torch.float8_e4m3fn, upper_bound=True)


@case("vllm", "MLA prefill: FlashInferPrefillBackend, new tokens and a chunk of context", "BatchPrefillWithRagged...")
def mla_prefill() -> None:
    """vLLM takes this class on Blackwell alone, and asks for "cutlass"; here its wrappers are those of Hopper."""
    from vllm.v1.attention.backends.mla.prefill import flashinfer as module

    torch.manual_seed(0)
    heads, lens, context, scale = 4, [9, 4], [12, 0], 192**-0.5
    backend = object.__new__(module.FlashInferPrefillBackend)
    for name, value in {"num_heads": heads, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}.items():
        setattr(backend, name, value)
    backend._prefill_main, backend._prefill_chunks, backend._workspace_spec = None, [], None
    backend._wrapper_workspace_ptr = 0
    backend._global_hyperparameters = SimpleNamespace(sm_scale=scale, window_left=-1, logits_soft_cap=None)
    starts, ends = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (lens, context))
    chunk = SimpleNamespace(index=0, query_start_loc=starts, cu_seq_lens=ends)
    memory = SimpleNamespace(get_simultaneous=lambda spec: (torch.zeros(32 << 20, dtype=torch.uint8),))
    plan = SimpleNamespace(
        query_start_loc=starts, chunked_context=SimpleNamespace(chunks=[chunk]), q_data_type=torch.bfloat16,
        output_dtype=torch.bfloat16,
    )  # fmt: skip

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, heads, 192).bfloat16(), torch.randn(count, heads, 128).bfloat16()

    q, (k, v), (old_k, old_v) = torch.randn(sum(lens), heads, 192).bfloat16(), part(sum(lens)), part(sum(context))
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper

    def on_hopper(workspace: torch.Tensor, layout: str, backend: str) -> Any:
        assert backend == "cutlass"
        return wrapper(workspace, layout, backend="auto")

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(module, "current_workspace_manager", lambda: memory))
    stack.enter_context(mock.patch.object(module, "BatchPrefillWithRaggedKVCacheWrapper", on_hopper))
    with stack:
        backend.prepare_metadata(plan)
        new, new_lse = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
        old, old_lse = backend.run_prefill_context_chunk(chunk, q, old_k, old_v)
    for out, lse, keys, values, ends_, causal in (
        (new, new_lse, k, v, starts, True),
        (old, old_lse, old_k, old_v, ends, False),
    ):
        for i, count in enumerate(lens):
            rows, cols = slice(int(starts[i]), int(starts[i + 1])), slice(int(ends_[i]), int(ends_[i + 1]))
            if cols.start == cols.stop:
                assert not out[rows].any() and lse[:, rows].eq(-math.inf).all()
                continue
            logits = torch.einsum("qhd,khd->hqk", q[rows].to(F64), keys[cols].to(F64)) * scale
            if causal:
                logits = logits.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
            expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values[cols].to(F64))
            torch.testing.assert_close(out[rows].to(F64), expected, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse[:, rows].to(F64), logits.logsumexp(-1), rtol=1e-3, atol=1e-2)


@case("vllm", "gated delta rule, prefill: fi_chunk_gated_delta_rule, checkpoints", "gdn_prefill.chunk_gated_delta_rule")
def gdn_prefill() -> None:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layer
    from vllm.v1.attention.backends.gdn_attn import plan_flashinfer_checkpoints

    torch.manual_seed(0)
    lens, heads, value_heads, dim = [130, 5, 192], 2, 4, 128
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
    q, k = (torch.randn(1, sum(lens), heads, dim).bfloat16() for _ in range(2))
    v = torch.randn(1, sum(lens), value_heads, dim).bfloat16()
    g, beta = -torch.rand(1, sum(lens), value_heads), torch.rand(1, sum(lens), value_heads).bfloat16()
    for state_dtype in (torch.float32, torch.bfloat16):
        state = torch.randn(len(lens), value_heads, dim, dim).to(state_dtype)
        every, cu_starts, rows = plan_flashinfer_checkpoints([64, 0, 128], lens)
        checkpoints = torch.zeros(cu_starts[-1], value_heads, dim, dim)
        out, final = layer.fi_chunk_gated_delta_rule(
            q, k, v, g, beta, state, output_final_state=True, cu_seqlens=starts, state_checkpoints=checkpoints,
            checkpoint_cu_starts=torch.tensor(cu_starts), checkpoint_every_n_tokens=every,
        )  # fmt: skip
        for i in range(len(lens)):
            tokens = slice(int(starts[i]), int(starts[i + 1]))
            wanted, after, steps = gated_delta_rule(
                q[0, tokens], k[0, tokens], v[0, tokens], g[0, tokens].exp(), beta[0, tokens], state[i]
            )
            torch.testing.assert_close(out[0, tokens].to(F64), wanted, rtol=3e-2, atol=3e-2)
            torch.testing.assert_close(final[i].to(F64), after, rtol=3e-2, atol=3e-2)
            if rows[i] or i == 0:
                token = {0: 64, 2: 128}[i]
                torch.testing.assert_close(checkpoints[rows[i]].to(F64), steps[token - 1], rtol=3e-2, atol=3e-2)


def _run_experts(
    config: Any, w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, more: tuple, weights: Any, ids: Any
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts

    tokens, hidden = weights.shape[0], w2.shape[1]
    layer = FlashInferExperts(experts_config(len(w1)), config)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    activation, a1q_scale = more
    layer.apply(out, x, w1, w2, weights, ids, activation, len(w1), None, a1q_scale, None, None, None, None, False)
    return out


def _routed(tokens: int, experts: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, experts).softmax(-1).topk(top_k)


@case("vllm", "experts, fp8 per tensor: FlashInferExperts", "fused_moe.cutlass_fused_moe")
def experts_fp8() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_quant_config

    torch.manual_seed(0)
    tokens, experts, hidden, inner, e4m3 = 9, 4, 128, 128, torch.float8_e4m3fn
    w1_scale, w2_scale = torch.rand(experts) / 100 + 0.01, torch.rand(experts) / 100 + 0.01
    w1, w2 = torch.randn(experts, 2 * inner, hidden) * 8, torch.randn(experts, hidden, inner) * 8
    w1, w2 = w1.to(e4m3), w2.to(e4m3)
    a1_scale, a2_scale = torch.tensor(0.02), torch.tensor(0.03)
    config = make_fp8_moe_quant_config(Fp8MoeBackend.FLASHINFER_CUTLASS, w1_scale, w2_scale, a1_scale, a2_scale)
    x = (torch.randn(tokens, hidden) / a1_scale).to(e4m3)
    weights, ids = _routed(tokens, experts)
    out = _run_experts(config, w1, w2, x, (MoEActivation.SILU, None), weights, ids)
    plain = [w.to(F64) * s[:, None, None] for w, s in ((w1, w1_scale), (w2, w2_scale))]

    def quantize(y: torch.Tensor) -> torch.Tensor:
        return (y / a2_scale).clamp(-448, 448).float().to(e4m3).to(F64) * a2_scale

    expected = mixture(x.to(F64) * a1_scale, *plain, weights, ids, middle=quantize)
    torch.testing.assert_close(out.to(F64), expected, rtol=5e-2, atol=5e-2)


@case("vllm", "experts, fp8 in blocks of 128: FlashInferExperts", "fused_moe.cutlass_fused_moe")
def experts_fp8_blocks() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_quant_config

    torch.manual_seed(0)
    tokens, experts, hidden, inner, e4m3 = 9, 4, 256, 128, torch.float8_e4m3fn
    w1, w2 = (torch.randn(experts, 2 * inner, hidden) * 8).to(e4m3), (torch.randn(experts, hidden, inner) * 8).to(e4m3)
    w1_scale, w2_scale = (torch.rand(experts, w.shape[1] // 128, w.shape[2] // 128) / 100 + 0.01 for w in (w1, w2))
    config = make_fp8_moe_quant_config(
        Fp8MoeBackend.FLASHINFER_CUTLASS, w1_scale, w2_scale, None, None, block_shape=[128, 128]
    )
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = _routed(tokens, experts)
    out = _run_experts(config, w1, w2, x, (MoEActivation.SILU, None), weights, ids)
    wide = [s.repeat_interleave(128, 1).repeat_interleave(128, 2).to(F64) for s in (w1_scale, w2_scale)]
    expected = mixture(x.to(F64), w1.to(F64) * wide[0], w2.to(F64) * wide[1], weights, ids)
    error = (out.to(F64) - expected).norm() / expected.norm()
    assert error < 0.05, f"relative error {error:.3f}: rows of e4m3 account for 0.03"


@case(
    "vllm",
    "experts, MXFP4 weights with bias and clamp (gpt-oss): its preparation, FlashInferExperts",
    "fused_moe.cutlass_fused_moe",
)
def experts_mxfp4() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    torch.manual_seed(0)
    tokens, experts, hidden, inner = 9, 4, 256, 128
    (w1, s1), (w2, s2) = random_mxfp4(experts, 2 * inner, hidden), random_mxfp4(experts, hidden, inner)
    b1, b2 = torch.randn(experts, 2 * inner).bfloat16(), torch.randn(experts, hidden).bfloat16()
    prepared = mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
        mxfp4.Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16, SimpleNamespace(), w1, w2, s1, s2, b1, b2
    )
    p1, p2, ps1, ps2, pb1, pb2 = prepared
    config = mxfp4_w4a16_moe_quant_config(ps1, ps2, pb1, pb2, gemm1_alpha=1.702, gemm1_beta=1.0, gemm1_clamp_limit=7.0)
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = _routed(tokens, experts)
    out = _run_experts(config, p1, p2, x, (MoEActivation.SWIGLUOAI, None), weights, ids)
    plain1, plain2 = dequantize_mxfp4(w1, s1), dequantize_mxfp4(w2, s2)
    order = torch.cat([torch.arange(1, 2 * inner, 2), torch.arange(0, 2 * inner, 2)])  # checkpoints interleave gate, up
    expected = mixture(
        x.to(F64), plain1[:, order], plain2, weights, ids, bias=(b1[:, order], b2), alpha=1.702, beta=1.0, limit=7.0
    )
    torch.testing.assert_close(out.to(F64), expected, rtol=3e-2, atol=3e-1)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.to(F64)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(F64)


@case(
    "vllm",
    "norms: MiniMax M3, Muse Spark's gated residual",
    "norm.gemma_{rmsnorm,fused_add_rmsnorm}, gated_residual_rmsnorm",
)
def norms() -> None:
    from vllm.models.minimax_m3.nvidia import model as minimax
    from vllm.models.muse_spark.common.ops import fused_rmsnorm

    torch.manual_seed(0)
    norm = minimax.MiniMAXGemmaRMSNorm(256, eps=1e-6).bfloat16()
    norm.weight.data.normal_()
    x, residual = torch.randn(7, 256).bfloat16(), torch.randn(7, 256).bfloat16()
    torch.testing.assert_close(norm(x).to(F64), _rms(x, norm.weight + 1, 1e-6), rtol=2e-2, atol=2e-2)
    both = x.to(F64) + residual.to(F64)
    out, left = norm(x.clone(), residual.clone())
    torch.testing.assert_close(left.to(F64), both, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.to(F64), _rms(both.bfloat16(), norm.weight + 1, 1e-6), rtol=3e-2, atol=3e-2)
    assert fused_rmsnorm.postnorm_gated_residual.__module__.startswith("flashinfer.")


@case("vllm", "top-k: logits of a vocabulary, the sparse indexer's decode stage", "top_k, topk.top_k_ragged_transform")
def top_k() -> None:
    from vllm.model_executor.layers import indexer_topk, logits_processor

    torch.manual_seed(0)
    scores = torch.randn(3, 5000)
    with (
        mock.patch.object(logits_processor.current_platform, "is_cuda", lambda: True),
        mock.patch.object(logits_processor, "has_flashinfer", lambda: True),
    ):
        select = logits_processor._flashinfer_topk()
    values, indices = select(scores, 20, sorted=True, deterministic=True)
    expected = scores.topk(20, dim=-1)
    assert torch.equal(values, expected.values) and torch.equal(indices.long(), expected.indices)
    logits = torch.randn(4, 2050)[:, :2049]  # rows wider than they are long, as vLLM's buffer is
    chosen = torch.empty(4, 512, dtype=torch.int32)
    stage = object.__new__(indexer_topk.SparseIndexerTopk)
    lens = torch.tensor([[2049, 2048], [100, 99]], dtype=torch.int32)
    with mock.patch.object(indexer_topk.SparseIndexerTopk, "resolve_backend", lambda *args: "flashinfer"):
        stage.forward(logits, lens, 2, chosen, 512, 2049)
    for row, length in enumerate(lens.flatten().tolist()):
        valid = chosen[row][chosen[row] >= 0].long()
        wanted = logits[row, :length].topk(min(512, length)).indices
        assert sorted(valid.tolist()) == sorted(wanted.tolist()), row


class _Mamba:
    """A Mamba-2 layer: 4 heads of 64 in 2 groups, 128 states, its numbers of heads expanded as vLLM expands them."""

    HEADS, DIM, GROUPS, STATES = 4, 64, 2, 128

    def __init__(self, slots: int) -> None:
        torch.manual_seed(0)
        heads, dim, states = self.HEADS, self.DIM, self.STATES
        self.pool = torch.randn(slots, heads, dim, states)
        self.rate, self.bias, self.skip = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
        self.a = self.rate[:, None, None].expand(heads, dim, states)
        self.wide_bias, self.d = (x[:, None].expand(heads, dim) for x in (self.bias, self.skip))

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(count, self.HEADS, self.DIM).bfloat16()
        b, c = (torch.randn(count, self.GROUPS, self.STATES).bfloat16() for _ in range(2))
        return x, torch.randn(count, self.HEADS).bfloat16(), b, c

    def step(self, state: torch.Tensor, parts: tuple[torch.Tensor, ...], row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state and the output of one token, in float64."""
        x, dt, b, c = (part[row].to(F64) for part in parts)
        rate = torch.nn.functional.softplus(dt + self.bias.to(F64))[:, None, None]
        b, c = (v.repeat_interleave(self.HEADS // self.GROUPS, dim=0)[:, None] for v in (b, c))
        state = state.to(F64) * (rate * self.rate.to(F64)[:, None, None]).exp() + rate * b * x[..., None]
        return state, (state * c).sum(-1) + self.skip.to(F64)[:, None] * x


_MAMBA = SimpleNamespace(ssu_algorithm=None, enable_stochastic_rounding=False, stochastic_rounding_philox_rounds=None)


@case("vllm", "Mamba-2 decode of drafts, with slots for the states of all tokens", "mamba.selective_state_update")
def mamba_drafts() -> None:
    """States of tokens go to slots of their own; the first one read is that of the last accepted token."""
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    layer = _Mamba(14)
    slots = torch.tensor([[3, 1, 7], [2, 9, 4], [0, 0, 0], [12, 13, 11]], dtype=torch.int32)  # 0 is vLLM's empty slot
    accepted, starts = torch.tensor([2, 1, 1, 3], dtype=torch.int32), torch.tensor([0, 3, 5, 6, 9], dtype=torch.int32)
    parts = x, dt, b, c = layer.tokens(9)
    pool, out = layer.pool.clone(), torch.zeros_like(x)
    ssu_dispatch.FlashInferSSUBackend(_MAMBA)(
        pool, x, dt[..., None].expand(*dt.shape, layer.DIM), layer.a, b, c, layer.d, layer.wide_bias,
        dt_softplus=True, state_batch_indices=slots, dst_state_batch_indices=slots, out=out,
        num_accepted_tokens=accepted, cu_seqlens=starts,
    )  # fmt: skip
    wanted = layer.pool.to(F64)
    for i in (0, 1, 3):
        state = wanted[slots[i, accepted[i] - 1]]
        for n, row in enumerate(range(int(starts[i]), int(starts[i + 1]))):
            state, y = layer.step(state, parts, row)
            wanted[slots[i, n]] = state
            torch.testing.assert_close(out[row].to(F64), y, rtol=2e-2, atol=1e-1)
    torch.testing.assert_close(pool.to(F64), wanted, rtol=1e-3, atol=1e-3)


@case(
    "vllm", "Mamba-2 decode by replay of a ring: selective_state_update_replayssm_flashinfer", "mamba.checkpointing_ssu"
)
def mamba_replay() -> None:
    """Twelve steps of three requests; vLLM's own kernel moves the rings on. Requests are padded with the empty slot."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    from flashinfer.mamba.checkpointing_ssu import allocate_checkpointing_ssu_scratch, checkpointing_ssu

    layer, window, slots = _Mamba(6), 4, torch.tensor([4, 0, 2, 5], dtype=torch.int32)
    shapes = MambaStateShapeCalculator.append_replayssm_ring(
        ((1, 1), (layer.HEADS, layer.DIM, layer.STATES)),
        layer.GROUPS,
        1,
        window,
        ssu_dispatch.MambaBackendEnum.FLASHINFER,
    )
    x_cache, b_cache = (torch.zeros(6, *shapes[i], dtype=torch.bfloat16) for i in (2, 4))
    dt_cache = torch.zeros(6, *shapes[3])
    start, before, query = (torch.zeros(6, dtype=torch.int32) for _ in range(3))
    scratch = allocate_checkpointing_ssu_scratch(
        batch_size=4, num_heads=layer.HEADS, num_predicted_tokens=1, max_window=window, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    states = layer.pool.to(F64).clone()
    with mock.patch.object(ssu_dispatch, "_flashinfer_replayssm_kernel", checkpointing_ssu):
        for step in range(12):
            parts = x, dt, b, c = layer.tokens(4)
            out = torch.zeros_like(x)
            ssu_dispatch.selective_state_update_replayssm_flashinfer(
                layer.pool, x, dt[..., None].expand(*dt.shape, layer.DIM), layer.a, b, c, out, x_cache, b_cache,
                dt_cache, start, before, query, logical_window=window, D=layer.d, dt_bias=layer.wide_bias,
                dt_softplus=True, state_batch_indices=slots, scratch=scratch if step % 2 else None,
            )  # fmt: skip
            for row in (0, 2, 3):
                states[slots[row]], y = layer.step(states[slots[row]], parts, row)
                torch.testing.assert_close(out[row].to(F64), y, rtol=3e-2, atol=1e-1)


@case(
    "vllm",
    "residual with gates, next norm and its router input (Muse Spark)",
    "norm.gated_residual_next_rmsnorm, norm.kernels...run",
)
def muse_boundary() -> None:
    from vllm.models.muse_spark.nvidia import model

    torch.manual_seed(0)
    assert model.HAS_ROUTER_OUTPUT
    hidden, rows = 512, 5
    branch, stream = torch.randn(rows, hidden).bfloat16(), torch.randn(rows, hidden)  # the stream is kept in float32
    (alpha, beta), (weight, after) = torch.randn(2, hidden), torch.randn(2, hidden).bfloat16()
    norm = {"variance_epsilon": 1e-5, "has_weight": True, "supports_fused_kernel": lambda x: True}
    post_norm = SimpleNamespace(weight=after, fused_gain_center=1.0, **norm)
    pre_norm = SimpleNamespace(weight=weight, fused_gain_center=0.0, **norm)
    connection = SimpleNamespace(alpha=alpha, beta=beta, _coefficients_ready=True)
    state = SimpleNamespace(post_norm=post_norm, connection=connection, branch=branch, stream=stream)
    scaled = branch.to(F64) * (after.to(F64) + 1)  # the gain stands before the norm
    left = alpha.to(F64) * stream.to(F64) + beta.to(F64) * _rms(scaled, torch.ones(hidden), 1e-5)
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("MuseSpark1xNormPreservingResidualConnection", SimpleNamespace),
            ("_uses_flashinfer_dual_norm", lambda *args: True),
        ):
            stack.enter_context(mock.patch.object(model, name, value))
        assert model.supports_gated_residual_next_rmsnorm(branch, stream, weight, alpha, beta, post_weight=after)
        for router in (None, torch.empty(rows, hidden)):
            out, found = model.norm_residual_then_norm(state, pre_norm, out_dtype=torch.bfloat16, router_input=router)
            torch.testing.assert_close(found.to(F64), left, rtol=2e-2, atol=2e-2)
            wanted = _rms(found, weight, 1e-5)
            torch.testing.assert_close(out.to(F64), wanted, rtol=3e-2, atol=3e-2)
            if router is not None:
                torch.testing.assert_close(router.to(F64), wanted, rtol=3e-2, atol=3e-2)


@case(
    "vllm", "Kimi delta attention, prefill (vLLM takes it on Blackwell): _flashinfer_kda_prefill", "kda.recurrent_kda"
)
def kda_prefill() -> None:
    """The state that vLLM hands on is the one that it passed, updated in place."""
    from vllm.models.kimi_k3.nvidia import kda

    torch.manual_seed(0)
    lens, heads, dim, bound = [70, 5], 2, 128, -5.0
    count = sum(lens)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
    q, k, v, gate = (torch.randn(1, count, heads, dim).bfloat16() for _ in range(4))
    beta, rate, bias = torch.randn(1, count, heads).bfloat16(), torch.randn(heads), torch.randn(heads * dim)
    state, out = torch.randn(2, heads, dim, dim).bfloat16(), torch.empty(1, count, heads, dim, dtype=torch.bfloat16)
    before = state.to(F64)
    found, after = kda._flashinfer_kda_prefill(
        q, k, v, gate, beta, rate, bias, bound, state, starts, out, seq_order=torch.tensor([0, 1], dtype=torch.int32)
    )
    decay = (bound * ((gate[0].to(F64) + bias.to(F64).view(heads, dim)) * rate.to(F64).exp()[:, None]).sigmoid()).exp()
    unit = [x[0].to(F64) * (x[0].to(F64).square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    for i in range(2):
        s = before[i]
        for t in range(int(starts[i]), int(starts[i + 1])):
            s = s * decay[t, :, None]
            error = v[0, t].to(F64) - torch.einsum("hvk,hk->hv", s, unit[1][t])
            s = s + torch.einsum("h,hv,hk->hvk", beta[0, t].to(F64).sigmoid(), error, unit[1][t])
            wanted = torch.einsum("hvk,hk->hv", s, unit[0][t]) * dim**-0.5
            torch.testing.assert_close(found[0, t].to(F64), wanted, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(after[i].to(F64), s, rtol=3e-2, atol=3e-2)


@case("vllm", "linear layer, fp8 weights in blocks of 128: its operator for Hopper", "gemm.fp8_blockscale_gemm_sm90")
def linear_fp8_blocks() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import flashinfer as module

    run_linear(module._flashinfer_fp8_blockscale_gemm_impl, (1, 7, 40))
