# SPDX-License-Identifier: Apache-2.0
"""Enumerations for MoE and GEMM callers: numbers, texts, and properties of activations and dtypes."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import tllm_enums
from flashinfer.tllm_enums import ActivationType, DtypeTrtllmGen, RoutingMethodType

MEMBERS = {
    "RoutingMethodType": "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid "
    "TopKSigmoid Unspecified",
    "RoutingInputMode": "FromLogits PackedPrecomputed UnpackedPrecomputed",
    "ActivationType": "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity Situ InvalidType",
    "SfLayout": "layout_128x4 layout_8x4 layout_linear",
    "WeightLayout": "MajorK MajorMn BlockMajorK",
    "GatedActType": "SwiGlu GeGlu",
    "Fp8QuantizationType": "NoneFp8 DeepSeekFp8 MxFp8",
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_are_numbered_from_zero(name):
    enumeration = getattr(tllm_enums, name)
    assert {member.name: int(member) for member in enumeration} == {m: i for i, m in enumerate(MEMBERS[name].split())}


def test_some_names_are_at_top_level():
    for name in ("ActivationType", "RoutingMethodType", "is_gated_activation", "SfLayout"):
        assert getattr(flashinfer, name) is getattr(tllm_enums, name)


@pytest.mark.parametrize("member", [*ActivationType, *RoutingMethodType], ids=repr)
def test_repr_is_an_expression(member):
    assert eval(repr(member)) is member


def test_gated_activations():
    gated = {member.name for member in ActivationType if member.is_gated}
    assert gated == {"Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ"}
    assert all(flashinfer.is_gated_activation(int(member)) == member.is_gated for member in ActivationType)


def test_normalised_activations():
    assert tllm_enums.normalize_activation_type(10) is ActivationType.Situ
    assert tllm_enums.normalize_activation_type(ActivationType.Gelu) is ActivationType.Gelu
    with pytest.raises(ValueError, match=r"Unsupported activation_type: .* got 12"):
        tllm_enums.normalize_activation_type(12)


def test_defaults():
    assert (tllm_enums.DEFAULT_SWIGLU_ALPHA, tllm_enums.DEFAULT_SWIGLU_BETA) == (1.0, 0.0)
    assert torch.finfo(torch.float32).max == tllm_enums.DEFAULT_SWIGLU_LIMIT
    assert (tllm_enums.DEFAULT_SITU_BETA, tllm_enums.DEFAULT_SITU_LINEAR_BETA) == (4.0, 25.0)


def test_dtypes_hold_their_properties():
    assert [member.value & 255 for member in DtypeTrtllmGen] == list(range(22))
    assert DtypeTrtllmGen.Bfloat16 == 0x101000 and DtypeTrtllmGen.MxInt4 == 0x111040E
    assert DtypeTrtllmGen.UInt128 == 0x18014 and DtypeTrtllmGen.Void == 0x100015
    with_scale = {member.name for member in DtypeTrtllmGen if tllm_enums.trtllm_gen_dtype_has_scale(member)}
    assert with_scale == {"E2m1", "MxE2m1", "MxE4m3", "MxInt4"}


def test_dtype_of_a_tensor():
    deduce, codes = tllm_enums.deduce_trtllm_gen_tensor_dtype, torch.zeros(4, 32, dtype=torch.uint8)
    assert deduce(torch.zeros(1, dtype=torch.bfloat16), None) is DtypeTrtllmGen.Bfloat16
    assert deduce(torch.zeros(1).to(torch.float8_e4m3fn), None) is DtypeTrtllmGen.E4m3
    assert deduce(torch.zeros(1).to(torch.float8_e4m3fn), torch.ones(1)) is DtypeTrtllmGen.MxE4m3
    assert deduce(codes, torch.ones(4, 4)) is DtypeTrtllmGen.E2m1
    assert deduce(codes, torch.ones(4, 2)) is DtypeTrtllmGen.MxE2m1
    for x, text in ((codes, "scale must be a tensor"), (torch.zeros(1), "x must be bfloat16.*got torch.float32")):
        with pytest.raises(ValueError, match=text):
            deduce(x, None)
