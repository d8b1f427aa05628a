# SPDX-License-Identifier: Apache-2.0
"""One call of every API, as definitions.

    python tests/trace/example.py            rewrites the files of ``fi_trace_out`` beside this file
    python tests/trace/example.py FOLDER     writes every definition in full to a folder

No GPU is needed: a trace reads shapes and dtypes, so meta tensors do. The files are committed, and a test compares
them with what this program makes; run it again after changing a template or a reference. It writes the definition of
one call of each family, and a hash of every definition:

    append_paged_kv_cache_kv8_d128_ps16.json
    concat_mla_k_h128_nope128_rope64_d192.json
    cutlass_fused_moe_topk8_e32_h1024_i512.json
    fp8_paged_mqa_logits_nn1_H64_D128_bs64.json
    hashes.json
    merge_state_h32_d128.json
    mhc_post_h7168.json
    mm_bf16_n256_k7168.json
    mxfp8_quantize_k4096.json
    rmsnorm_h4096.json
    rope_h32_kv8_d128.json
    selective_state_update_h32_d64_g2_n128.json
    silu_and_mul_h28672.json
    single_decode_h32_kv8_d128.json
    top_k_top_p_sampling_v128256.json
    top_k_v128256_k50.json
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

import flashinfer
import flashinfer.comm
import flashinfer.fused_moe
import flashinfer.gemm  # the package imports it on first use
import flashinfer.indexer
import flashinfer.mamba
import flashinfer.mhc
import flashinfer.recurrent

OUT = Path(__file__).parent / "fi_trace_out"
HASHES = "hashes.json"
#: Definitions that are committed in full: those that the docstring lists.
FULL = tuple(line.strip() for line in (__doc__ or "").splitlines() if line.endswith(".json") and HASHES not in line)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def fp32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return API and arguments, at sizes of published models."""
    norm = flashinfer.norm
    x, w = bf16(16, 4096), bf16(4096)
    yield norm.rmsnorm, {"input": x, "weight": w}
    yield norm.rmsnorm, {"input": bf16(16, 32, 128), "weight": bf16(128)}
    yield norm.fused_add_rmsnorm, {"input": x, "residual": x, "weight": w}
    yield norm.rmsnorm_quant, {"out": fp8(16, 4096), "input": x, "weight": w, "scale": fp32(1)}
    yield (
        norm.fused_add_rmsnorm_quant,
        {
            "out": fp8(16, 4096, dtype=torch.float8_e5m2),
            "input": x,
            "residual": x,
            "weight": w,
            "scale": fp32(),
        },
    )
    x, w = bf16(16, 2304), bf16(2304)
    yield norm.gemma_rmsnorm, {"input": x, "weight": w}
    yield norm.gemma_fused_add_rmsnorm, {"input": x, "residual": x, "weight": w}
    x, w = bf16(64, 1280), fp32(1280)
    yield norm.layernorm, {"input": x, "gemma": w, "beta": w}
    yield norm.layernorm_quant, {"out": fp8(64, 1280), "input": x, "gemma": w, "beta": w, "scale": fp32(1)}
    yield norm.fused_rmsnorm_silu, {"input": bf16(64, 5120), "weight": bf16(5120)}
    rows = {"input": bf16(62, 4096), "residual": bf16(62, 4096), "weight": bf16(4096)}
    buffers = {"out": fp8(62, 4096), "block_scale": fp32(32, 64), "normed_out": bf16(62, 4096)}
    yield norm.fused_add_rmsnorm_fp8_block_quant, {**buffers, **rows}
    rows = {"branch": bf16(64, 8192), "residual": fp32(64, 8192), "alpha": fp32(8192), "beta": fp32(8192)}
    yield norm.gated_residual_rmsnorm, {**rows, "weight": bf16(8192)}
    yield norm.gated_residual_next_rmsnorm, {**rows, "next_weight": bf16(8192)}
    yield norm.rmsnorm_sigmoid_gate, {"input": bf16(64, 16, 64), "gate": bf16(64, 16, 64)}
    yield from dit_calls()
    yield from rope_calls()
    yield from position_calls()
    yield from page_calls()
    yield flashinfer.scale, {"input": bf16(128, 1024), "factor": 3.14}
    yield from activation_calls()
    yield from quantization_calls()
    yield from cascade_calls()
    yield from attention_calls()
    yield from sampling_calls()
    yield from topk_calls()
    yield from gemm_calls()
    yield from expert_layer_calls()
    yield from moe_calls()
    yield from recurrent_calls()
    yield from mhc_calls()
    yield from delta_calls()
    yield from comm_calls()
    yield from indexer_calls()
    yield from sparse_mla_calls()
    yield from mamba_calls()
    yield from ssd_calls()
    yield flashinfer.concat_mla_k, {"k": bf16(16, 128, 192), "k_nope": bf16(16, 128, 128), "k_rope": bf16(16, 1, 64)}
    yield flashinfer.concat_ops.concat_mla_kv_quant_fp8, {"kv_nope": bf16(16, 128, 256), "k_pe": bf16(16, 64)}
    yield flashinfer.quantization.per_token_group_quant_8bit, {"x": bf16(16, 7168), "group_size": 128}


