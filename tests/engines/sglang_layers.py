# SPDX-License-Identifier: Apache-2.0
"""SGLang's own layers on CPU tensors: gated delta rule, sampler, norms, experts, top-k of sparse attention, streams.

A module that asks at import whether the platform is CUDA is imported again, under another name, and told that it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any, Iterator
from unittest import mock

import torch

from .reference import counts_agree, dequantize_mxfp4, gated_delta_rule, mixture, random_mxfp4, run_linear
from .sglang_lane import backend_module
from .table import case

F64 = torch.float64


@contextlib.contextmanager
def _patched(module: Any, **values: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@functools.cache
def for_cuda(name: str) -> Any:
    """Import a fresh copy of a module of SGLang that takes the platform for CUDA and this package to be there."""
    homes = [importlib.import_module(f"sglang.srt.utils{part}") for part in ("", ".common")]
    operators = importlib.import_module("sglang.srt.utils.custom_op")
    importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    copy = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as stack:
        for home in homes:
            stack.enter_context(_patched(home, is_cuda=lambda: True, is_flashinfer_available=lambda: True))
        direct = property(lambda wrapper: wrapper.op_func)  # SGLang registers its operators for CUDA alone
        stack.enter_context(mock.patch.object(operators.CustomOpWrapper, "real_impl", direct))
        stack.enter_context(mock.patch.dict(sys.modules, {name: copy}))
        spec.loader.exec_module(copy)
    return copy


def _gdn_kernel() -> Any:
    """FlashInferGDNKernel as its constructor leaves it on a Hopper GPU."""
    backend_module("flashinfer_backend")
    module = importlib.import_module("sglang.srt.layers.attention.linear.kernels.gdn_flashinfer")
    capability = mock.patch.object(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    with _patched(module, is_cuda=lambda: True), capability:
        kernel = module.FlashInferGDNKernel()
    assert kernel.supports_target_verify and not kernel.use_state_pool
    return kernel


class _Layer:
    """One gated delta rule layer: 2 heads of queries, 4 of values, a pool of six states."""

    HEADS, VALUES, DIM = 2, 4, 128

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pool = torch.randn(6, self.VALUES, self.DIM, self.DIM)
        self.a_log, self.bias = torch.randn(self.VALUES), torch.randn(self.VALUES).bfloat16()

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        q, k = (torch.randn(1, count, self.HEADS, self.DIM).bfloat16() for _ in range(2))
        v = torch.randn(1, count, self.VALUES, self.DIM).bfloat16()
        a, b = (torch.randn(count, self.VALUES).bfloat16() for _ in range(2))
        return q, k, v, a, b

    def expected(self, parts: tuple[torch.Tensor, ...], rows: slice, state: torch.Tensor) -> Any:
        q, k, v, a, b = parts
        step = torch.nn.functional.softplus(a[rows].to(F64) + self.bias.to(F64))
        decay = (-self.a_log.to(F64).exp() * step).exp()
        return gated_delta_rule(q[0, rows], k[0, rows], v[0, rows], decay, b[rows].to(F64).sigmoid(), state)


@case("sglang", "gated delta rule, decode: FlashInferGDNKernel", "gdn_decode.gated_delta_rule_decode_pretranspose")
def sglang_gdn_decode() -> None:
    kernel, layer, slots = _gdn_kernel(), _Layer(), torch.tensor([4, 0, 2])
    parts, before = layer.tokens(3), layer.pool.clone()
    q, k, v, a, b = parts
    out = kernel.decode(
        q, k, v, a, b, A_log=layer.a_log, dt_bias=layer.bias, ssm_states=layer.pool, cache_indices=slots,
        query_start_loc=torch.arange(4, dtype=torch.int32),
    )  # fmt: skip
    for row, slot in enumerate(slots.tolist()):
        wanted, after, _ = layer.expected(parts, slice(row, row + 1), before[slot])
        torch.testing.assert_close(out[0, row : row + 1].to(F64), wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(layer.pool[slot].to(F64), after, rtol=1e-3, atol=1e-3)
    assert torch.equal(layer.pool[[1, 3, 5]], before[[1, 3, 5]])


@case("sglang", "gated delta rule, verify of drafts: FlashInferGDNKernel", "gdn_decode.gated_delta_rule_mtp")
def sglang_gdn_verify() -> None:
    kernel, layer, slots, drafts = _gdn_kernel(), _Layer(), torch.tensor([4, 2], dtype=torch.int32), 3
    parts, before = layer.tokens(2 * drafts), layer.pool.clone()
    q, k, v, a, b = parts
    for stable in (False, True):
        steps = torch.zeros(2, drafts, layer.VALUES, layer.DIM, layer.DIM)
        out = kernel.target_verify(
            layer.a_log, layer.bias, q, k, v, a, b, ssm_states=layer.pool, cache_indices=slots,
            query_start_loc=torch.arange(0, 7, drafts, dtype=torch.int32), intermediate_states_buffer=steps,
            intermediate_state_indices=torch.tensor([0, 1]), cache_steps=drafts, retrieve_parent_token=None,
            stable_rows=stable,
        )  # fmt: skip
        assert torch.equal(layer.pool, before), "a verify pass leaves the states as they are"
        for row, slot in enumerate(slots.tolist()):
            rows = slice(row * drafts, (row + 1) * drafts)
            wanted, _, states = layer.expected(parts, rows, before[slot])
            torch.testing.assert_close(out[0, rows].to(F64), wanted, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(steps[row].to(F64), torch.stack(states), rtol=1e-3, atol=1e-3)


@case("sglang", "gated delta rule, prefill with checkpoints: FlashInferGDNKernel", "gdn_prefill.chunk_gated_delta_rule")
def sglang_gdn_prefill() -> None:
    kernel, layer, lens, slots = _gdn_kernel(), _Layer(), [130, 5, 192], torch.tensor([4, 0, -1])
    before, parts = layer.pool.clone(), layer.tokens(sum(lens))
    mixed = torch.cat([x.flatten(2) for x in parts[:3]], dim=-1)  # q, k and v are columns of one projection
    q, k, v = (x.view(1, sum(lens), -1, layer.DIM) for x in mixed.split([256, 256, 512], dim=-1))
    step = torch.nn.functional.softplus(parts[3].float() + layer.bias.float())
    g, beta = (-layer.a_log.exp() * step)[None], parts[4].float().sigmoid()[None]
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
    counts = torch.tensor([0, *(torch.tensor(lens) // 64).cumsum(0)])
    out, _, kept = kernel.extend(
        q, k, v, g, beta, ssm_states=layer.pool, cache_indices=slots, query_start_loc=starts,
        state_checkpoint_cu_starts=counts, num_state_checkpoints=int(counts[-1]), state_checkpoint_every_n_tokens=64,
    )  # fmt: skip
    for i, slot in enumerate([4, 0, 5]):  # a slot of -1 is the last one
        rows = slice(int(starts[i]), int(starts[i + 1]))
        wanted, after, states = layer.expected(parts, rows, before[slot])
        torch.testing.assert_close(out[0, rows].to(F64), wanted, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(layer.pool[slot].to(F64), after, rtol=3e-2, atol=3e-2)
        for n in range(lens[i] // 64):
            found = kept[0, int(counts[i]) + n].to(F64)
            torch.testing.assert_close(found, states[64 * n + 63], rtol=3e-2, atol=3e-2)


@case(
    "sglang",
    "sampler: top-k with top-p, min-p, and its mask of what could be drawn",
    "sampling.{top_k_top_p,min_p}_sampling_from_probs, *_renorm_probs",
)
def sglang_sampler() -> None:
    import flashinfer.sampling

    module = for_cuda("sglang.srt.layers.sampler")
    settings = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="flashinfer"))
    names = {f"top_{x}_renorm_prob": getattr(flashinfer.sampling, f"top_{x}_renorm_probs") for x in "kp"}
    torch.manual_seed(0)
    draws, probs = 4000, (torch.randn(1, 32) * 2).softmax(-1)
    order = probs[0].argsort(descending=True)
    sorted_probs = probs[0][order]
    for k, p, min_p in ((6, 0.8, 0.0), (32, 0.6, 0.0), (8, 0.95, 0.2)):
        before = sorted_probs.cumsum(0) - sorted_probs
        keep = torch.zeros(32, dtype=torch.bool)
        keep[order[(torch.arange(32) < k) & (before < p)]] = True  # both filters see all probabilities ("joint")
        if min_p:
            first = sorted_probs[:k] / sorted_probs[:k].sum()
            keep[:] = False
            keep[order[:k][(first.cumsum(0) - first) < p]] = True
            keep &= probs[0] >= min_p * probs.max()
        many = probs.expand(draws, -1).contiguous()
        info = SimpleNamespace(
            sampling_mask_batch_indices=torch.arange(2), sampling_seed=None, need_min_p_sampling=min_p > 0,
            need_top_k_sampling=True, need_top_p_sampling=True, top_ks=torch.full((draws,), k, dtype=torch.int32),
            top_ps=torch.full((draws,), p), min_ps=torch.full((draws,), min_p),
        )  # fmt: skip
        with _patched(module, get_exec=lambda: settings, **names):
            tokens, mask = module.Sampler._sample_from_probs(SimpleNamespace(), many, info, None, False)
        counts_agree(tokens, torch.where(keep, probs[0], 0) / probs[0][keep].sum(), draws)
        assert torch.equal(mask.weights[0] > 0, keep)


@case(
    "sglang",
    "norms: LayerNorm in float32, RMSNorm with e4m3 output",
    "norm.layernorm, rmsnorm_quant, fused_add_rmsnorm_quant",
)
def sglang_norms() -> None:
    module = for_cuda("sglang.srt.layers.layernorm")
    assert module._flashinfer_layernorm_available and module._flashinfer_rmsnorm_quant_available
    torch.manual_seed(0)
    x, residual = torch.randn(7, 256).bfloat16(), torch.randn(7, 256).bfloat16()
    layer = module.LayerNorm(256)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    wanted = torch.nn.functional.layer_norm(x.to(F64), (256,), layer.weight.to(F64), layer.bias.to(F64), 1e-6)
    torch.testing.assert_close(layer.forward_cuda(x).to(F64), wanted, rtol=2e-2, atol=2e-2)
    weight, scale = torch.randn(256).bfloat16(), torch.tensor([0.05])
    norm = SimpleNamespace(weight=torch.nn.Parameter(weight), variance_epsilon=1e-6)
    fused = module.RMSNorm.forward_with_per_tensor_quant_fusion

    def normed(y: torch.Tensor) -> torch.Tensor:
        y = y.to(F64)
        y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.to(F64) / 0.05
        return y.clamp(-448, 448)

    out, found_scale, dtype = fused(norm, x[:, None], scale)
    assert found_scale is scale and dtype == torch.bfloat16 and out.shape == (7, 1, 256)
    torch.testing.assert_close(out[:, 0].to(F64), normed(x), rtol=0.13, atol=0.01)
    (out, _, _), left = fused(norm, x, scale, residual.clone())
    total = x.to(F64) + residual.to(F64)
    torch.testing.assert_close(left.to(F64), total, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.to(F64), normed(total), rtol=0.14, atol=0.02)


@contextlib.contextmanager
def _experts_module() -> Iterator[Any]:
    backend_module("flashinfer_backend")
    module = importlib.import_module("sglang.srt.layers.moe.moe_runner.flashinfer_cutlass")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale  # SGLang's compiled kernel

    with _patched(
        module, is_flashinfer_available=lambda: True, scaled_fp8_quant=quantize, is_sm120=lambda: False,
        use_symmetric_memory=lambda *args, **kwargs: contextlib.nullcontext(), is_allocation_symmetric=lambda: False,
        get_parallel=lambda: SimpleNamespace(tp_group=None), _cutlass_moe_tune_max_num_tokens=lambda tokens: 64,
    ):  # fmt: skip
        yield module


def _dispatched(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))


def _runner_config(**more: Any) -> Any:
    values = {
        "apply_router_weight_on_input": False, "is_gated": True, "activation": "silu", "moe_ep_size": 1,
        "moe_ep_rank": 0, "moe_tp_size": 1, "moe_tp_rank": 0, "routed_scaling_factor": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | more))


def _weights(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(experts, 2 * inner, hidden) * hidden**-0.5, torch.randn(experts, hidden, inner) * inner**-0.5


@case("sglang", "experts, bf16 and fp8 per tensor: flashinfer_cutlass", "fused_moe.cutlass_fused_moe")
def sglang_experts() -> None:
    torch.manual_seed(0)
    tokens, experts, hidden, inner, e4m3 = 9, 4, 128, 128, torch.float8_e4m3fn
    x, (w1, w2) = torch.randn(tokens, hidden).bfloat16(), _weights(experts, hidden, inner)
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(2)
    with _experts_module() as module:
        plain = module.FlashInferCutlassMoeQuantInfo("bf16", w1.bfloat16(), w2.bfloat16())
        run = module.fused_experts_none_to_flashinfer_cutlass
        out = run(_dispatched(x, weights, ids), plain, _runner_config(routed_scaling_factor=2.5)).hidden_states
        wanted = 2.5 * mixture(x.to(F64), w1.bfloat16(), w2.bfloat16(), weights, ids)
        torch.testing.assert_close(out.to(F64), wanted, rtol=3e-2, atol=3e-2)
        s1, s2, a1, a2 = 0.01, 0.012, torch.tensor(0.02), torch.tensor(0.01)
        q1, q2 = (w1 / s1).to(e4m3), (w2 / s2).to(e4m3)
        ones = torch.ones(experts)
        scales = [ones * s1 * a1, 1 / a2, ones * s2 * a2, a1]
        quantized = module.FlashInferCutlassMoeQuantInfo("fp8", q1, q2, quant_scales=scales)
        out = run(_dispatched(x, weights, ids), quantized, _runner_config()).hidden_states
    rounded = (x.float() / a1).clamp(-448, 448).to(e4m3).to(F64) * a1

    def middle(y: torch.Tensor) -> torch.Tensor:
        return (y / a2).clamp(-448, 448).float().to(e4m3).to(F64) * a2

    wanted = mixture(rounded, q1.to(F64) * s1, q2.to(F64) * s2, weights, ids, middle=middle)
    torch.testing.assert_close(out.to(F64), wanted, rtol=5e-2, atol=5e-2)


@case(
    "sglang",
    "experts, MXFP4 for Hopper: 16-bit rows, e4m3 rows (Humming), its preparation",
    "fused_moe.cutlass_fused_moe, preprocess_moe_weights_for_sm90_mixed_gemm_humming",
)
def sglang_experts_mxfp4() -> None:
    torch.manual_seed(0)
    tokens, experts, hidden, inner = 9, 4, 256, 128
    x = torch.randn(tokens, hidden).bfloat16()
    (w1, s1), (w2, s2) = random_mxfp4(experts, 2 * inner, hidden), random_mxfp4(experts, hidden, inner)
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(2)
    wanted = mixture(x.to(F64), dequantize_mxfp4(w1, s1), dequantize_mxfp4(w2, s2), weights, ids, limit=7.0)
    with _experts_module() as module:
        from sglang.srt.layers.quantization import mxfp4_flashinfer_cutlass_moe as method

        for humming, tolerance in ((False, 0.02), (True, 0.08)):
            layer = torch.nn.Module()
            layer.w13_weight, layer.w2_weight = (
                torch.nn.Parameter(w.view(torch.int8), requires_grad=False) for w in (w1, w2)
            )
            for name, scale in (("w13_weight_scale_inv", s1), ("w2_weight_scale_inv", s2)):
                setattr(layer, name, torch.nn.Parameter(scale.view(torch.float8_e8m0fnu), requires_grad=False))
            prepare = object.__new__(method.Mxfp4FlashinferCutlassMoEMethod)
            prepare._fp8, prepare.prefix = SimpleNamespace(process_weights_after_loading=lambda layer: None), "layer"
            prepare._use_mxfp8_act_scaling, prepare._use_sm90_humming = False, humming
            prepare._mxfp4_weight_global_scale_tensor, prepare._use_swiglu_step = None, False
            prepare._swiglu_limit_tensor = torch.full((experts,), 7.0)
            with _patched(torch.cuda, empty_cache=lambda: None), _patched(method, log_info_on_rank0=lambda *args: None):
                prepare.process_weights_after_loading(layer)
            run = module.fused_experts_none_to_flashinfer_mxfp4
            prepare.runner = SimpleNamespace(run=functools.partial(run, runner_config=_runner_config()))
            out = prepare.apply(layer, _dispatched(x, weights, ids)).hidden_states
            error = (out.to(F64) - wanted).norm() / wanted.norm()
            assert error < tolerance, (humming, float(error))


@case("sglang", "routing of DeepSeek: fused_topk_deepseek", "fused_moe.fused_topk_deepseek")
def sglang_routing() -> None:
    module = for_cuda("sglang.srt.layers.moe.topk")
    torch.manual_seed(0)
    tokens, experts, groups, kept, top_k, factor = 6, 64, 8, 4, 8, 2.5
    logits, bias = torch.randn(tokens, experts), torch.randn(experts)
    weights, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int32)
    module.fused_topk_deepseek(logits, bias, groups, kept, top_k, factor, weights, ids, True)
    scores = logits.to(F64).sigmoid()
    biased = (scores + bias.to(F64)).view(tokens, groups, -1)
    chosen = biased.topk(2, dim=-1).values.sum(-1).topk(kept).indices
    open_ = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, chosen, True)
    masked = biased.masked_fill(~open_[..., None], -torch.inf).view(tokens, experts)
    wanted = masked.topk(top_k).indices
    assert torch.equal(ids.long().sort(-1).values, wanted.sort(-1).values)
    picked = scores.gather(1, ids.long())
    torch.testing.assert_close(weights.to(F64), factor * picked / picked.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


@case(
    "sglang",
    "top-k of sparse attention: unfused, by pages, ragged, of a vocabulary",
    "top_k, top_k_page_table_transform, top_k_ragged_transform",
)
def sglang_top_k() -> None:
    backend_module("flashinfer_backend")
    from sglang.srt.layers.attention.dsa import dsa_topk_backend as module
    from sglang.srt.models import dflash

    torch.manual_seed(0)
    backend, k = module.DSATopKBackend.FLASHINFER, 64
    lens = torch.tensor([300, 40, 64, 129], dtype=torch.int32)
    logits, table = torch.randn(4, 300), torch.randperm(4 * 300).view(4, 300).int()
    data = SimpleNamespace(
        page_table_1=table, token_to_batch_idx=None, cu_seqlens_k=torch.tensor([0, 300, 340, 404, 533]).int()
    )
    wanted = [set(logits[i, :n].topk(min(k, n)).indices.tolist()) for i, n in enumerate(lens.tolist())]

    def agree(found: torch.Tensor, place: Any) -> None:
        for i, row in enumerate(found):
            assert {x for x in row.tolist() if x >= 0} == {place(i, x) for x in wanted[i]}, i

    agree(backend.topk_func(logits, lens, k), lambda i, x: x)
    paged, ragged = module.TopkTransformMethod.PAGED, module.TopkTransformMethod.RAGGED
    agree(backend.topk_transform(logits, lens, k, paged, data), lambda i, x: int(table[i, x]))
    starts = torch.arange(5, dtype=torch.int32)
    found = backend.topk_transform(logits, lens, k, paged, data, cu_seqlens_q_topk=starts)
    agree(found, lambda i, x: int(table[i, x]))
    offsets = torch.tensor([0, 300, 340, 404], dtype=torch.int32)
    found = backend.topk_transform(logits, lens, k, ragged, data, topk_indices_offset=offsets)
    agree(found, lambda i, x: int(offsets[i]) + x)
    # Scores of a prefill: columns of all requests, rows that begin where their request does.
    wide = torch.full((4, 533), -torch.inf)
    for i, n in enumerate(lens.tolist()):
        wide[i, int(offsets[i]) : int(offsets[i]) + n] = logits[i, :n]
    found = backend.topk_transform(wide, lens, k, paged, data, cu_seqlens_q_topk=starts, row_starts=offsets)
    agree(found, lambda i, x: int(table[i, x]))
    found = backend.topk_transform(wide, lens, k, ragged, data, topk_indices_offset=offsets, row_starts=offsets)
    agree(found, lambda i, x: int(offsets[i]) + x)
    scores = torch.randn(3, 5000)
    values, indices = dflash._radix_topk(scores, 20)
    assert torch.equal(values, scores.topk(20).values) and torch.equal(indices.long(), scores.topk(20).indices)


@case("sglang", "hyper-connections, after a layer: deepseek_v4_mhc.post", "mhc.mhc_post")
def sglang_mhc_post() -> None:
    backend_module("flashinfer_backend")
    from sglang.srt.models import deepseek_v4_mhc as module

    torch.manual_seed(0)
    x, residual = torch.randn(5, 256).bfloat16(), torch.randn(5, 4, 256).bfloat16()
    after, mix = torch.randn(5, 4), torch.randn(5, 4, 4)
    config = SimpleNamespace(mult=4, hidden=256, pre_from_prev=False)
    hopper = SimpleNamespace(is_blackwell=False, is_sm90=True)
    with (
        module.envs.SGLANG_OPT_USE_FLASHINFER_MHC.override(True),
        _patched(module, get_platform=lambda: hopper),
    ):
        out = module.post(config, x, residual, after, mix)
    wanted = after.to(F64)[..., None] * x.to(F64)[:, None] + torch.einsum("tij,tih->tjh", mix.to(F64), residual.to(F64))
    torch.testing.assert_close(out.to(F64), wanted, rtol=2e-2, atol=2e-2)


@case("sglang", "linear layer, fp8 weights in blocks of 128, few rows: for Hopper", "gemm.fp8_blockscale_gemm_sm90")
def sglang_linear_fp8_blocks() -> None:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    backend_module("flashinfer_backend")
    module = importlib.import_module("sglang.srt.layers.quantization.fp8_utils")
    called = mock.Mock(side_effect=fp8_blockscale_gemm_sm90)

    def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return module.flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback(x, weight, [128, 128], scale)

    with mock.patch.object(module, "fp8_blockscale_gemm_sm90", called, create=True):  # it is imported on Hopper alone
        run_linear(linear, (1, 7, 31))
    assert called.call_count == 3


@case(
    "sglang",
    "Mamba-2 decode, and a verify pass that keeps all states: FlashInferSSUBackend",
    "mamba.selective_state_update",
)
def sglang_mamba() -> None:
    from .vllm_layers import _Mamba

    backend_module("flashinfer_backend")
    module = importlib.import_module("sglang.kernels.ops.mamba.triton_ops.ssu_dispatch")
    settings = {"mamba_backend": "flashinfer", "enable_mamba_cache_stochastic_rounding": False}
    module.initialize_mamba_selective_state_update_backend(SimpleNamespace(**settings, mamba_cache_philox_rounds=0))
    layer, slots = _Mamba(6), torch.tensor([4, -1, 2], dtype=torch.int32)
    before, parts = layer.pool.clone(), layer.tokens(3)
    x, dt, b, c = parts
    common = {"D": layer.d, "dt_bias": layer.wide_bias, "dt_softplus": True, "state_batch_indices": slots}
    out = torch.zeros_like(x)
    wide = dt[..., None].expand(*dt.shape, layer.DIM)
    module.selective_state_update(layer.pool, x, wide, layer.a, b, c, out=out, **common)
    for row, slot in ((0, 4), (2, 2)):
        after, y = layer.step(before[slot], parts, row)
        torch.testing.assert_close(out[row].to(F64), y, rtol=2e-2, atol=1e-1)
        torch.testing.assert_close(layer.pool[slot].to(F64), after, rtol=1e-3, atol=1e-3)
    before, drafts, parts = layer.pool.clone(), 4, layer.tokens(12)
    x, dt, b, c = (part.unflatten(0, (3, drafts)) for part in parts)
    out, steps = torch.zeros_like(x), torch.zeros(3, drafts, *layer.pool.shape[1:])
    wide = dt[..., None].expand(*dt.shape, layer.DIM)
    module.selective_state_update(
        layer.pool, x, wide, layer.a, b, c, out=out, disable_state_update=True, intermediate_states_buffer=steps,
        cache_steps=drafts, intermediate_state_indices=torch.tensor([2, 1, 0], dtype=torch.int32), **common,
    )  # fmt: skip
    assert torch.equal(layer.pool, before)
    for i, slot in ((0, 4), (2, 2)):
        state = before[slot]
        for t in range(drafts):
            state, y = layer.step(state, parts, i * drafts + t)
            torch.testing.assert_close(out[i, t].to(F64), y, rtol=2e-2, atol=1e-1)
            torch.testing.assert_close(steps[2 - i, t].to(F64), state, rtol=1e-3, atol=1e-3)
