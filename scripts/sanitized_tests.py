# SPDX-License-Identifier: Apache-2.0
"""Tests that scripts/sanitize.py runs for each family, and the plugin of pytest that selects them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Pick:
    """Choice of ``count`` parametrisations of each of some tests of a file, whose ids contain all words of ``ids``.

    ``skips``: the tool that does not run them.
    """

    file: str
    tests: str
    count: int = 2
    ids: str = ""
    skips: str = ""


#: What each family runs: kernels of every kind that it has, on shapes that take a moment under a tool. Modules are
#: shared as far as possible, for building them takes most of the time: single requests run on kernels of batches.
#: racecheck does not end for blocks of a cluster that exchange numbers with st.async and wait for them at an mbarrier.
FAMILIES: dict[str, list[Pick]] = {
    "prefill_fa3_e4m3": [
        Pick("attention/test_prefill_fa3_fp8.py", "test_e4m3_pages test_e4m3_groups"),
        Pick("attention/test_prefill_fa3_fp8.py", "test_e4m3_head_scales"),
    ],
    "prefill_fa3_fp8_cache": [
        Pick("attention/test_prefill_fa3_fp8.py", "test_pages test_groups"),
        Pick("attention/test_prefill_fa3_fp8.py", "test_scales"),
    ],
    "prefill_fa3": [
        Pick("attention/test_prefill_fa3.py", "test_pages", 3),
        Pick("attention/test_prefill_fa3.py", "test_groups"),
        Pick("attention/test_prefill_fa3.py", "test_custom_mask test_replan_with_more_rows"),
    ],
    "comm": [
        Pick("comm/test_allreduce_gpu.py", "test_one_rank"),
        Pick("comm/test_alltoall_gpu.py", "test_streams", count=1),
    ],
    "mixed": [Pick("attention/test_mixed.py", "test_both_kinds_in_one_batch", 1, "128 fa3")],
    "prefill_fa2": [
        Pick("attention/test_native.py", "test_prefill", 3, "causal-"),
        Pick("attention/test_native.py", "test_single_prefill", 1, "causal]"),
        Pick("attention/test_native.py", "test_custom_mask test_single_prefill_shapes"),
        Pick("attention/test_native.py", "test_fully_masked_rows test_results_do_not_depend_on_the_batch", 1),
    ],
    "decode": [
        Pick("attention/test_native.py", "test_decode", 2, "plain"),
        Pick("attention/test_native.py", "test_decode_heads test_single_decode"),
        Pick("attention/test_batch_decode.py", "test_layouts_and_forms"),
        Pick("attention/test_batch_decode.py", "test_short_requests_of_which_blocks_take_more"),
    ],
    "mla_fa3": [
        Pick("mla/test_mla_fa3.py", "test_pages", 3, "dtype1"),
        Pick("mla/test_mla_fa3.py", "test_splits test_strides_of_queries"),
    ],
    "mla_fa2": [Pick("attention/test_native_mla.py", "test_mla", 6, "dtype0")],
    "gemm_sm90_bf16": [
        Pick("hopper/test_gemm.py", "test_tiles_and_tails", 20, "bf16- 300-712"),
        Pick("hopper/test_gemm.py", "test_pairs_of_blocks", 2, "bf16- 300-712"),
        Pick("hopper/test_gemm.py", "test_blocks_that_split_k", 2, "bf16-", skips="racecheck"),
        Pick("hopper/test_gemm.py", "test_strides test_dependent_launches"),
    ],
    "gemm_sm90_fp8": [
        Pick("hopper/test_gemm.py", "test_tiles_and_tails", 20, "fp8- 300-712"),
        Pick("hopper/test_gemm.py", "test_pairs_of_blocks", 2, "fp8- 300-712"),
        Pick("hopper/test_gemm.py", "test_blocks_that_split_k", 2, "fp8-", skips="racecheck"),
        Pick("hopper/test_gemm.py", "test_scales_of_tensors", 1),
    ],
    "gemm_sm90_block": [
        Pick("hopper/test_gemm.py", "test_tiles_and_tails", 20, "fp8_block- 300-712"),
        Pick("hopper/test_gemm.py", "test_pairs_of_blocks", 2, "fp8_block- 300-712"),
        Pick("hopper/test_gemm.py", "test_blocks_that_split_k", 2, "fp8_block-", skips="racecheck"),
        Pick("hopper/test_gemm.py", "test_blocks_that_split_k_of_plain_tiles", 4, "300-712"),
        Pick("hopper/test_gemm.py", "test_scales_of_single_weight_rows"),
        Pick("hopper/test_gemm.py", "test_products_that_quantise", 4, "136-384"),
        Pick("hopper/test_quantize_1x128.py", "test_quantize"),
    ],
    "gemm_sm90_grouped": [
        Pick("hopper/test_gemm_grouped.py", "test_packed test_masked test_contiguous", 2, kind)
        for kind in ("bf16-", "fp8-", "fp8_block-")
    ],
    "gemm": [
        Pick("gemm/test_cuda_kernel.py", "test_chunks test_columns test_any test_block_scales", 2, "-200"),
        Pick("gemm/test_cuda_kernel.py", "test_masked_groups"),
        Pick("gemm/test_native.py", "test_strides test_packed test_contiguous"),
    ],
    "fused_moe_bf16": [
        Pick("fused_moe/test_cutlass_fused_moe.py", "test_shapes test_activations", 4),
        Pick("fused_moe/test_cutlass_fused_moe.py", "test_biases test_skewed_routing", 1),
        Pick("fused_moe/test_cutlass_fused_moe.py", "test_other_ranks_contribute_nothing", 1),
    ],
    "fused_moe_fp8": [
        Pick("fused_moe/test_cutlass_fused_moe_quantized.py", "test_fp8 test_fp8_block", 3),
        Pick("fused_moe/test_cutlass_fused_moe_quantized.py", "test_fp8_block", 1, "gathered"),
        Pick("fused_moe/test_cutlass_fused_moe_quantized.py", "test_e4m3_of_few_tokens", 4),
    ],
    "fused_moe_w4": [
        Pick("fused_moe/test_cutlass_fused_moe_quantized.py", "test_mxfp4 test_mxfp4_with_an_activation_of_its_own", 3),
        Pick("fused_moe/test_cutlass_fused_moe_quantized.py", "test_int4_with_fp8_activations", 1),
        Pick("fused_moe/test_cutlass_fused_moe_quantized.py", "test_mxfp4_with_fp8_activations", 1),
    ],
    "mono_moe": [
        Pick("fused_moe/test_monomoe.py", "test_one_token test_other_numbers_of_tokens"),
        Pick("fused_moe/test_monomoe_routed.py", "test_limits"),
    ],
    "norm_block_quant": [Pick("norm/test_norm_block_quant.py", "test_values test_rows_of_wider_tensors", 3)],
    "gated_norm": [Pick("norm/test_gated_norm.py", "test_gated_residual test_gated_residual_next test_sigmoid_gate")],
    "mhc": [Pick("mhc/test_mhc.py", "test_post test_pre test_pre_with_prenorm")],
    "recurrent_delta": [
        Pick("recurrent/test_gdn_decode.py", "test_pool test_k_major test_several_tokens"),
        Pick("recurrent/test_gdn_mtp.py", "test_states_after_each_token test_replay"),
        Pick("recurrent/test_gdn_bf16_state.py", "test_ring", 1),
        Pick("recurrent/test_kda.py", "test_states_of_sequences test_speculative_decode"),
        Pick("recurrent/test_kda.py", "test_frozen_verification test_packed_decode_layer", 1),
    ],
    "moe_routing": [Pick("fused_moe/test_moe_routing.py", "test_methods test_deepseek test_hash_topk test_ties", 3)],
    "moe_permute": [
        Pick("fused_moe/test_moe_permute.py", "test_copies test_one_factor test_scales_of_128_columns test_sums"),
        Pick("fused_moe/test_moe_permute.py", "test_rows_of_wider_tensors"),
    ],
    "moe_sort": [Pick("fused_moe/test_moe_sort.py", "test_tiles test_rows test_one_expert_takes_all", 4)],
    "bgmv_moe": [Pick("fused_moe/test_bgmv_moe.py", "test_shrink test_expand test_gemm1_delta test_gemm2_delta", 3)],
    "cascade": [
        Pick("cascade/test_merge.py", "test_merge_state test_merge_states test_strided"),
        Pick("cascade/test_merge.py", "test_variable_length_merge_states"),
        Pick("cascade/test_wrappers.py", "test_levels_are_attention_over_all_keys"),
        Pick("cascade/test_fused.py", "test_both_levels_are_attended_to"),
    ],
    "pod": [Pick("pod/test_pod.py", "test_pod test_batch_pod")],
    "xqa": [
        Pick("attention/test_front_doors.py", "test_xqa test_decode"),
        Pick("attention/test_front_doors.py", "test_causal_drafts test_trees_of_drafts", 1),
    ],
    "batch_attention": [Pick("attention/test_batch_attention.py", "test_mixed_batch test_groups")],
    "sparse": [Pick("sparse/test_block.py", "test_pattern"), Pick("sparse/test_variable.py", "test_pattern", 1)],
    "sampling": [
        Pick("sampling/test_sampling.py", "test_tokens_of_the_reference", 18, "20011", skips="racecheck"),
        Pick("sampling/test_sampling.py", "test_tokens_of_the_reference", 18, "111"),
        Pick("sampling/test_sampling.py", "test_indices"),
        Pick("sampling/test_sampling_rows.py", "test_softmax test_top_p_renorm", 3, skips="racecheck"),
        Pick("sampling/test_sampling_rows.py", "test_top_k_renorm test_top_k_mask", 3, skips="racecheck"),
        Pick("sampling/test_sampling_rows.py", "test_softmax test_top_p_renorm test_top_k_renorm", 3, "111"),
        Pick("sampling/test_sampling_speculative.py", "test_tokens_of_the_reference"),
        Pick("sampling/test_sampling_cuda.py", "test_every_kernel_of_few_rows", 1, skips="racecheck"),
    ],
    "topk": [
        Pick("topk/test_topk.py", "test_shapes test_algorithms test_strided_and_misaligned", 4),
        Pick("topk/test_topk_cuda.py", "test_every_size_of_cluster"),
        Pick("topk/test_topk_transforms.py", "test_ragged test_page_table test_varlen"),
    ],
    "norm": [
        Pick("norm/test_norm.py", "test_rmsnorm test_fused_add_rmsnorm test_heads test_strided_rows", 4),
        Pick("norm/test_norm_cuda.py", "test_residual_of_a_small_batch test_silu"),
        Pick("norm/test_norm_quant.py", "test_rmsnorm_quant test_fused_add_rmsnorm_quant"),
        Pick("norm/test_layernorm.py", "test_layernorm test_layernorm_quant"),
        Pick("norm/test_dit_layernorm.py", "test_values", 3),
        Pick("norm/test_qk_rmsnorm_rope.py", "test_values", 3),
    ],
    "rope": [
        Pick("rope/test_rope.py", "test_rope test_part_of_a_head test_ragged", 4),
        Pick("rope/test_rope_cos_sin_cache.py", "test_rope", 3),
        Pick("rope/test_rope_quantize.py", "test_quantize test_append", 3),
    ],
    "page": [
        Pick("page/test_page.py", "test_append test_row_sizes test_mla test_batch_indices_positions"),
        Pick("page/test_page_nvfp4.py", "test_append test_slot_mapping"),
    ],
    "quantization": [
        Pick("quantization/test_packbits.py", "test_sizes test_segments", 4),
        Pick("quantization/test_mx_quantization.py", "test_mxfp8 test_interleave test_e2m1"),
        Pick("quantization/test_nvfp4_kv.py", "test_matrix test_paged"),
    ],
    "activation": [Pick("activation/test_activation.py", "test_act_and_mul test_swiglu test_strided_rows", 4)],
    "concat_ops": [Pick("concat_ops/test_concat_mla.py", "test_contiguous test_slices_of_a_projection", 3)],
    "recurrent": [
        Pick("recurrent/test_gdn_prefill.py", "test_heads", 4),
        Pick("recurrent/test_gdn_prefill.py", "test_checkpoints_are_states_of_prefixes test_l2norm", 1),
        Pick("recurrent/test_kda_prefill.py", "test_packed_sequences test_checkpoints", 1),
    ],
    "indexer": [
        Pick("indexer/test_mqa_logits.py", "test_scores", 3),
        Pick("indexer/test_mqa_logits.py", "test_schedule test_layouts"),
        Pick("indexer/test_schedule.py", "test_devices", 3),
    ],
    "scale": [Pick("test_scale.py", "test_scale_correctness test_unaligned_views", 3)],
    "api_log_stats": [Pick("test_api_log_stats.py", "test_each_replay_prints_a_line_per_tensor")],
}  # fmt: skip

#: Families whose tests capture a graph, which needs memory that torch keeps, in a process of their own.
CAPTURES = ("api_log_stats",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--picks", help="entries of the table of scripts/sanitize.py, as JSON")
    parser.addoption("--seconds", type=float, default=1e9, help="begin no test after this time")


def chosen(items: list[Any], picks: list[Pick]) -> list[Any]:
    """Return the tests of ``picks``, the same ones every time."""
    kept = []
    for pick in picks:
        for test in pick.tests.split():
            name = f"tests/{pick.file}::{test}"
            same = [x for x in items if x.nodeid.partition("[")[0] == name and needs_cuda(x)]
            same = [x for x in same if all(word in x.nodeid.partition("[")[2] for word in pick.ids.split())]
            kept += random.Random(name).sample(same, min(pick.count, len(same)))
    return kept


def needs_cuda(item: Any) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is None or callspec.params.get("device", "cuda") == "cuda"


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if picks := config.getoption("picks"):
        items[:] = chosen(items, [Pick(*values) for values in json.loads(picks)])


def pytest_configure(config: pytest.Config) -> None:
    config.began = time.monotonic()  # type: ignore[attr-defined]
    if config.getoption("picks") and not config.getoption("collectonly"):
        multiply_on_the_host()


def pytest_runtest_setup(item: Any) -> None:
    import pytest

    if time.monotonic() - item.config.began > item.config.getoption("seconds"):
        pytest.skip("no time is left")


def multiply_on_the_host() -> None:
    """Replace the matrix products of torch on CUDA tensors, which only references use here, by those of the host."""
    import torch

    library = torch.library.Library("aten", "IMPL")

    def on_host(operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            device = next(x.device for x in args if isinstance(x, torch.Tensor))
            return operator(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in args), **kwargs).to(device)

        return call

    for name in ("mm", "bmm", "addmm", "baddbmm"):
        library.impl(name, on_host(getattr(torch.ops.aten, name).default), "CUDA")
    multiply_on_the_host.library = library  # type: ignore[attr-defined]  # its end would undo the replacement