def gemm_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    gemm = flashinfer.gemm
    yield gemm.mm_bf16, {"a": bf16(16, 7168), "b": bf16(256, 7168).T}
    halves, scales = torch.empty(256, 3584, dtype=torch.uint8, device="meta"), torch.empty(57344, device="meta").byte()
    blocks = {"a_descale": scales, "b_descale": scales}
    yield gemm.mm_fp4, {"a": halves[:16], "b": halves.T, "alpha": fp32(), **blocks}
    yield gemm.mm_mxfp8, {"a": fp8(16, 7168), "b": fp8(256, 7168).T, **blocks}
    yield gemm.bmm_bf16, {"A": bf16(16, 4, 128), "B": bf16(16, 512, 128).mT}
    fp8_operands = {"A": fp8(1, 16, 2048), "B": fp8(1, 512, 2048).mT}
    yield gemm.bmm_fp8, {**fp8_operands, "A_scale": fp32(), "B_scale": fp32(), "dtype": torch.bfloat16}
    weight = {"weight": fp8(576, 7168), "weight_scale": fp32(5, 56)}
    yield gemm.fp8_blockscale_gemm_sm90, {"input": bf16(16, 7168), **weight}
    router = {"input": bf16(8, 2880), "weight": bf16(128, 2880), "bias": bf16(128), "out": bf16(8, 128)}
    yield gemm.tinygemm_bf16, router
    for name in sorted(name for name in dir(gemm) if name.startswith("mm_M1_16_")):
        hidden, experts = (int(part[1:]) for part in name.split("_")[3:5])
        is_bf16 = name in ("mm_M1_16_K7168_N128",) or name.endswith("_bf16")
        out = bf16(4, experts) if is_bf16 else fp32(4, experts)
        yield getattr(gemm, name), {"mat_a": bf16(4, hidden), "mat_b": bf16(experts, hidden).T, "out": out}
    yield from block_scaled_calls()


def block_scaled_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls at sizes of Qwen3-Next: one layer, then eight experts."""
    gemm = flashinfer.gemm
    dense = {"a": fp8(64, 2048), "b": fp8(512, 2048)}
    k_major = {"a_scale": fp32(64, 16), "b_scale": fp32(4, 16), "scale_major_mode": "K"}
    mn_major = {"a_scale": fp32(16, 64), "b_scale": fp32(16, 4), "scale_major_mode": "MN"}
    yield gemm.gemm_fp8_nt_groupwise, dense | k_major
    yield gemm.gemm_fp8_nt_groupwise, dense | mn_major
    trtllm = {"a_scale": fp32(64, 16), "b_scale": fp32(16, 4), "backend": "trtllm"}
    yield gemm.gemm_fp8_nt_groupwise, dense | trtllm
    blocks = {"a": fp8(256, 2048), "b": fp8(512, 2048)}
    yield gemm.gemm_fp8_nt_blockscaled, {**blocks, "a_scale": fp32(16, 2), "b_scale": fp32(16, 4)}
    k_blocks = {"a_scale": fp32(2, 16), "b_scale": fp32(4, 16), "scale_major_mode": "K"}
    yield gemm.gemm_fp8_nt_blockscaled, blocks | k_blocks
    experts = {"a": fp8(1024, 2048), "b": fp8(8, 512, 2048)}
    groups = {**experts, "m_indptr": int32(9)}
    yield gemm.group_gemm_fp8_nt_groupwise, {**groups, "a_scale": fp32(16, 1024), "b_scale": fp32(8, 16, 4)}
    k_groups = {"a_scale": fp32(1024, 16), "b_scale": fp32(8, 4, 16)}
    yield gemm.group_gemm_fp8_nt_groupwise, {**groups, **k_groups, "scale_major_mode": "K"}
    yield gemm.group_deepgemm_fp8_nt_groupwise, {**experts, **k_groups, "m_indices": int32(1024)}
    masked = {"a": fp8(8, 128, 2048), "b": fp8(8, 512, 2048), "a_scale": fp32(8, 128, 16), "b_scale": fp32(8, 4, 16)}
    yield gemm.batch_deepgemm_fp8_nt_groupwise, {**masked, "masked_m": int32(8), "expected_m": 32}


def expert_layer_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls for Granite 3.0 1B, whose layers are small enough for a test on the CPU."""

    experts, top_k, hidden, inner = 32, 8, 1024, 512

    def layer(make: Callable[..., Any]) -> dict[str, Any]:
        routing = {"token_selected_experts": int32(16, top_k), "token_final_scales": fp32(16, top_k)}
        weights = {
            "fc1_expert_weights": make(experts, 2 * inner, hidden),
            "fc2_expert_weights": make(experts, hidden, inner),
        }
        return {"input": bf16(16, hidden), **routing, **weights, "output_dtype": torch.bfloat16, "quant_scales": []}

    moe = flashinfer.fused_moe.cutlass_fused_moe
    yield moe, layer(bf16)
    scales = [fp32(experts), fp32(), fp32(experts), fp32()]
    yield moe, {**layer(fp8), "input": fp8(16, hidden), "quant_scales": scales}
    scales = [fp32(experts), fp32(experts), fp32(experts), fp32()]
    yield moe, {**layer(fp8), "input": fp8(16, hidden), "quant_scales": scales}
    blocks = {"quant_scales": [fp32(experts, 8, 8), fp32(experts, 8, 4)], "use_deepseek_fp8_block_scale": True}
    yield moe, {**layer(fp8), **blocks}
    yield from four_bit_calls(layer(bf16), experts, hidden, inner)


