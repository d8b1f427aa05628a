# SPDX-License-Identifier: Apache-2.0
"""Formats per operand and typed activations, and the form of releases up to 0.6.18 beside them."""

from __future__ import annotations

import pytest

from flashinfer import fused_moe
from flashinfer._compat.tllm_enums import ActivationType
from flashinfer.fused_moe import ActivationConfig, QuantConfig, QuantFormat, QuantVariant, SiTU, SwiGLU, SwiGLUStep

F, V = QuantFormat, QuantVariant


def test_formats():
    names = ["BF16", "FP16", "FP8PerTensor", "DeepSeekFp8", "MXFP8", "NVFP4", "MXFP4", "MXINT4", "INT4"]
    assert [(f.name, f.value) for f in QuantFormat] == [(name, i) for i, name in enumerate(names)]
    assert repr(F.BF16) == "QuantFormat.BF16"


def test_pairs():
    assert QuantConfig().pair == (F.BF16, F.BF16) and QuantConfig().output is F.BF16
    quant = QuantConfig(F.MXFP4, F.BF16, swizzled_scale_factors=True)
    assert quant.pair == (F.MXFP4, F.BF16) and quant.variant is V.W4A16 and quant.swizzled_scale_factors
    assert quant == QuantConfig(weight=F.MXFP4, swizzled_scale_factors=True) and hash(quant) is not None
    assert eval(repr(quant)) == quant
    assert QuantConfig(F.INT4, F.FP8PerTensor).variant is None
    with pytest.raises(TypeError, match="weight must be a QuantFormat"):
        QuantConfig("bf16")
    with pytest.raises(ValueError, match="nvfp4_4over6 applies only to"):
        QuantConfig(F.NVFP4, F.BF16, nvfp4_4over6=None)
    assert QuantConfig(F.NVFP4, F.NVFP4, nvfp4_4over6=None).nvfp4_4over6 is None


@pytest.mark.parametrize("variant", V)
def test_the_older_form(variant):
    pairs = {V.MxInt4: (F.MXINT4, F.BF16), V.W4A16: (F.MXFP4, F.BF16), V.MxFp8: (F.MXFP8, F.MXFP8)}
    for quant in (QuantConfig(variant), QuantConfig(variant=variant)):
        assert quant.variant is variant
        assert quant.pair == (pairs[variant] if variant in pairs else (F[variant.name], F[variant.name]))
    old = QuantConfig(variant, True, False)
    assert (old.swizzled_scale_factors, old.per_token_scale) == (True, False)


def test_activations():
    with pytest.raises(TypeError, match="construct a typed activation"):
        ActivationConfig()
    kinds = {
        name: getattr(fused_moe, name) for name in ("GeGLU", "GeGLUTanh", "ReLU2", "Identity", "GELU", "ReLU", "SiLU")
    }
    gated = {name for name, kind in kinds.items() if kind().is_gated}
    assert gated == {"GeGLU", "GeGLUTanh"} and SwiGLU().is_gated
    for kind in (SwiGLU, SiTU, SwiGLUStep, *kinds.values()):
        made = kind()
        assert made == ActivationConfig(kind.type) == ActivationConfig(type=kind.type)
        assert isinstance(made, ActivationConfig) and type(ActivationConfig(kind.type)) is kind
    assert SwiGLU().limit == pytest.approx(3.4028234e38) and SwiGLUStep().limit == 7.0
    assert ActivationConfig.relu2.type is ActivationType.Relu2 and SiTU(linear_scale=None).linear_scale is None
    for bad, text in (
        (lambda: SwiGLU(alpha=float("nan")), "alpha must be a finite scalar"),
        (lambda: SwiGLU(limit="7"), "limit must be a finite scalar"),
        (lambda: SwiGLU(limit=0.0), "limit must be positive"),
        (lambda: SiTU(gate_scale=-1.0), "gate_scale must be positive"),
    ):
        with pytest.raises(ValueError, match=text):
            bad()
