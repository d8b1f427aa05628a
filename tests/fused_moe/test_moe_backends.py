# SPDX-License-Identifier: Apache-2.0
"""Backends of MoELayer one by one: values of each format, what each says it supports, tactics, memory, their choice."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import fused_moe
from flashinfer._compat.tllm_enums import ActivationType
from flashinfer.autotuner import AutoTuner, TuningConfig
from flashinfer.fused_moe import (
    ALL_BACKEND_CONFIGS,
    BackendOptions,
    CutlassBf16Config,
    CutlassBf16Runner,
    ExecutionConfig,
    MoEActivationPack,
    MoELayer,
    MoEWeightPack,
    QuantConfig,
    QuantFormat,
    QuantVariant,
    RoutingInputMode,
    SwiGLU,
    layer,
)
from flashinfer.testing import assert_close
from flashinfer.trace.templates.gemm_blocks import to_e4m3_blocks

from .layers import by_rows, close, folded
from .small_layer import EXPERTS, HIDDEN, SIZES, bf16_weights, config, pack_of, weights_of

F, V = QuantFormat, QuantVariant
E4M3 = torch.float8_e4m3fn
#: Backend, formats, and how far results may be from those of the weights before quantisation, in parts of their size.
QUANTISED = {
    "CutlassFp8PerTensor": (QuantConfig(V.FP8PerTensor), 0.08),
    "CuTileFp8PerTensor": (QuantConfig(F.FP8PerTensor, F.FP8PerTensor, F.FP16), 0.08),
    "CutlassFp8Block": (QuantConfig(V.DeepSeekFp8), 0.08),
    "CutlassW4A16": (QuantConfig(F.MXFP4, F.BF16), 0.3),
    "CutlassW4A8": (QuantConfig(F.INT4, F.FP8PerTensor), 0.3),
    "CutlassHumming": (QuantConfig(F.MXFP4, F.FP8PerTensor), 0.3),
}
GLOBAL = {"hidden_states_scale_global": 100.0, "intermediate_scale_global": 50.0}


def exact(pack: MoEActivationPack, w1: torch.Tensor, w2: torch.Tensor, **arguments: Any) -> torch.Tensor:
    call = {
        "input": pack.hidden_states_q,
        "token_selected_experts": pack.topk_ids,
        "token_final_scales": pack.topk_weights,
        "output_dtype": torch.float32,
    }
    return folded(call, w1.float(), w2.float(), **arguments)


@pytest.mark.parametrize("name", QUANTISED)
def test_formats(name):
    """Check each backend against weights that were not quantised: layers.py compares the op bit by bit."""
    kind, (quant, most) = getattr(fused_moe, f"{name}Config"), QUANTISED[name]
    torch.manual_seed(0)
    w1, w2 = weights_of("cpu")
    is_tensor = issubclass(kind, fused_moe.CutlassFp8PerTensorConfig)
    weights, pack = MoEWeightPack(), pack_of("cpu", 12)
    weights.prepare_for(kind.key, kind.prepare_weights(w1, w2, **SIZES, **(GLOBAL if is_tensor else {})))
    made = MoELayer(config(quant=quant, backend=BackendOptions((kind(),))), "cpu")
    given = pack
    if is_tensor:
        x = kind.prepare_activations(pack.hidden_states_q, hidden_states_scale_global=100.0)
        assert x.dtype == E4M3
        given = dataclasses.replace(pack, hidden_states_q=x)
    out, expected = made(given, weights), exact(pack, w1, w2)
    assert out.dtype == (torch.float16 if quant.output is F.FP16 else torch.bfloat16)
    assert (out.float() - expected).norm() < most * expected.norm()
    assert made.winner_backend == kind.key == type(made.runners[0]).backend_key


def test_values_of_formats_that_quantise_tokens():
    """Check the two formats in which rounding is a definition: blocks of 128, and rows."""
    torch.manual_seed(1)
    w1, w2 = weights_of("cpu")
    pack, weights = pack_of("cpu"), MoEWeightPack()
    block = fused_moe.CutlassFp8BlockConfig
    view = block.prepare_weights(w1, w2, **SIZES)
    for got, w in (
        (("fc1_expert_weights", "fc1_expert_scales"), w1),
        (("fc2_expert_weights", "fc2_expert_scales"), w2),
    ):
        codes, scale = to_e4m3_blocks(w[0].float(), 128)
        assert_close(view[got[1]][0], scale)
        assert (view[got[0]][0].float() - codes.float()).abs().max() <= 32  # a neighbour of the largest codes
    humming = fused_moe.CutlassHummingConfig
    weights.prepare_for(humming.key, humming.prepare_weights(w1, w2, **SIZES))
    quant = QuantConfig(F.MXFP4, F.FP8PerTensor)
    made = MoELayer(config(quant=quant, backend=BackendOptions((humming(),))), "cpu")
    plain = fused_moe.prepare._quantize_mxfp4_linear
    from .layers import decode_e2m1

    values = [
        decode_e2m1(plain(w)[0]) * torch.exp2(plain(w)[1].float() - 127).repeat_interleave(32, -1) for w in (w1, w2)
    ]
    x = by_rows(pack.hidden_states_q)
    expected = exact(pack, *values, x=x, round_hidden=lambda h, expert: by_rows(h)).bfloat16()
    close(made(pack, weights), expected)


def test_constants_of_the_activation():
    w1, w2 = weights_of("cpu")
    pack = pack_of("cpu")
    weights = MoEWeightPack({"cutlass_bf16": CutlassBf16Config.prepare_weights(w1, w2, **SIZES, activation=SwiGLU())})
    made = MoELayer(config(activation=SwiGLU(alpha=1.5, beta=0.5, limit=2.0)), "cpu")
    constants = {f"swiglu_{k}": torch.full((EXPERTS,), v) for k, v in {"alpha": 1.5, "beta": 0.5, "limit": 2.0}.items()}
    expected = exact(
        pack,
        w1,
        w2,
        activation_type=int(ActivationType.SwigluBias),
        round_hidden=lambda h, e: h.bfloat16().float(),
        **constants,
    )
    assert_close(made(pack, weights), expected.bfloat16())
    with pytest.raises(ValueError, match=r"w1_bf16 must be \(4, 128, 128\), got \(4, 256, 128\)"):
        CutlassBf16Config.prepare_weights(w1, w2, **SIZES, activation=fused_moe.ReLU2())


def test_what_each_backend_says():
    served = {kind.__name__ for kind in ALL_BACKEND_CONFIGS if kind.supported(90)}
    assert served == {f"{name}Config" for name in [*QUANTISED, "CutlassBf16", "CuTileBf16"]}
    assert {kind.__name__ for kind in ALL_BACKEND_CONFIGS if kind.supported(120)} == {
        *("CutlassBf16Config", "CutlassFp8PerTensorConfig", "CuTileBf16Config", "CuTileFp8PerTensorConfig")
    }
    assert not {kind.__name__ for kind in ALL_BACKEND_CONFIGS if kind.supported(80)}
    keys = [kind.key for kind in ALL_BACKEND_CONFIGS]
    assert len(set(keys)) == len(keys) and all(kind in layer._BACKEND_RUNNERS for kind in ALL_BACKEND_CONFIGS)
    assert all(layer._BACKEND_RUNNERS[kind].backend_key == kind.key for kind in ALL_BACKEND_CONFIGS)
    assert fused_moe.CutlassConfig not in layer._BACKEND_RUNNERS
    assert (fused_moe.api.MAX_SUPPORTED_TOP_EXPERTS, fused_moe.api.MAX_SUPPORTED_TOTAL_EXPERTS) == (32, 512)
    for kind in ALL_BACKEND_CONFIGS:
        made = kind()
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.key = "other"
    runner = CutlassBf16Runner
    assert V.BF16 in runner.supported_quant_variants and (F.BF16, F.BF16) in runner.supported_quant_variants
    assert runner.supports_quant(QuantConfig()) and not runner.supports_quant(QuantConfig(V.NVFP4))
    assert V.W4A16 in fused_moe.CutlassW4A16Runner.supported_quant_variants
    assert runner.supported_activation_classes == (SwiGLU,) and runner.supported_output_formats == {F.BF16}
    names = ("fused_shared_experts", "per_token_scale", "expert_parallelism", "nvfp4_4over6")
    assert not any(getattr(runner, f"supports_{name}") for name in names)
    with pytest.raises(NotImplementedError, match=r"quant\.output must be one of BF16, got FP16"):
        MoELayer(config(quant=QuantConfig(output=F.FP16)), "cpu")
    with pytest.raises(NotImplementedError, match=r"weight=INT4, activation=FP8PerTensor"):
        MoELayer(config(quant=QuantConfig(F.INT4, F.FP8PerTensor)), "cpu")


class _Inner:
    """Inner runner that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any, bool]] = []

    def forward(self, inputs, tactic=-1, do_preparation=False, *, gemm_idx, **kwargs):
        self.calls.append((gemm_idx, tactic, do_preparation))