def four_bit_calls(
    layer: dict[str, Any], experts: int, hidden: int, inner: int
) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the same layer with four-bit weights, which have biases and constants in GPT-OSS."""
    moe = flashinfer.fused_moe.cutlass_fused_moe
    layer |= {"fc1_expert_weights": uint8(experts, 2 * inner, hidden // 2), "use_w4_group_scaling": True}
    layer |= {"fc2_expert_weights": uint8(experts, hidden, inner // 2)}
    blocks = [(experts, 2 * inner // 64, hidden // 128), (experts, hidden // 64, inner // 128)]
    constants = {name: fp32(experts) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")}
    biased = {"fc1_expert_biases": bf16(experts, 2 * inner), "fc2_expert_biases": bf16(experts, hidden), **constants}
    yield moe, {**layer, **biased, "quant_scales": [uint8(*shape, 16, 16) for shape in blocks]}
    scales, acts, alphas = [bf16(*shape, 8, 8) for shape in blocks], [bf16(hidden), bf16(inner)], [fp32(experts)] * 2
    packed = {"quant_scales": [*scales, *acts, bf16(0), bf16(0), *alphas], "use_packed_weights": True}
    yield moe, {**layer, **packed}
    offsets = [int32(*shape, 16, 4) for shape in blocks]
    scales = [offsets[0], fp32(experts), fp32(), offsets[1], fp32(experts)]
    yield moe, {**layer, **biased, "quant_scales": scales, "use_wfp4afp8_humming": True}


def moe_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls at sizes of Qwen3-30B-A3B, and of DeepSeek V3 for what it brought."""
    moe, hidden, tiles = flashinfer.fused_moe, 2048, 140
    ids = {"token_selected_experts": int32(256, 8), "token_final_scales": fp32(256, 8)}
    yield moe.route_tokens, {"logits": fp32(256, 128), "top_k": 8}
    chosen = {"topk_values": fp32(256, 8), "topk_indices": int32(256, 8)}
    groups = {"n_group": 8, "topk_group": 4, "topk": 8, "routed_scaling_factor": 2.5}
    yield moe.fused_topk_deepseek, {"scores": fp32(256, 256), "bias": fp32(256), **groups, **chosen}
    table = {"input_ids": int32(256).long(), "tid2eid": int32(129280, 6)}
    yield moe.hash_topk, {"router_logits": fp32(256, 256), **table}
    yield moe.moe_sort, {**ids, "num_experts": 128, "top_k": 8}
    order = {"tile_idx_to_mn_limit": int32(tiles), "permuted_idx_to_expanded_idx": int32(tiles * 128)}
    order |= {"num_non_exiting_tiles": int32(1), "max_num_permuted_tokens": tiles * 128, "top_k": 8, "tile_size": 128}
    yield moe.moe_permute, {"input": bf16(256, hidden), "permuted_output": bf16(tiles * 128, hidden), **order}
    sums = {"output": bf16(256, hidden), "topk_scales": fp32(256, 8), "num_tokens": 256, "top_k": 8}
    rows = {"permuted_input": bf16(tiles * 128, hidden), "expanded_idx_to_permuted_idx": int32(256, 8)}
    yield moe.moe_unpermute, rows | sums
    yield from lora_calls()
    blocks = {"expert_scales_up": fp32(16, 2, 2), "expert_scales_down": fp32(16, 2, 1)}  # small: a test runs it
    mono = {"expert_weights_up": fp8(16, 256, 256), "expert_weights_down": fp8(16, 256, 128), **blocks}
    mono |= {"activations_in": bf16(8, 256), "router_logits": bf16(8, 16), "top_k": 8}
    yield moe.mono_moe, mono
    yield moe.mono_moe, {**mono, "scoring_func": "sigmoid"}


