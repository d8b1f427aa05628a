# SPDX-License-Identifier: Apache-2.0
"""Configuration of mixture-of-experts layers: defaults, checks, and texts that can be evaluated."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from flashinfer import fused_moe
from flashinfer.fused_moe import api
from flashinfer.fused_moe.api import (
    ActivationConfig,
    BackendOptions,
    ExpertConfig,
    MoEActivationPack,
    MoEConfig,
    MoEWeightPack,
    QuantConfig,
    QuantVariant,
    RoutingConfig,
    RoutingInputMode,
)
from flashinfer.tllm_enums import ActivationType, RoutingMethodType

DEEPSEEK = RoutingConfig(256, 8, RoutingMethodType.DeepSeekV3, 8, 4, 2.5)


def config(routing=DEEPSEEK, **experts) -> MoEConfig:
    return MoEConfig(routing, QuantConfig(QuantVariant.DeepSeekFp8), ExpertConfig(2048, **experts))


def test_a_text_can_be_evaluated():
    made = config()
    scope = {**vars(api), "RoutingMethodType": RoutingMethodType}
    assert eval(repr(made), scope) == made


def test_fields_by_name():
    made = config()
    assert MoEConfig(**made) == made and made["routing"] is DEEPSEEK
    with pytest.raises(KeyError):
        made["keys"]
    with pytest.raises(FrozenInstanceError):
        made.routing = None  # type: ignore[misc]


def test_activations():
    assert config().activation == ActivationConfig.swiglu and ActivationConfig.geglu.is_gated
    assert ActivationConfig.relu2.type == ActivationType.Relu2 and not ActivationConfig.relu2.is_gated


def test_configurations_of_all_backends():
    """Published code imports them from here."""
    for name in ("CutlassBf16Config", "CutlassW4A16Config", "CuteDslConfig", "TrtllmBf16Config", "TrtllmFp4Config"):
        assert getattr(api, name) is getattr(fused_moe, name)
    for name in ("TrtllmFp8BlockConfig", "TrtllmFp8PerTensorConfig", "TrtllmMxInt4Config", "B12xNvfp4Config"):
        assert not BackendOptions((getattr(api, name)(),)).valid_for(90)


def test_backends():
    old, new = (SimpleNamespace(supported=archs.__contains__) for archs in ([80, 90], [90, 100]))
    options = BackendOptions((old, new))
    assert options.valid_for(90) == [old, new] and options.valid_for(100) == [new]
    assert len(options) == 2 and list(options) == [old, new]


@pytest.mark.parametrize(
    "routing, experts, text",
    [
        (RoutingConfig(8, 2), {}, "without DeepSeekV3 routing, got 1 with Default"),
        (DEEPSEEK, {"local_num_experts": 32}, "expert parallelism, got 1 with 32 of 256"),
        (DEEPSEEK, {"local_expert_offset": 32}, "expert parallelism"),
    ],
)
def test_shared_experts(routing, experts, text):
    with pytest.raises(ValueError, match=text):
        config(routing, num_fused_shared_experts=1, **experts)
    assert config(num_fused_shared_experts=1, local_num_experts=256).experts.num_fused_shared_experts == 1


def test_tokens():
    hidden, ids = torch.zeros(5, 16), torch.zeros(5, 2, dtype=torch.int32)
    logits = torch.zeros(5, 8)
    assert MoEActivationPack(hidden, None, ids).num_tokens == 5
    from_logits = {"routing_input_mode": RoutingInputMode.FromLogits}
    assert MoEActivationPack(hidden, None, routing_logits=logits, **from_logits).topk_ids is None
    wrong = [
        (ValueError, "topk_ids must be a tensor with PackedPrecomputed", (None,), {}),
        (ValueError, "routing_logits must be a tensor with FromLogits", (ids,), from_logits),
        (ValueError, "routing_logits must be None", (ids,), {"routing_logits": logits}),
        (ValueError, "topk_weights must", (ids,), {"routing_input_mode": RoutingInputMode.UnpackedPrecomputed}),
        (TypeError, r"topk_ids must be torch\.int32, got torch\.int64", (ids.long(),), {}),
        (ValueError, "topk_ids must be on cpu, got meta", (ids.to("meta"),), {}),
    ]
    for error, text, args, options in wrong:
        with pytest.raises(error, match=text):
            MoEActivationPack(hidden, None, *args, **options)


def test_weights():
    pack = MoEWeightPack()
    pack.prepare_for("cutlass_bf16", {"fc1": 1})
    assert pack.get_view("cutlass_bf16") == {"fc1": 1} and MoEWeightPack().native_views == {}
    with pytest.raises(KeyError, match="got 'other'"):
        pack.get_view("other")
