# SPDX-License-Identifier: Apache-2.0
"""MoELayer: values of its backends, ways of giving experts, choice of the backend, refusals; weights of backends."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import fused_moe
from flashinfer.fused_moe import (
    ActivationConfig,
    BackendOptions,
    CutlassBf16Config,
    CutlassBf16Runner,
    CutlassConfig,
    CutlassW4A16Config,
    CutlassW4A16Runner,
    ExecutionConfig,
    ExpertConfig,
    MoEActivationPack,
    MoEFinalizeConfig,
    MoELayer,
    MoEWeightPack,
    QuantConfig,
    QuantVariant,
    RoutingConfig,
    RoutingInputMode,
    RoutingMethodType,
    layer,
    route_tokens,
    runners,
)
from flashinfer.fused_moe.prepare import _quantize_mxfp4_linear
from flashinfer.testing import assert_close
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace

from .layers import decode_e2m1
from .small_layer import EXPERTS, HIDDEN, INNER, SIZES, TOP_K, bf16_weights, config, pack_of, weights_of


def reference(x: torch.Tensor, ids: Any, scales: Any, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    dense = cutlass_fused_moe_trace.templates[0]
    return dense.reference(x, ids, scales, w1, w2, output_dtype=torch.bfloat16)


def test_bf16(device):
    weights, w1, w2 = bf16_weights(device)
    made = MoELayer(config(), device)
    assert made.winner_backend is None
    for tokens in (5, 1, 17):
        pack = pack_of(device, tokens)
        out = made(pack, weights)
        assert out.dtype == torch.bfloat16
        assert_close(out, reference(pack.hidden_states_q, pack.topk_ids, pack.topk_weights, w1, w2))
    assert made.winner_backend == "cutlass_bf16"
    made.reset_winner()
    assert made.winner_backend is None
    assert made(pack_of(device, 0), weights).shape == (0, HIDDEN)


def test_w4a16():
    """Check on the CPU; test_cutlass_fused_moe_quantized.py has four-bit weights on each device."""
    w1, w2 = weights_of("cpu")
    weights = MoEWeightPack()
    weights.prepare_for("cutlass_w4a16", CutlassW4A16Config.prepare_weights(w1, w2, **SIZES))
    view = weights.get_view("cutlass_w4a16")
    assert view["fc1_expert_scales"].shape == (EXPERTS, 2 * INNER // 64, HIDDEN // 128, 16, 16)
    backend = BackendOptions((CutlassW4A16Config(),))
    made = MoELayer(config(quant=QuantConfig(QuantVariant.W4A16), backend=backend), "cpu")
    pack = pack_of("cpu")
    out = made(pack, weights)
    values = []
    for w in (w1, w2):
        codes, scale = _quantize_mxfp4_linear(w)
        values.append(decode_e2m1(codes) * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=-1))
    assert_close(out, reference(pack.hidden_states_q, pack.topk_ids, pack.topk_weights, *values))
    assert made.winner_backend == "cutlass_w4a16"


def test_ways_of_giving_experts(device):
    """Check packed ids, plain ids and logits: the same experts give the same bits."""
    weights, *_ = bf16_weights(device)
    made = MoELayer(config(routing=RoutingConfig(EXPERTS, TOP_K, RoutingMethodType.Renormalize)), device)
    x, logits = pack_of(device).hidden_states_q, torch.randn(5, EXPERTS, device=device)
    scales, ids = route_tokens(logits, TOP_K, RoutingMethodType.Renormalize)
    from_logits = MoEActivationPack(x, None, routing_input_mode=RoutingInputMode.FromLogits, routing_logits=logits)
    plain = MoEActivationPack(x, None, ids, scales, routing_input_mode=RoutingInputMode.UnpackedPrecomputed)
    expected = made(plain, weights)
    assert torch.equal(made(from_logits, weights), expected)
    rounded = scales.bfloat16()
    bits = rounded.view(torch.int16).int() & 0xFFFF
    packed = MoEActivationPack(x, None, (ids << 16) | bits)
    assert torch.equal(made(packed, weights), made(MoEActivationPack(x, None, ids, rounded.float()), weights))


def test_workspaces_are_kept_for_powers_of_two(device):
    weights, *_ = bf16_weights(device)
    made = MoELayer(config(), device)
    runner = made.runners[0]
    for tokens in (5, 8, 6, 3):
        made(pack_of(device, tokens), weights)
    assert sorted(capacity for capacity, _ in runner._workspace_cache) == [4, 8]
    assert (runner._workspace_num_tokens, runner._workspace_hidden_size) == (4, HIDDEN)
    inputs = runner.pack_inputs(pack_of(device, 7), weights)
    large = runner._workspace
    assert runner._ensure_workspace(7, HIDDEN) is runner._ensure_workspace(8, HIDDEN) is large
    runner._ensure_workspace(3, HIDDEN)
    assert runner._workspace is not large
    runner.forward(inputs)  # selects the buffer of its own size again
    assert runner._workspace is large
    assert runner._prepare_tuning_inputs(inputs) is inputs


def test_threads_share_a_layer():
    """Check that calls of two threads do not write to one buffer: most results were wrong."""
    weights, *_ = bf16_weights("cpu")
    made, packs = MoELayer(config(), "cpu"), [pack_of("cpu", 16) for _ in range(2)]
    wanted = [made(pack, weights).clone() for pack in packs]
    wrong = [0, 0]

    def call(index: int) -> None:
        for _ in range(300):
            wrong[index] += not torch.equal(made(packs[index], weights), wanted[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_streams_share_a_layer():
    """Check two streams at once, as engines overlap two batches: each call has memory of its stream."""
    weights, *_ = bf16_weights("cuda")
    made, packs = MoELayer(config(), "cuda"), [pack_of("cuda", 600) for _ in range(2)]
    wanted = [made(pack, weights).clone() for pack in packs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: list[tuple[int, torch.Tensor]] = []
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((index, made(packs[index], weights)))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted[index]) for index, result in results)


class _Fast(CutlassBf16Runner):
    """A second backend, which is free."""

    backend_key = "fast"

    def forward(self, inputs: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return inputs[0].clone()


class _FastConfig(CutlassBf16Config):
    pass


def test_winner_of_a_bucket(device, monkeypatch):
    """Check that the first backend is taken until tuning finds another, for each bucket and mode by itself."""
    monkeypatch.setitem(runners._BACKEND_RUNNERS, _FastConfig, _Fast)
    weights, *_ = bf16_weights(device)
    made = MoELayer(config(backend=BackendOptions((CutlassBf16Config(), _FastConfig()))), device)
    assert [runner.backend_key for runner in made.runners] == ["cutlass_bf16", "fast"]
    made(pack_of(device, 64), weights)
    assert made.winner_backend == "cutlass_bf16"  # the only one with weights
    weights.prepare_for("fast", weights.get_view("cutlass_bf16"))
    made(pack_of(device, 64), weights)
    assert made.winner_backend == "cutlass_bf16"
    with flashinfer.autotune():
        made(pack_of(device, 64), weights)
    assert made.winner_backend == "fast"
    made(pack_of(device, 63), weights)  # the same bucket
    assert made.winner_backend == "fast"
    made(pack_of(device, 5), weights)
    assert made.winner_backend == "cutlass_bf16"
    flashinfer.autotuner.AutoTuner.get().clear_cache()


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"backend": BackendOptions()}, "none of the configured backends .* no candidates"),
        ({"backend": BackendOptions((fused_moe.TrtllmBf16Config(),))}, "TrtllmBf16Config needs a Blackwell GPU"),
        ({"quant": QuantConfig(QuantVariant.NVFP4)}, "quant.variant must be BF16, got NVFP4"),
        ({"activation": ActivationConfig.relu2}, "activation.type must be Swiglu, got Relu2"),
        ({"finalize": MoEFinalizeConfig(do_finalize=False)}, "do_finalize must be True, got False"),
        ({"experts": ExpertConfig(INNER, 2, 2)}, "local_expert_offset must be 0, got 2"),
        ({"experts": ExpertConfig(INNER, 0, 2)}, "local_num_experts must be 4, got 2"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_refused_configurations(device, changes, text):
    with pytest.raises(
        RuntimeError, match=f"MoELayer: none of the configured backends .*{text}" if "none" not in text else text
    ):
        MoELayer(config(**changes), device)
    if "must be" in text:
        with pytest.raises(NotImplementedError):
            MoELayer(config(**changes), device)


def test_architectures(monkeypatch):
    """Check the decision for GPUs that are not here."""
    monkeypatch.setattr(layer, "get_compute_capability", lambda device: (8, 0))
    with pytest.raises(
        RuntimeError, match=r"none of the configured backends .* CutlassBf16Config does not run on SM80"
    ):
        MoELayer(config(), "cuda")
    assert CutlassBf16Config.supported(90) and not CutlassBf16Config.supported(80)
    assert CutlassW4A16Config().supported(90) and not CutlassW4A16Config().supported(100)
    assert not fused_moe.B12xNvfp4Config().supported(120)
    with pytest.warns(DeprecationWarning, match="CutlassConfig is deprecated"):
        old = CutlassConfig()
    assert not old.supported(90)
    assert BackendOptions((CutlassBf16Config(), old)).valid_for(90) == [CutlassBf16Config()]


def test_refused_calls(device):
    weights, *_ = bf16_weights(device)
    made = MoELayer(config(execution=ExecutionConfig(tune_max_num_tokens=8)), device)
    with pytest.raises(ValueError, match="num_tokens=9 exceeds tune_max_num_tokens=8"):
        made(pack_of(device, 9), weights)
    with pytest.raises(KeyError, match="cutlass_bf16"):
        made(pack_of(device), MoEWeightPack())
    with pytest.raises(ValueError, match="hidden_states_scale and per_token_scale must be None"):
        made(dataclasses.replace(pack_of(device), hidden_states_scale=torch.ones(1, device=device)), weights)
    with pytest.raises(TypeError, match=r"topk_weights must be torch\.float32, got torch\.float64"):
        pack = pack_of(device)
        made(dataclasses.replace(pack, topk_weights=pack.topk_weights.double()), weights)
    with pytest.raises(TypeError, match=r"hidden_states_q must be torch\.bfloat16"):
        made(MoEActivationPack(pack.hidden_states_q.half(), None, pack.topk_ids, pack.topk_weights), weights)
    kept, CutlassBf16Runner.supported_routing_modes = CutlassBf16Runner.supported_routing_modes, frozenset()
    try:
        made.reset_winner()
        with pytest.raises(
            NotImplementedError, match=r"support routing_input_mode .* must be one that cutlass_bf16 serve"
        ):
            made(pack, weights)
    finally:
        CutlassBf16Runner.supported_routing_modes = kept


def test_lifecycle(device):
    weights, *_ = bf16_weights(device)
    runner = CutlassBf16Runner(config(), device)
    with pytest.raises(RuntimeError, match=r"check_support\(\) must succeed before build\(\)\."):
        runner.build()
    runner.check_support()
    with pytest.raises(RuntimeError, match=r"build\(\) must be called before execution"):
        runner.pack_inputs(pack_of(device), weights)
    with pytest.raises(RuntimeError, match=r"build\(\) must be called before execution"):
        runner.forward([])
    runner.build()
    assert runner.forward(runner.pack_inputs(pack_of(device), weights)).shape == (5, HIDDEN)
    assert runner.get_cache_key_extras([])[:6] == ("cutlass_bf16", EXPERTS, TOP_K, INNER, "BF16", "BF16")
    with pytest.raises(NotImplementedError, match=r"quant\.variant must be W4A16, got BF16"):
        CutlassW4A16Runner(config(), device).check_support()


def test_lifecycle_of_any_runner():
    """Check the base: a runner with tactics and forward alone, built once, and one made without its constructor."""
    counts = {"check": 0, "build": 0}

    class Runner(runners.MoERunner):
        def _check_support(self):
            counts["check"] += 1
            if counts["check"] == 2:
                raise NotImplementedError

        def _build(self):
            counts["build"] += 1

        def get_valid_tactics(self, inputs, profile):
            return [7]

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            return inputs

    with pytest.raises(RuntimeError, match=r"build\(\) must be called before execution"):
        Runner.__new__(Runner).forward([])
    runner = Runner()
    runner.check_support()
    with pytest.raises(NotImplementedError):
        runner.check_support()
    with pytest.raises(RuntimeError, match="must succeed before build"):
        runner.build()
    runner.check_support()
    runner.build()
    runner.build()
    assert counts == {"check": 3, "build": 1}
    assert runner.forward([1]) == [1] and runner.get_valid_tactics([], None) == [7]


def test_prepared_weights_are_checked():
    w1, w2 = weights_of("cpu")
    with pytest.raises(
        TypeError, match=r"w1_bf16 must be torch\.bfloat16, as it expects BF16 weights, got torch\.float32"
    ):
        CutlassBf16Config.prepare_weights(w1.float(), w2, **SIZES)
    with pytest.raises(ValueError, match=r"w2_bf16 must be \(4, 128, 128\), got \(4, 64, 128\)"):
        CutlassBf16Config().prepare_weights(w1, w2[:, :64], **SIZES)
    with pytest.raises(ValueError, match="divisible by 128, got 128 and 64"):
        CutlassW4A16Config.prepare_weights(w1[:, :128], w2[:, :, :64], **{**SIZES, "intermediate_size": 64})


def test_mxfp4_codes():
    """Check midpoints, which go to the smaller magnitude, the exponent's ceiling, and a block of zeros."""
    w = torch.zeros(4, 32)
    w[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 6.0])
    w[1, 0], w[1, 1] = 6.01, 3.0  # exponent 1
    w[2, 0] = 2.0**-130
    codes, scale = _quantize_mxfp4_linear(w)
    assert scale.flatten().tolist() == [127, 128, 0, 0]
    low, high = codes[0, :4] & 15, codes[0, :4] >> 4
    assert low.tolist() == [0, 2 + 8, 4, 6] and high.tolist() == [1, 3, 5 + 8, 7]
    assert codes[1, 0].item() == 5 | (3 << 4)
    assert codes[3].eq(0).all()


def test_blackwell_runners_answer_and_refuse():
    for name in ("B12xNvfp4Runner", "CuteDslNvfp4Runner", "TrtllmFp4RoutedRunner", "TrtllmMxInt4RoutedRunner"):
        with pytest.raises(RuntimeError, match=f"{name}: needs a Blackwell GPU"):
            getattr(fused_moe, name)(config(), "cpu")