def recurrent_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls with the heads of Qwen3-Next."""
    rows = {"q": bf16(64, 16, 128), "k": bf16(64, 16, 128), "v": bf16(64, 32, 128)}
    prefill = {**rows, "g": fp32(64, 32), "beta": fp32(64, 32), "cu_seqlens": int32(3)}
    yield flashinfer.chunk_gated_delta_rule, prefill
    states = {"initial_state": fp32(2, 32, 128, 128), "output_final_state": True}
    yield flashinfer.chunk_gated_delta_rule, {**prefill, **states}


def comm_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the call of one rank for the end of a layer of Llama 3."""
    rows = {"input": bf16(16, 4096), "residual_in": bf16(16, 4096), "rms_gamma": bf16(4096)}
    yield flashinfer.comm.allreduce_fusion, {**rows, "workspace": None, "pattern": 1}
    table = {
        "workspace": None,
        "metainfo": None,
        "runtime_max_tokens_per_rank": 32,
        "ep_rank": 0,
        "ep_size": 8,
        "top_k": 8,
    }
    sent = {"token_selected_experts": int32(16, 8), "input_payloads": (bf16(16, 7168),), "num_experts": 256}
    yield flashinfer.comm.moe_a2a_dispatch, {**table, **sent}
    results = {"payload": bf16(8, 32, 7168), "local_num_tokens": 16, "combine_payload_offset": 0}
    yield flashinfer.comm.moe_a2a_combine, {**table, **results}
    parts = {"partial_o": bf16(16, 8, 4, 512), "workspace": None, "cp_rank": 0, "cp_size": 4}
    yield flashinfer.comm.decode_cp_a2a_alltoall, {**parts, "softmax_stats": fp32(16, 8, 4, 2)}
    yield flashinfer.comm.decode_cp_a2a_lse_reduce, {**parts, "partial_lse": fp32(16, 8, 4)}
    registered = {"fa": 1, "reg_buffer": 0, "reg_buffer_sz_bytes": 0, "num_ctas": 36, "out": bf16(16 * 4096)}
    yield flashinfer.comm.vllm_all_reduce, {**registered, "inp": bf16(16 * 4096)}


def mhc_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls at the width of DeepSeek V4."""
    mhc, hidden = flashinfer.mhc, 7168
    weights = {"post_layer_mix": fp32(16, 4), "comb_res_mix": fp32(16, 4, 4)}
    yield mhc.mhc_post, {"x": bf16(16, hidden), "residual": bf16(16, 4, hidden), **weights}
    streams = {"residual": bf16(16, 4, hidden), "mhc_scale": fp32(3), "mhc_base": fp32(24)}
    yield mhc.mhc_pre_big_fuse, {"dot_mix": fp32(16, 24), "sqrsum": fp32(16), **streams, "k": 4 * hidden}
    yield mhc.mhc_pre_big_fuse_with_prenorm, {"dot_mix": fp32(16, 24), **streams}


def delta_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls at the heads of Qwen3-Next on two GPUs, and of a Kimi model on eight."""
    recurrent, heads, value_heads, dim = flashinfer.recurrent, 8, 16, 128
    gates = {"A_log": fp32(value_heads), "dt_bias": fp32(value_heads)}

    def tokens(count: int) -> dict[str, torch.Tensor]:
        keys = {"q": bf16(16, count, heads, dim), "k": bf16(16, count, heads, dim)}
        projections = {"a": bf16(16, count, value_heads), "b": bf16(16, count, value_heads)}
        return {**keys, "v": bf16(16, count, value_heads, dim), **projections, **gates}

    state, pool = fp32(16, value_heads, dim, dim), fp32(64, value_heads, dim, dim)
    yield recurrent.gated_delta_rule_decode_pretranspose, {**tokens(1), "state": state}
    yield recurrent.gated_delta_rule_decode, {**tokens(1), "state": state}
    yield recurrent.gated_delta_rule_mtp, {**tokens(4), "initial_state": pool, "initial_state_indices": int32(16)}
    windows = {"rawv_cache": bf16(2, 64, value_heads, 4, dim), "rawk_cache": bf16(2, 64, heads, 4, dim)}
    windows |= {"g_cache": fp32(2, 64, value_heads, 4), "beta_cache": fp32(2, 64, value_heads, 4)}
    accepted = {"state_indices": int32(16), "accept_lens": int32(16)}
    layers = {"checkpoint_state": fp32(2, 64, value_heads, dim, dim)}
    yield recurrent.gated_delta_rule_replayssm_commit, {**layers, **windows, **accepted}

    heads, width = 12, 12 * dim
    q = bf16(16, 1, heads, dim)
    parameters = {"A_log": fp32(heads), "dt_bias": fp32(width)}
    kda = {"q": q, "k": q, "v": q, "g": q, "beta": bf16(16, 1, heads), **parameters}
    pool = {"initial_state": bf16(64, heads, dim, dim), "ssm_state_indices": int32(16)}
    yield recurrent.recurrent_kda, {**kda, **pool, "use_gate_in_kernel": True, "lower_bound": -5.0}
    raw = {"raw_gate": bf16(16, width), "raw_beta": bf16(16, heads), **parameters}
    step = {"state": bf16(64, heads, dim, dim), "state_indices": int32(16)}
    yield recurrent.packed_kda_decode, {"mixed_qkv": bf16(16, 3 * width), **raw, **step}
    layer = {"x": bf16(16, 3 * width), "weight": fp32(3, 4, width), "conv_state": bf16(64, 3 * width, 3), **raw, **step}
    layer |= {"output_gate": bf16(16, width), "norm_weight": bf16(dim)}
    yield recurrent.fused_kda_decode, layer
    packed = {"query_start_loc": int32(17), "num_accepted_tokens": int32(16), "state_indices": int32(16, 1)}
    yield recurrent.packed_fused_kda_decode, {**layer, **packed}


