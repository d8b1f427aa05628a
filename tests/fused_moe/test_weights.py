# SPDX-License-Identifier: Apache-2.0
"""Orders of expert weights, buckets of token counts, and names that need Blackwell."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._compat import unsupported_fused_moe as blackwell
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.fused_moe import core, mixed_weights, sort, utils


def test_rows_of_gated_weights_come_in_turn():
    x = torch.arange(12).view(6, 2)
    assert torch.equal(flashinfer.reorder_rows_for_gated_act_gemm(x), x[[0, 3, 1, 4, 2, 5]])
    with pytest.raises(ValueError, match=r"an even number of rows, got shape \(5, 2\)"):
        flashinfer.reorder_rows_for_gated_act_gemm(x[:5])


def test_block_layout():
    x = torch.arange(2 * 6).view(2, 6)
    assert core.convert_to_block_layout(x, 3).tolist() == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    with pytest.raises(ValueError, match=r"blocks of blockK = 4, got shape \(2, 6\)"):
        core.convert_to_block_layout(x, 4)


@pytest.mark.parametrize("is_gated", [True, False])
def test_permutation_is_reordering_then_shuffling(is_gated):
    x, cache = torch.arange(256 * 2).view(256, 2), {}
    rows = core._maybe_get_cached_w3_w1_permute_indices(cache, x, 128, is_gated_act_gemm=is_gated)
    ordered = flashinfer.reorder_rows_for_gated_act_gemm(x) if is_gated else x
    assert torch.equal(x[rows], flashinfer.shuffle_matrix_a(ordered, 128))
    assert core._maybe_get_cached_w3_w1_permute_indices(cache, x, 128, is_gated_act_gemm=is_gated) is rows


def test_permutation_of_second_weights():
    x, cache = torch.arange(128 * 2).view(128, 2), {}
    rows = core.get_w2_permute_indices_with_cache(cache, x, 64)
    assert torch.equal(x[rows], flashinfer.shuffle_matrix_a(x, 64))
    scales = torch.randint(256, (128, 4), dtype=torch.uint8)
    of_scales = core.get_w2_permute_indices_with_cache(cache, scales, 128, num_elts_per_sf=16)
    assert torch.equal(
        flashinfer.block_scale_interleave(scales[of_scales]), flashinfer.shuffle_matrix_sf_a(scales, 128, 16)
    )
    assert len(cache) == 2


def test_buckets_of_token_counts():
    expected = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 8192)
    assert utils.get_hybrid_num_tokens_buckets(8192) == expected
    assert utils.get_hybrid_num_tokens_buckets(700, 100) == (128, 256, 512, 700)
    mapped = [utils.map_to_hybrid_bucket(x, 5000) for x in (0, 3, 257, 2049, 4097, 9999)]
    assert mapped == [1, 4, 512, 2560, 5000, 5000]
    assert utils.make_hybrid_bucket_mapper(64) is utils.make_hybrid_bucket_mapper(64)
    assert utils.make_hybrid_bucket_mapper(64)(33) == 64


@pytest.mark.parametrize("rows, cols, batch", [(1, 16, ()), (130, 80, (3,))], ids=["one", "batch"])
def test_scales_go_to_the_swizzled_order_and_back(device, rows, cols, batch):
    scales = torch.randint(256, (*batch, rows, cols // 16), dtype=torch.uint8, device=device)
    padded = utils.compute_swizzled_sf_shape(rows, cols // 16)
    assert padded == {1: (128, 4), 130: (256, 8)}[rows]
    swizzled = utils.swizzle_sf(scales, rows, cols)
    assert torch.equal(swizzled, flashinfer.block_scale_interleave(scales))
    assert swizzled.numel() == padded[0] * padded[1] * (batch[0] if batch else 1)
    assert torch.equal(utils.unswizzle_sf(swizzled, rows, cols), scales.flatten(0, -2))
    with pytest.raises(ValueError, match=r"unswizzle_sf: sf must have a multiple of \d+ elements"):
        utils.unswizzle_sf(swizzled[:-1], rows, cols)


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: utils.unswizzle_sf(torch.zeros(512), 0, 16),
            "unswizzle_sf: rows, cols .* must be at least 1, got 0, 16",
        ),
        (
            lambda: utils.unswizzle_sf(torch.zeros(512), 1, 16, 0),
            "unswizzle_sf: .* must be at least 1, got 1, 16 and 0",
        ),
        (
            lambda: utils.swizzle_sf(torch.zeros(512), -1, 16),
            "swizzle_sf: rows, cols .* must be at least 1, got -1, 16",
        ),
        (
            lambda: utils.swizzle_sf(torch.zeros(5), 2, 16),
            "swizzle_sf: sf must have a multiple of 2 elements .*, got 5",
        ),
        (lambda: utils.get_fp4_shape((), 16), r"get_fp4_shape: input_shape must .*, got \(\) and 16"),
        (lambda: utils.get_fp4_shape((4, 4), 0), "get_fp4_shape: .* sf_vec_size be at least 1"),
        (
            lambda: utils.make_random_topk_ids(4, 2, 5, torch.device("cpu")),
            "make_random_topk_ids: top_k must be from 0",
        ),
        (lambda: sort.get_max_num_tiles(4, 2, 2, 0), "get_max_num_tiles: tile_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_are_none(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


@pytest.mark.parametrize(
    "function, arguments, name",
    [
        (core.reorder_rows_for_gated_act_gemm, (), "x"),
        (core.get_reorder_rows_for_gated_act_gemm_row_indices, (), "x"),
        (core.convert_to_block_layout, (4,), "input_tensor"),
        (utils.swizzle_sf, (1, 16), "sf"),
        (utils.unswizzle_sf, (1, 16), "sf"),
        (mixed_weights.interleave_moe_weights_for_sm90_mixed_gemm, (), "weight"),
        (mixed_weights.interleave_moe_scales_for_sm90_mixed_gemm, (), "scales"),
        (mixed_weights.preprocess_moe_weights_for_sm90_mixed_gemm_humming, (None,), "weight"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_layouts_of_nothing(function, arguments, name):
    with pytest.raises(TypeError, match=f"^{function.__name__}: {name} must be .*, got a NoneType"):
        function(None, *arguments)


def test_shapes_of_fp4():
    assert utils.get_fp4_shape((3, 130, 80), 16) == ([3, 130, 40], 512 * 8)
    assert utils.get_fp4_shape((3, 130, 80), 16, is_swizzled_layout=False) == ([3, 130, 40], 390 * 5)


def test_random_experts_differ(device):
    ids = utils.make_random_topk_ids(8, 5, 3, torch.device(device))
    assert ids.shape == (5, 3) and ids.dtype == torch.int32 and ids.device.type == device
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in ids.tolist())


def test_published_names_that_need_blackwell():
    """Code that runs on any machine imports these, then asks the GPU."""
    assert {
        "trtllm_fp8_per_tensor_scale_routed_moe",
        "trtllm_gen_routing",
        "trtllm_mxint4_block_scale_routed_moe",
    } <= set(blackwell.__all__)


@pytest.mark.parametrize("name", blackwell.__all__)
def test_names_that_need_blackwell(name):
    with pytest.raises(RuntimeError, match=f"{name}: needs a (Blackwell GPU|module that loads)"):
        getattr(flashinfer.fused_moe, name)()


def test_inputs_of_runners_have_an_order():
    x = torch.ones(2, 4)
    inputs = core.MoeRunnerInputs(None, x, None, None, x)
    assert core.MoEInputs is core.MoeRunnerInputs
    assert list(inputs)[1] is x and inputs.per_token_scale is None and len(inputs) == 8


def test_module_of_a_capability(monkeypatch):
    monkeypatch.setattr(core, "get_fused_moe_module", lambda device: f"the module for {device}")
    assert core.get_cutlass_fused_moe_module("90") == "the module for cuda"
    for backend in ("100", "sm90"):
        with pytest.raises(BackendSupportedError, match=f"backend must be a capability up to 90.*got '{backend}'"):
            core.get_cutlass_fused_moe_module(backend)