def built(**changes: Any) -> CutlassBf16Runner:
    runner = CutlassBf16Runner(config(**changes), "cpu")
    assert runner._inner is None
    runner.check_support()
    runner.build()
    return runner


def test_tactics_are_pairs(monkeypatch):
    runner, (weights, *_) = built(), bf16_weights("cpu")
    inputs, asked = runner.pack_inputs(pack_of("cpu"), weights), []

    def rank(self, op, runners, tuning_config, inputs, k=1, **kwargs):
        asked.append((op, kwargs["gemm_idx"], k, isinstance(tuning_config, TuningConfig)))
        return {1: [7], 2: [8, 9]}[kwargs["gemm_idx"]]

    with monkeypatch.context() as patch:
        patch.setattr(AutoTuner, "rank_tactics", rank)
        assert runner.get_valid_tactics(inputs, None) == [(7, 8), (7, 9)]
    assert asked == [("moe_cutlass_bf16_sm0_gemm1", 1, 1, True), ("moe_cutlass_bf16_sm0_gemm2", 2, 1, True)]
    assert runner.get_cache_key_extras(inputs)[-2:] == (0, None)
    assert torch.equal(runner.forward(inputs, tactic=(-1, -1)), runner.forward(inputs))
    runner._inner = inner = _Inner()
    assert runner.forward(inputs, tactic=-1, do_preparation=True) is inputs[0]
    assert inner.calls == [(1, -1, True), (2, -1, True)]
    view = weights.get_view("cutlass_bf16")
    assert runner._pack_weight_inputs(view, HIDDEN) == [view["fc1_expert_weights"], view["fc2_expert_weights"]]
    with pytest.raises(ValueError, match="must have hidden_size = 64 rows"):
        runner._pack_weight_inputs(view, 64)