def mamba_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls at a quarter of the heads of Nemotron-H: one token of each sequence, then four."""
    heads, dim, groups, dstate = 32, 64, 2, 128
    weights = {"A": fp32(heads, dim, dstate), "D": bf16(heads, dim), "dt_bias": bf16(heads, dim), "dt_softplus": True}
    for steps in (0, 4):
        lead = (16, steps) if steps else (16,)
        tokens = {"x": bf16(*lead, heads, dim), "dt": bf16(*lead, heads, dim), "cache_steps": steps}
        tokens |= {"B": bf16(*lead, groups, dstate), "C": bf16(*lead, groups, dstate)}
        yield flashinfer.mamba.selective_state_update, {"state": bf16(16, heads, dim, dstate), **tokens, **weights}
    rings = {
        "x_cache": bf16(16, heads, 20, dim),
        "B_cache": bf16(16, groups, 20, dstate),
        "dt_cache": fp32(16, heads, 20),
    }
    rings |= {"ring_start": int32(16), "prev_num_accepted_tokens": int32(16), "out": bf16(16, 4, heads, dim)}
    del tokens["cache_steps"]
    yield flashinfer.mamba.checkpointing_ssu, {"state": bf16(16, heads, dim, dstate), **rings, **tokens, **weights}


def ssd_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return a call at an eighth of the heads of Nemotron-H."""
    heads, dim, groups, dstate = 16, 64, 1, 128
    tokens = {"x": bf16(2, 256, heads, dim), "dt": bf16(2, 256, heads), "A": fp32(heads)}
    tokens |= {"B": bf16(2, 256, groups, dstate), "C": bf16(2, 256, groups, dstate)}
    yield flashinfer.mamba.ssd_combined_fwd, {**tokens, "D": bf16(heads), "dt_bias": bf16(heads), "dt_softplus": True}


def indexer_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls at sizes of DeepSeek-V3.2, without draft tokens."""
    tables = {"block_tables": int32(16, 128), "seq_lens": int32(16), "max_seq_len": 8192}
    pages = {"q": fp8(16, 1, 64, 128), "kv_fused": uint8(2048, 64, 1, 132), "weights": fp32(16, 64)}
    yield flashinfer.indexer.fp8_paged_mqa_logits, {**pages, **tables}
    yield flashinfer.indexer.compute_paged_mqa_logits_schedule, {"seq_lens": int32(16)}
    keys = {"k": fp8(8192, 128), "k_scales": fp32(8192), "k_starts": int32(2048), "k_ends": int32(2048)}
    yield flashinfer.indexer.fp8_ragged_mqa_logits, {"q": fp8(2048, 64, 128), "weights": fp32(2048, 64), **keys}


def sparse_mla_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return a call with a bfloat16 cache and one with rows of 656 bytes, which name the same definition."""
    lists = {"q": bf16(16, 128, 576), "indices": int32(16, 2048), "sm_scale": 192**-0.5}
    yield flashinfer.mla.sparse_mla, {**lists, "kv_cache": bf16(2048, 64, 576)}
    yield flashinfer.mla.sparse_mla, {**lists, "kv_cache": uint8(2048, 64, 656), "q": bf16(16, 16, 576)}


