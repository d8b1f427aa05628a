# SPDX-License-Identifier: Apache-2.0
"""Tiles of ``cutlass_fused_moe`` from the autotuner: choices are measured, kept in files, used, and change no bit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from flashinfer import autotune
from flashinfer.autotuner import AutoTuner
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.cutlass import call as cutlass_op
from flashinfer.fused_moe.cutlass import tuning as cutlass_tuning
from flashinfer.fused_moe.cutlass.formats import Format
from flashinfer.fused_moe.cutlass.tuning import CPU_TILES, FEWEST_TOKENS, FusedMoeTileRunner
from flashinfer.gemm import launch
from flashinfer.jit.gemm import W4_KINDS, W4_TILES, tiles_of
from flashinfer.tllm_enums import ActivationType

from .layers import mxfp4

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 128, 96
OPS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")


@pytest.fixture(autouse=True)
def forgotten():
    AutoTuner.get().clear_cache()
    cutlass_op.layer_launches.clear()
    yield
    AutoTuner.get().clear_cache()


def layer(tokens: int, device: str = "cpu", has_scales: bool = True) -> tuple:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    scales, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K)
    w1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator).bfloat16() / 16
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator).bfloat16() / 16
    x, ids, scales, w1, w2 = (t.to(device) for t in (x, ids.to(torch.int32), scales, w1, w2))
    return x, ids, scales if has_scales else None, w1, w2, torch.bfloat16, None


def measured() -> dict[str, list]:
    """Return the tactics of each op."""
    found: dict[str, list] = {op: [] for op in OPS}
    for key, (tactic, _) in AutoTuner.get().profiling_cache.items():
        found[key.custom_op].append(tactic)
    return found


@pytest.fixture
def passed(monkeypatch):
    """Return the products that native code of the CPU gets, as weights per tile, or None."""
    native, products = cutlass_op.native_fused_moe[False], []

    def call(*arguments):
        product = arguments[20]
        products.append(None if product is None else (product(1), product(2)))
        native(*arguments)

    monkeypatch.setitem(cutlass_op.native_fused_moe, False, call)
    return products


@pytest.mark.parametrize("has_scales", [True, False])
def test_tiles_are_measured_for_each_bucket(passed, has_scales):
    call = layer(20, has_scales=has_scales)
    expected = cutlass_fused_moe(*call)[0].clone()
    assert passed == [None] and not AutoTuner.was_used
    with autotune(tuning_buckets=(16, 32)):
        assert torch.equal(cutlass_fused_moe(*call)[0], expected)
    tactics = measured()
    assert all(len(found) == 2 and set(found) <= set(CPU_TILES) for found in tactics.values())
    trials = set(passed)
    for tile in CPU_TILES[1:]:  # each product was tried with each tile, the other one by the rule
        assert (tile, CPU_TILES[0]) in trials and (CPU_TILES[0], tile) in trials
    del passed[:]
    assert torch.equal(cutlass_fused_moe(*call)[0], expected)
    assert len(passed) == 1 and AutoTuner.get().stats.tuned_op_total_configs[OPS[0]] >= 2


def test_choices_are_used_and_kept_in_a_file(passed, tmp_path, monkeypatch):
    """Check with times that are given: the widest tile wins for GEMM 1, the middle one for GEMM 2."""

    def trials(self, op, runners, config, profile, inputs, kwargs):
        wins = {OPS[0]: CPU_TILES[2], OPS[1]: CPU_TILES[1]}[op]
        return [(runners[0], tactic, 1.0 if tactic == wins else 2.0) for tactic in CPU_TILES]

    monkeypatch.setattr(AutoTuner, "_trials", trials)
    call, file = layer(20), tmp_path / "tuned.json"
    with autotune(cache=file, tuning_buckets=(16, 32)):
        expected = cutlass_fused_moe(*call)[0].clone()
    assert passed == [(192, 96)]
    saved = json.loads(file.read_text())
    assert sum("trtllm::fused_moe::gemm" in key for key in saved) == 4
    AutoTuner.get().clear_cache()
    assert not AutoTuner.was_used
    cutlass_fused_moe(*call)
    assert AutoTuner.get().load_configs(file) and AutoTuner.was_used
    with autotune(False, tuning_buckets=(16, 32)):
        assert torch.equal(cutlass_fused_moe(*call)[0], expected)
    assert passed == [(192, 96), None, (192, 96)]


@pytest.mark.parametrize(
    ("most", "buckets"),
    [(8192, tuple(2**i for i in range(4, 14))), (100, (16, 32, 64, 100)), (32, (16, 32)), (16, (16,)), (3, (3,))],
)
def test_buckets_end_at_tune_max_num_tokens(monkeypatch, most, buckets):
    shapes = []

    def trials(self, op, runners, config, profile, inputs, kwargs):
        shapes.append(profile.get_opt_shapes()[1][0])
        return [(runners[0], CPU_TILES[0], 1.0)]

    monkeypatch.setattr(AutoTuner, "_trials", trials)
    with autotune():
        cutlass_fused_moe(*layer(130), tune_max_num_tokens=most)
    assert sorted(set(shapes)) == sorted(buckets)


@pytest.mark.parametrize("rank", [0, 3])
def test_experts_of_all_ranks_are_drawn(monkeypatch, rank):
    """Check that trials route tokens as a group of ranks does: engines pass global ids, most of them of other ranks."""
    ranks, drawn, prepare = 4, [], AutoTuner._prepare_input_tensors

    def prepared(self, profile, inputs):
        tensors = prepare(self, profile, inputs)
        drawn.append(tensors[2])
        return tensors

    monkeypatch.setattr(AutoTuner, "_prepare_input_tensors", prepared)
    x, ids, *others = layer(64)
    with autotune(tuning_buckets=(64,)):
        cutlass_fused_moe(x, ids, *others)
        cutlass_fused_moe(x, ids + rank * EXPERTS, *others, ep_size=ranks, ep_rank=rank)
    assert [int(ids.max()) < EXPERTS for ids in drawn] == [True, True, False, False]
    for ids in drawn[2:]:
        assert ids.min() >= 0 and set(ids.flatten().tolist()) == set(range(ranks * EXPERTS))
        assert (ids[:, 0] != ids[:, 1]).all()
    extras = {key.extras[-1] for key in AutoTuner.get().profiling_cache}
    assert extras == {True, ranks}, "one rank is not named, so that files of it stay valid"


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_tactics_of_a_rank_are_those_of_its_rows(kind):
    def tactics(tokens: int, ranks: int) -> list:
        shapes = ((tokens, 256), (tokens, 256), (tokens, TOP_K), (tokens, TOP_K), (EXPERTS, 512, 128))
        inputs = [torch.empty(shape, device="meta") for shape in (*shapes, (EXPERTS, 256, 128))]
        return FusedMoeTileRunner(1, kind, 0, 0, None, lambda *arguments: None, ranks).get_valid_tactics(inputs, None)

    assert tactics(2048, 8) == tactics(256, 1) != tactics(2048, 1)


def test_wrong_tune_max_num_tokens():
    with autotune(), pytest.raises(ValueError, match="tune_max_num_tokens must be 1 or more, got 0"):
        cutlass_fused_moe(*layer(20), tune_max_num_tokens=0)


def test_choices_are_looked_up_once(passed, monkeypatch):
    """Check that calls outside of contexts ask the tuner once for each bucket, and again after its results changed."""
    asked = []
    tuner, call = AutoTuner.get(), layer(20)
    monkeypatch.setattr(AutoTuner, "was_used", True)
    monkeypatch.setattr(
        AutoTuner, "choose_one", lambda self, op, runners, *others: asked.append(op) or (runners[0], 96)
    )
    for _ in range(3):
        cutlass_fused_moe(*call)
    assert asked == list(OPS)
    cutlass_fused_moe(*layer(21))
    assert asked == list(OPS), "the same bucket"
    cutlass_fused_moe(*layer(40))
    assert asked == 2 * list(OPS)
    with autotune(False):
        cutlass_fused_moe(*call)
        cutlass_fused_moe(*call)
    assert len(asked) == 8, "inside a context, whose buckets may differ, each call asks"
    cutlass_fused_moe(*call)
    cutlass_fused_moe(*call)
    assert len(asked) == 10 and passed == [(96, 96)] * 9
    tuner.clear_cache()
    monkeypatch.setattr(AutoTuner, "was_used", True)
    cutlass_fused_moe(*call)
    assert len(asked) == 12


@pytest.mark.parametrize("tiles", [(96, 48), (48, 192), (192, 96)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_tiles_change_no_bit(monkeypatch, tiles, tokens):
    call = layer(tokens)
    expected = cutlass_fused_moe(*call)[0].clone()
    cutlass_op.layer_launches.clear()  # they do not ask for few tokens
    monkeypatch.setattr(AutoTuner, "was_used", True)
    monkeypatch.setattr(cutlass_op, "tuned_product", lambda *arguments: cutlass_tuning._cpu_product(*tiles))
    assert torch.equal(cutlass_fused_moe(*call)[0], expected)


@pytest.mark.parametrize("tile", [0, 50, 240])
def test_wrong_tiles(monkeypatch, tile):
    monkeypatch.setattr(AutoTuner, "was_used", True)
    monkeypatch.setattr(cutlass_op, "tuned_product", lambda *arguments: cutlass_tuning._cpu_product(48, tile))
    with pytest.raises(ValueError, match=f"weights per tile must be a multiple of 48 of at most 192, got {tile}"):
        cutlass_fused_moe(*layer(3))


def test_few_tokens_have_no_tiles(passed):
    with autotune():
        cutlass_fused_moe(*layer(FEWEST_TOKENS - 1))
    assert passed == [None] and measured() == {op: [] for op in OPS}


def test_kept_launches_take_tiles_that_are_known(passed, monkeypatch):
    asked, real = [], cutlass_op.tuned_product
    monkeypatch.setattr(cutlass_op, "tuned_product", lambda *arguments: asked.append(1) or real(*arguments))
    call = layer(FEWEST_TOKENS)
    for _ in range(2):
        cutlass_fused_moe(*call)
    assert not asked and passed == [None] * 2, "nothing was tuned"
    monkeypatch.setattr(AutoTuner, "was_used", True)
    cutlass_fused_moe(*layer(FEWEST_TOKENS - 1))
    assert not asked, "few tokens have no tiles"
    inputs = (torch.empty_like(call[0]), *call[:5], None)
    facts = (None, Format.PLAIN, int(ActivationType.Swiglu), 1, inputs, 8192)
    AutoTuner.get().kept[cutlass_tuning._key(*facts)] = cutlass_tuning._cpu_product(96, 192)
    cutlass_fused_moe(*call)
    cutlass_fused_moe(*layer(16), tune_max_num_tokens=8192)
    assert not asked and passed[-2:] == [(96, 192)] * 2, "the same bucket"
    bias = torch.zeros(EXPERTS, 2 * INNER).bfloat16(), torch.zeros(EXPERTS, HIDDEN).bfloat16()
    for others in ({"tune_max_num_tokens": 64}, {"fc1_expert_biases": bias[0], "fc2_expert_biases": bias[1]}):
        cutlass_fused_moe(*call, **others)
    cutlass_fused_moe(*layer(FEWEST_TOKENS, has_scales=False))
    cutlass_fused_moe(*layer(64))
    with autotune(False):
        cutlass_fused_moe(*call)
    cutlass_fused_moe(*call)
    assert len(asked) == 6 and passed[-6:] == [None] * 6, "other layers, contexts, and calls after a context ask"
    cutlass_fused_moe(*call)
    assert len(asked) == 6, "the rule is an answer, too"


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8_block"])
@pytest.mark.parametrize("tokens", [16, 8192])
def test_tactics_of_sm90(kind, tokens):
    """Check the list on the CPU: numbers of tiles of the module, K split by swapped tiles only."""
    shapes = ((tokens, 2048), (tokens, 2048), (tokens, TOP_K), (tokens, TOP_K), (EXPERTS, 3072, 2048))
    inputs = [torch.empty(shape, device="meta") for shape in (*shapes, (EXPERTS, 2048, 1536))]
    tiles = tiles_of(kind)
    for index in (1, 2):
        runner = FusedMoeTileRunner(index, kind, 0, 0, None, lambda *arguments: None)
        first, *tactics = runner.get_valid_tactics(inputs, None)
        assert first == -1 and len(tactics) >= 2 and len(set(tactics)) == len(tactics)
        for tile, cluster in tactics:
            assert 0 <= tile < len(tiles) and (cluster == 1 or tiles[tile].swapped)


@pytest.mark.parametrize("kind", list(W4_KINDS))
@pytest.mark.parametrize("tokens, fewest, most", [(16, 8, 48), (300, 80, 192), (8192, 96, 192)])
def test_tactics_of_four_bit_weights(kind, tokens, fewest, most):
    """Tiles from half of the mean of an expert's rows; K of 256, two codes a byte, is split by two blocks at most."""
    shapes = ((tokens, 256), (tokens, 256), (tokens, TOP_K), (tokens, TOP_K), (EXPERTS, 512, 128))
    inputs = [torch.empty(shape, device="meta") for shape in (*shapes, (EXPERTS, 256, 128))]
    for index in (1, 2):
        runner = FusedMoeTileRunner(index, kind, 0, 0, None, lambda *arguments: None)
        first, *tactics = runner.get_valid_tactics(inputs, None)
        assert first == -1 and len(set(tactics)) == len(tactics)
        tried = {W4_TILES[tile].tokens for tile, _ in tactics}
        assert min(tried) == fewest and max(tried) == most
        assert {split for _, split in tactics} == ({1, 2} if fewest <= 64 else {1})
        assert all(split <= W4_TILES[tile].most_blocks for tile, split in tactics)


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_products_of_sm90(monkeypatch, kind):
    made = []
    module = SimpleNamespace(gemm_sm90_experts=lambda *tiles: made.append(tiles) or tiles)
    module.gemm_w4_sm90_experts = module.gemm_sm90_experts
    for name in ("get_gemm_sm90_module", "get_gemm_w4_sm90_module"):
        monkeypatch.setattr(launch, name, lambda kind: module)
    launch.experts_product.cache_clear()
    assert cutlass_tuning._product_of(kind, (-1, -1), "rule") == "rule"
    for _ in range(2):  # tactics of a file are lists
        assert cutlass_tuning._product_of(kind, ([3, 2], -1), "rule") == (3, 2, -1, 1)
    assert cutlass_tuning._product_of(kind, (-1, (5, 1)), "rule") == (-1, 1, 5, 1)
    assert made == [(3, 2, -1, 1), (-1, 1, 5, 1)]
    assert launch.experts_product(kind) == (-1, 1, -1, 1)
    launch.experts_product.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_tiles_of_the_gpu(kind):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have no tiles to choose")
    if kind == "bf16":
        call, options, tiles, errors = layer(64, "cuda"), {}, tiles_of("bf16"), {}
    else:
        call, options, tiles = (), mxfp4(64, HIDDEN, 256, EXPERTS, TOP_K, device="cuda")[0], W4_TILES
        errors = {"rtol": 2e-2, "atol": 2e-2}
    expected = cutlass_fused_moe(*call, **options)[0].clone()
    with autotune(tuning_buckets=(64,)):
        found = cutlass_fused_moe(*call, **options)[0]
    assert all(len(tactics) == 1 for tactics in measured().values())
    assert AutoTuner.get().stats.failed_tactics == {} or not any(AutoTuner.get().stats.failed_tactics.values())
    torch.testing.assert_close(found, expected, **errors)
    for tile in range(len(tiles)):  # each tile, or the rule where it cannot serve a product
        assert callable(launch.experts_product(kind, (tile, 1, tile, 1)))
        AutoTuner.get().profiling_cache = {
            key: ((tile, 1), profile) for key, (_, profile) in AutoTuner.get().profiling_cache.items()
        }
        with autotune(False, tuning_buckets=(64,)):
            torch.testing.assert_close(cutlass_fused_moe(*call, **options)[0], expected, **errors)