def test_number_of_tokens_is_limited():
    runner, (weights, *_) = built(execution=ExecutionConfig(tune_max_num_tokens=64)), bf16_weights("cpu")
    with pytest.raises(ValueError, match="num_tokens=65 exceeds tune_max_num_tokens=64"):
        runner.pack_inputs(pack_of("cpu", 65), weights)


def test_buffers_belong_to_one_thread():
    """Check that a call beside the owner's takes other memory."""
    runner, (weights, *_) = built(), bf16_weights("cpu")
    inputs = runner.pack_inputs(pack_of("cpu"), weights)
    assert runner._workspace_for(inputs[0]) is runner._workspace
    seen = []
    thread = threading.Thread(target=lambda: seen.append(runner._workspace_for(inputs[0])))
    thread.start()
    thread.join()
    assert seen == [None]


class _Second(CutlassBf16Runner):
    """A backend of which a test says when it serves."""

    backend_key = "second"
    weight_view_aliases = ("cutlass_bf16",)
    is_refused = is_accepting = True

    def _check_support(self) -> None:
        if self.is_refused:
            raise ValueError("second thoughts")

    def accepts(self, activations, weights) -> bool:
        return self.is_accepting and super().accepts(activations, weights)


class _SecondConfig(CutlassBf16Config):
    key = "second"


def test_backends_are_read_at_each_call(monkeypatch):
    monkeypatch.setattr(layer, "_BACKEND_RUNNERS", {**layer._BACKEND_RUNNERS, _SecondConfig: _Second})
    weights, *_ = bf16_weights("cpu")
    with pytest.raises(RuntimeError, match="Backends rejected this configuration: _Second: second thoughts"):
        MoELayer(config(backend=BackendOptions((_SecondConfig(),))), "cpu")
    made = MoELayer(config(backend=BackendOptions((CutlassBf16Config(), _SecondConfig()))), "cpu")
    assert [runner.backend_key for runner in made.runners] == ["cutlass_bf16"]
    monkeypatch.setattr(_Second, "is_refused", False)
    made.refresh_backends()
    assert [runner.backend_key for runner in made.runners] == ["cutlass_bf16", "second"]
    pack = pack_of("cpu")
    expected = made(pack, weights)
    assert torch.equal(made.runners[1].forward(made.runners[1].pack_inputs(pack, weights)), expected)
    first, second = made.runners
    assert made._select_winner(pack, weights, [second]) == (second, -1)
    assert made._select_winner(pack, weights, [first, second])[0] is first
    assert len(made._winners) == 2
    for index in range(200):
        made._winners[index] = (first, -1)
    made.reset_winner()
    for tokens in (1, 2, 4):
        made._select_winner(pack_of("cpu", tokens), weights, [first])
    assert len(made._winners) == 3
    monkeypatch.setattr(CutlassBf16Runner, "supported_routing_modes", frozenset({RoutingInputMode.FromLogits}))
    with pytest.raises(NotImplementedError, match="support routing_input_mode PackedPrecomputed"):
        made(pack, weights)


def test_tuning_of_one_backend():
    """Check that a single backend has its pair of tactics measured and kept."""
    weights, *_ = bf16_weights("cpu")
    made, pack = MoELayer(config(), "cpu"), pack_of("cpu", 16)
    expected = made(pack, weights)
    try:
        with flashinfer.autotune():
            assert torch.equal(made(pack, weights), expected)
        ((runner, tactic),) = made._winners.values()
        assert runner is made.runners[0] and tactic == (-1, -1)
        assert torch.equal(made(pack, weights), expected)
    finally:
        AutoTuner.get().clear_cache()