def lora_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls with adapters of rank 16 on the experts of Qwen3-30B-A3B."""
    moe, hidden, inner, experts, rank, pairs = flashinfer.fused_moe, 2048, 768, 128, 16, 2048
    by = {"sorted_token_ids": int32(pairs).long(), "expert_ids": int32(pairs).long()}
    weights, loras, table = {"topk_weights": fp32(pairs)}, {"lora_indices": int32(256).long()}, int32(2, experts).long()
    low, stride = {"lora_stride": experts * rank * hidden}, {"lora_stride_a": 1 << 22, "lora_stride_b": 1 << 22}
    yield moe.bgmv_moe_shrink, {"y": fp32(2, pairs, rank), "x": bf16(256, hidden), "w_ptr": table, **by, **loras, **low}
    slices = {"slice_start_loc": int32(2).long(), "output_slices": [inner, inner]}
    up = {"y": fp32(256, 2 * inner), "x": bf16(2, pairs, rank), "w_ptr": table, **by, **weights, **loras, **slices}
    yield moe.bgmv_moe_expand, {**up, **low}
    banks = {"lora_a_weights": [bf16(4, experts, rank, hidden)], "lora_b_weights": [bf16(4, experts, inner, rank)]}
    yield moe.bgmv_moe, {"x": bf16(256, hidden), **banks, **by, **loras, **weights, "num_experts": experts}
    slots = {"w_ptr_a": table, "w_ptr_b": table, **stride, "topk_ids": int32(256, 8), "lora_ids": int32(256)}
    sizes = {"rank": rank, "intermediate_size": inner}
    yield moe.bgmv_moe_gemm1_lora_delta, {"hidden_states": bf16(256, hidden), **slots, **sizes}
    slots |= {"w_ptr_a": table[:1], "w_ptr_b": table[:1], "topk_weights": fp32(256, 8)}
    rows = {"gemm1_activation_output": bf16(pairs, inner), "expanded_idx_to_permuted_idx": int32(pairs)}
    yield moe.bgmv_moe_gemm2_lora_delta, {**rows, **slots, "rank": rank, "hidden_size": hidden}


def activation_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    yield flashinfer.silu_and_mul, {"input": bf16(16, 2 * 14336)}
    yield flashinfer.silu_and_mul, {"input": bf16(4, 16, 2 * 14336)}
    yield flashinfer.gelu_and_mul, {"input": bf16(16, 2 * 4096)}
    yield flashinfer.gelu_tanh_and_mul, {"input": bf16(16, 2 * 9216)}
    yield flashinfer.swiglu, {"x": bf16(16, 14336), "gate": bf16(16, 14336)}


def cascade_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    v, s = bf16(16, 32, 128), fp32(16, 32)
    yield flashinfer.merge_state, {"v_a": v, "s_a": s, "v_b": v, "s_b": s}
    yield flashinfer.merge_state_in_place, {"v": v, "s": s, "v_other": v, "s_other": s}
    yield flashinfer.merge_states, {"v": bf16(16, 8, 32, 128), "s": fp32(16, 8, 32)}
    segments = {"v": bf16(99, 32, 128), "s": fp32(99, 32), "indptr": int32(17)}
    yield flashinfer.variable_length_merge_states, segments


def topk_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls for a vocabulary and for the indexer of sparse attention."""
    yield flashinfer.top_k, {"input": fp32(64, 128256), "k": 50}
    scores, rows, table = fp32(64, 131072), int32(64), int32(64, 131072)
    windows = {"input": scores, "lengths": rows, "k": 2048}
    yield flashinfer.top_k_page_table_transform, {**windows, "src_page_table": table}
    yield flashinfer.top_k_ragged_transform, {**windows, "offsets": rows}
    yield flashinfer.top_k_varlen, {"logits": scores, "seq_lens": rows, "top_k": 2048}


def attention_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls for one request with Llama 3's heads."""
    kv = {name: bf16(4096, 8, 128) for name in ("k", "v")}
    heads_first = {name: bf16(8, 4096, 128) for name in ("k", "v")} | {"kv_layout": "HND"}
    yield flashinfer.single_decode_with_kv_cache, {"q": bf16(32, 128), **kv}
    yield flashinfer.single_decode_with_kv_cache, {"q": bf16(32, 128), **heads_first, "return_lse": True}
    yield flashinfer.single_prefill_with_kv_cache, {"q": bf16(512, 32, 128), **kv}
    yield flashinfer.single_prefill_with_kv_cache, {"q": bf16(512, 32, 128), **heads_first, "return_lse": True}


def uint8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def sampling_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls for Llama 3's vocabulary."""
    s, x = flashinfer.sampling, fp32(64, 128256)
    yield s.sampling_from_probs, {"probs": x}
    yield s.sampling_from_logits, {"logits": x}
    yield s.top_p_sampling_from_probs, {"probs": x, "top_p": 0.9}
    yield s.top_k_sampling_from_probs, {"probs": x, "top_k": 50}
    yield s.min_p_sampling_from_probs, {"probs": x, "min_p": 0.1}
    yield s.top_k_top_p_sampling_from_probs, {"probs": x, "top_k": 50, "top_p": 0.9}
    yield s.top_k_top_p_sampling_from_logits, {"logits": x, "top_k": 50, "top_p": 0.9}
    yield s.softmax, {"logits": x}
    yield s.top_p_renorm_probs, {"probs": x, "top_p": 0.9}
    yield s.top_k_renorm_probs, {"probs": x, "top_k": 50}
    yield s.top_k_mask_logits, {"logits": x, "top_k": 50}
    drafts = {"draft_probs": fp32(64, 4, 128256), "target_probs": fp32(64, 5, 128256)}
    yield s.chain_speculative_sampling, {**drafts, "draft_token_ids": int32(64, 4)}


def quantization_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    q = flashinfer.quantization
    mask = torch.empty(1024 * 1024, dtype=torch.bool, device="meta")
    yield q.packbits, {"x": mask}
    yield q.segment_packbits, {"x": mask, "indptr": torch.empty(9, dtype=torch.int32, device="meta")}
    yield q.mxfp8_quantize, {"input": bf16(256, 4096)}
    yield q.mxfp8_dequantize_host, {"input": uint8(256, 4096), "scale_tensor": uint8(256 * 128)}
    yield q.e2m1_and_ufp8sf_scale_to_float, {"e2m1_tensor": uint8(256, 2048), "ufp8_scale_tensor": uint8(256 * 256)}
    yield q.mxfp4_dequantize, {"a_fp4": uint8(256, 2048), "a_sf": uint8(256 * 128)}
    yield q.mxfp4_dequantize_host, {"weight": uint8(256, 2048), "scale": uint8(256, 128)}
    yield q.block_scale_interleave, {"unswizzled_sf": uint8(4096, 256)}
    yield q.shuffle_matrix_a, {"input_tensor": uint8(4096, 2048), "epilogue_tile_m": 128}
    yield q.shuffle_matrix_sf_a, {"input_tensor": uint8(4096, 256), "epilogue_tile_m": 128}
    yield q.nvfp4_kv_dequantize, {"fp4_data": uint8(4096, 64), "block_scales": fp8(4096, 8), "global_scale": fp32(1)}
    pages, requests = (512, 2, 16, 8), {"seq_lens": torch.empty(4, dtype=torch.int32, device="meta")}
    requests["block_tables"] = torch.empty((4, 128), dtype=torch.int32, device="meta")
    scales = {"k_scale": fp32(1), "v_scale": fp32(1)}
    outputs = {name: bf16(4, 2048, 8, 128) for name in ("output_k", "output_v")}
    caches = {"paged_kv_cache": uint8(*pages, 64), "kv_cache_sf": fp8(*pages, 8)}
    yield q.nvfp4_kv_dequantize_paged, {**caches, **requests, **scales, **outputs}


def dit_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    norm = flashinfer.norm
    x, rows, w = bf16(2, 256, 3072), bf16(2, 256, 6, 3072)[:, :, 0], fp32(3072)
    yield (
        norm.fused_dit_gate_residual_layernorm_gamma_beta,
        {"input": x, "residual": x, "gate": rows, "gamma": w, "beta": w},
    )
    gated = {"input": x, "residual": x, "gate": rows, "scale": rows, "shift": rows}
    yield norm.fused_dit_gate_residual_layernorm_scale_shift, gated
    flat = {name: bf16(512, 6, 3072)[:, 0] for name in ("gate", "scale", "shift")}
    yield norm.fused_dit_gate_residual_layernorm_scale_shift, gated | flat
    yield norm.fused_dit_residual_layernorm_scale_shift, {"input": x, "scale": rows, "shift": rows, "residual": x}


def rope_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    patches = {"ppf": 3, "pph": 30, "ppw": 52}
    channels = {"num_frame_channels": 44, "num_height_channels": 42, "num_width_channels": 42}
    heads = {"num_heads_q": 24, "num_heads_k": 24, "num_heads_v": 24, "head_dim": 128}
    call = {"qkv": bf16(1, 4680, 9216), "q_weight": bf16(3072), "k_weight": bf16(3072), **patches, **channels, **heads}
    yield flashinfer.norm.fused_qk_rmsnorm_rope, call
    yield flashinfer.norm.fused_qk_rmsnorm_rope, call | {"output_fp8": True}
    channels = {"num_frame_channels": 16, "num_height_channels": 24, "num_width_channels": 24}
    heads = {"num_heads_q": 4, "num_heads_k": 2, "num_heads_v": 2, "head_dim": 64}
    flat = {"qkv": bf16(9360, 512), "q_weight": bf16(256), "k_weight": bf16(128)}
    yield flashinfer.norm.fused_qk_rmsnorm_rope, {**flat, **patches, **channels, **heads}


def int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def position_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls for Llama 3's heads, then DeepSeek's."""
    rope = flashinfer.rope
    heads = {"q": bf16(99, 32, 128), "k": bf16(99, 8, 128)}
    ragged = {"indptr": int32(8), "offsets": int32(7)}
    for place, where in (("", ragged), ("_pos_ids", {"pos_ids": int32(99)})):
        for model in ("rope", "llama31_rope"):
            yield getattr(rope, f"apply_{model}{place}"), heads | where
            yield getattr(rope, f"apply_{model}{place}_inplace"), heads | where
    flat = {"query": bf16(99, 4096), "key": bf16(99, 1024), "head_size": 128, "cos_sin_cache": fp32(8192, 64)}
    flat |= {"positions": int32(99)}
    yield rope.apply_rope_with_cos_sin_cache, flat
    yield rope.apply_rope_with_cos_sin_cache_inplace, flat
    yield rope.apply_rope_with_cos_sin_cache, flat | {"query": heads["q"], "key": heads["k"]}

    table = {"cos_sin_cache": fp32(8192, 64), "pos_ids": int32(99)}
    mla = {"q_rope": bf16(99, 128, 64), "k_rope": bf16(99, 64), "q_nope": bf16(99, 128, 512), "k_nope": bf16(99, 512)}
    gqa = {f"q_{part}": bf16(99, 32, 64) for part in ("rope", "nope")}
    gqa |= {f"k_{part}": bf16(99, 8, 64) for part in ("rope", "nope")}
    yield rope.rope_quantize_fp8, mla | table
    yield rope.rope_quantize_fp8, gqa | table
    yield rope.mla_rope_quantize_fp8, mla | table
    pages = {"kv_indices": int32(40), "kv_indptr": int32(8), "batch_indices": int32(99), "positions": int32(99)}
    append, values = rope.rope_quantize_fp8_append_paged_kv_cache, {"v": bf16(99, 8, 128)}
    yield append, {**mla, "v": None, **table, **pages, "paged_kv_cache": (fp8(50, 16, 512), fp8(50, 16, 64))}
    for layout, shape in (("NHD", (50, 16, 8, 128)), ("HND", (50, 8, 16, 128))):
        caches = {"paged_kv_cache": (fp8(*shape), fp8(*shape)), "kv_layout": layout}
        yield append, {**gqa, **values, **table, **pages, **caches}


def page_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls for seven requests that append 99 tokens: Llama 3's heads, then DeepSeek's."""
    page = flashinfer.page
    rows = {"append_key": bf16(99, 8, 128), "append_value": bf16(99, 8, 128)}
    where = {"batch_indices": int32(99), "positions": int32(99)}
    table = {"kv_indices": int32(40), "kv_indptr": int32(8), "kv_last_page_len": int32(7)}
    yield page.append_paged_kv_cache, {**rows, **where, "paged_kv_cache": bf16(50, 2, 16, 8, 128), **table}
    for layout, half in (("NHD", bf16(50, 16, 8, 128)), ("HND", bf16(50, 8, 16, 128))):
        yield (
            page.append_paged_kv_cache,
            {**rows, **where, "paged_kv_cache": (half, half), **table, "kv_layout": layout},
        )
    mla = {"append_ckv": bf16(99, 512), "append_kpe": bf16(99, 64)}
    caches = {"ckv_cache": bf16(50, 64, 512), "kpe_cache": bf16(50, 64, 64)}
    yield page.append_paged_mla_kv_cache, {**mla, **where, **caches, **table}
    codes = torch.empty(50, 64, 256, dtype=torch.uint8, device="meta")
    caches = {"ckv_cache": codes, "ckv_sf_cache": fp8(50, 64, 32), "kpe_cache": fp8(50, 64, 64)}
    scales = {"ckv_scale": 0.5, "kpe_scale": 0.5}
    yield page.nvfp4_quantize_append_paged_mla_kv_cache, {**mla, **where, **caches, **table, **scales}
    codes = torch.empty(50, 2, 16, 8, 64, dtype=torch.uint8, device="meta")
    quantised = {"paged_kv_cache": codes, "kv_cache_sf": fp8(50, 2, 16, 8, 8), "k_scale": 0.5, "v_scale": 0.5}
    yield page.nvfp4_quantize_append_paged_kv_cache, {**rows, **where, **quantised, **table}
    slots = {"slot_mapping": int32(99)}
    yield page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, {**rows, **slots, **quantised}
    scales = {"kv_cache_sf": (fp8(50, 8, 16, 8), fp8(50, 8, 16, 8)), "k_scale": 0.5, "v_scale": 0.5}
    pair = {"paged_kv_cache": (codes[:, 0].transpose(1, 2), codes[:, 1].transpose(1, 2)), "kv_layout": "HND", **scales}
    yield page.nvfp4_quantize_append_paged_kv_cache, {**rows, **where, **pair, **table}
    yield page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, {**rows, **slots, **pair}
    scales = {"kv_cache_sf": (fp8(50, 16, 8, 8), fp8(50, 16, 8, 8)), "k_scale": 0.5, "v_scale": 0.5}
    pair = {"paged_kv_cache": codes.unbind(1), **scales}
    yield page.nvfp4_quantize_append_paged_kv_cache, {**rows, **where, **pair, **table}
    tensors = {"k_scale": fp32(1), "v_scale": fp32(1)}
    yield page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, {**rows, **slots, **pair, **tensors}
    yield page.get_batch_indices_positions, {"append_indptr": int32(8), "seq_lens": int32(7), "nnz": 99}
    yield page.get_seq_lens, {"kv_indptr": int32(8), "kv_last_page_len": int32(7), "page_size": 16}


def write_all(folder: Path) -> dict[str, bytes]:
    """Write every definition to a folder; return the files by name."""
    for api, arguments in calls():
        api.fi_trace(save_dir=folder, **arguments)
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.json"))}


def files_to_commit(written: dict[str, bytes]) -> dict[str, bytes]:
    """Return the examples in full, and the first 64 bits of the SHA-256 of every definition, a line each."""
    hashes = {name: hashlib.sha256(text).hexdigest()[:16] for name, text in written.items()}
    return {name: written[name] for name in FULL} | {HASHES: json.dumps(hashes, indent=0).encode() + b"\n"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = files_to_commit(write_all(Path(folder)))
    OUT.mkdir(exist_ok=True)
    for path in OUT.iterdir():
        path.unlink()
    for name, text in files.items():
        (OUT / name).write_bytes(text)


if __name__ == "__main__":
    if sys.argv[1:]:
        write_all(Path(sys.argv[1]))
    else:
        main()
