# SPDX-License-Identifier: Apache-2.0
"""The shortcut of ``cutlass_fused_moe``: CPU tensors stand for those of a Hopper, and native code is replaced."""

from __future__ import annotations

import pytest
import torch

from flashinfer import utils
from flashinfer._runtime.arch import capability_of, get_compute_capability
from flashinfer.autotuner import AutoTuner
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.cutlass import call as cutlass_op
from flashinfer.tllm_enums import ActivationType

from ..hopper.devices import needs_hopper

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOKENS, EXPERTS, HIDDEN, INNER = 4, 2, 256, 128
NAMES = ("output", "input", "experts", "token_scales", "fc1", "fc2", "bias1", "bias2", "scale1", "scale2", "factor1")
NAMES += ("factor2", "quant1", "quant2", "alpha", "beta", "limit", "situ_beta", "situ_linear_beta", "workspace")
NAMES += ("product", "format", "activation", "first_expert", "adds_bias2", "is_sm90", "pdl", "ranks")


def layer(format: str, device: str = "cpu") -> dict:
    """Return the arguments of a layer: bf16, fp16, fp8 (a scale per tensor), fp8_block (a scale per block), mxfp4."""
    dtype = FP16 if format == "fp16" else BF16
    weights = (torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 16, torch.randn(EXPERTS, HIDDEN, INNER) / 16)
    fc1, fc2 = (w.to(dtype if format in ("bf16", "fp16") else E4M3).to(device) for w in weights)
    if format == "mxfp4":
        fc1, fc2 = (
            torch.randint(0, 256, (*w.shape[:2], w.shape[2] // 2), dtype=torch.uint8, device=device) for w in weights
        )
    exponents = [torch.full((EXPERTS, *shape, 16, 16), 120, dtype=torch.uint8) for shape in ((4, 2), (4, 1))]
    scales = {
        "mxfp4": exponents,
        "bf16": [],
        "fp16": [],
        "fp8": [torch.ones(EXPERTS), torch.ones(()), torch.ones(EXPERTS), torch.ones(())],
        "fp8_block": [torch.ones(EXPERTS, 2, 2), torch.ones(EXPERTS, 2, 1)],
    }[format]
    return {
        "input": torch.randn(TOKENS, HIDDEN).to(E4M3 if format == "fp8" else dtype).to(device),
        "token_selected_experts": torch.tensor([[0, 1], [1, 0], [1, 1], [0, 2]], dtype=torch.int32, device=device),
        "token_final_scales": torch.rand(TOKENS, 2).to(device),
        "fc1_expert_weights": fc1,
        "fc2_expert_weights": fc2,
        "output_dtype": dtype,
        "quant_scales": [scale.to(device) for scale in scales],
        "use_deepseek_fp8_block_scale": format == "fp8_block",
        "use_w4_group_scaling": format == "mxfp4",
    }


@pytest.fixture
def native(monkeypatch):
    """Pretend that CPU tensors are on a Hopper; return the list of calls of native code, arguments by name."""
    calls = []
    monkeypatch.setattr(AutoTuner, "was_used", False)  # tests that ran before may have tuned
    monkeypatch.setitem(capability_of, -1, 90)
    monkeypatch.setitem(
        cutlass_op.native_fused_moe, True, lambda *args: calls.append(dict(zip(NAMES, args, strict=True)))
    )
    for kind in ("bf16", "fp16", "fp8", "fp8_block"):
        monkeypatch.setitem(cutlass_op.sm90_product, kind, f"product of {kind}")
    monkeypatch.setitem(cutlass_op.w4_product, "mxfp4", "product of mxfp4")
    return calls


@pytest.mark.parametrize("number, format", [(0, "bf16"), (0, "fp16"), (1, "fp8"), (2, "fp8_block"), (3, "mxfp4")])
@pytest.mark.parametrize("is_given", [False, True])
def test_ordinary_calls_go_straight(native, number, format, is_given):
    call = layer(format)
    given = torch.empty(TOKENS, HIDDEN, dtype=call["output_dtype"]) if is_given else None
    result, *others = cutlass_fused_moe(**call, output=given, ep_size=2, ep_rank=1, tp_size=2, tp_rank=1)
    assert result is given or not is_given
    assert result.shape == (TOKENS, HIDDEN) and result.dtype is call["output_dtype"] and result.is_contiguous()
    assert [tuple(x.shape) for x in others] == [(1,), (EXPERTS, TOKENS), (EXPERTS,)]
    (passed,) = native
    assert passed["output"] is result and passed["input"] is call["input"]
    assert passed["fc1"] is call["fc1_expert_weights"] and passed["fc2"] is call["fc2_expert_weights"]
    assert passed["product"] == f"product of {format}" and passed["format"] == number
    assert passed["first_expert"] == EXPERTS and passed["adds_bias2"] is False and passed["is_sm90"] is True
    assert passed["ranks"] == 2
    assert passed["activation"] == int(ActivationType.Swiglu)
    scales = {"bf16": (), "fp16": (), "fp8": ("factor1", "quant2", "factor2")}.get(format, ("scale1", "scale2"))
    assert all(passed[name] is scale for name, scale in zip(scales, call["quant_scales"], strict=False))
    optional = {"scale1", "scale2", "factor1", "factor2", "quant1", "quant2"}
    assert all(passed[name] is None for name in optional - set(scales))


@pytest.mark.parametrize("is_ordinary", [True, False])
@pytest.mark.parametrize("ep_size, alltoall, ranks", [(1, False, 1), (8, False, 8), (8, True, 2), (1, True, 1)])
def test_ranks_that_share_the_experts(native, monkeypatch, is_ordinary, ep_size, alltoall, ranks):
    """Tiles are chosen for one pair in so many; of the two experts of a token that was sent, one is of this rank."""
    call = layer("bf16") | {"ep_size": ep_size, "enable_alltoall": alltoall}
    if not is_ordinary:
        call["activation_type"] = int(ActivationType.Swiglu)
        of_cpu = cutlass_op.native_fused_moe[False]
        monkeypatch.setitem(
            cutlass_op.native_fused_moe,
            False,
            lambda *args: (native.append(dict(zip(NAMES, args, strict=True))), of_cpu(*args)),
        )
    cutlass_fused_moe(**call)
    assert [passed["ranks"] for passed in native] == [ranks]


def test_constants_of_swiglu_select_another_activation(native):
    limit = torch.ones(EXPERTS)
    cutlass_fused_moe(**layer("bf16"), swiglu_limit=limit, enable_pdl=False)
    assert native[0]["limit"] is limit and native[0]["activation"] == int(ActivationType.SwigluBias)
    assert native[0]["pdl"] is False


@pytest.mark.parametrize(
    "change",
    [
        {"activation_type": int(ActivationType.Swiglu)},
        {"profile_ids": [0, 1]},
        {"input": torch.zeros(HIDDEN, TOKENS, dtype=BF16).T},
    ],
)
def test_other_calls_are_checked(native, change):
    """Check calls that are right but not ordinary: they run on the CPU."""
    call = layer("bf16") | change
    assert cutlass_fused_moe(**call)[0].isfinite().all()
    assert not native


@pytest.mark.parametrize(
    "change",
    [
        {"min_latency_mode": True},
        {"cluster_size": 2},
        {"tp_rank": 1},
        {"ep_rank": -1},
        {"output_dtype": E4M3},
        {"quant_scales": [torch.ones(1)]},
        {"output": torch.empty(TOKENS, HIDDEN, dtype=FP16)},
        {"input": torch.zeros(TOKENS, HIDDEN)},
        {"profile_ids": [0]},
        {"input_sf": torch.ones(1)},
        {"activation_type": ActivationType.InvalidType},
    ],
)
def test_what_the_checks_refuse_is_refused(native, change):
    with pytest.raises((ValueError, NotImplementedError), match=r"cutlass_fused_moe|activation"):
        cutlass_fused_moe(**{**layer("bf16"), **change})
    assert not native


@needs_hopper
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8", "fp8_block", "mxfp4"])
def test_same_bits_as_checked_calls(monkeypatch, format):
    call = layer(format, "cuda")
    result = cutlass_fused_moe(**call)[0]
    monkeypatch.setattr(utils, "get_compute_capability", lambda device: get_compute_capability(device))
    assert result.equal(cutlass_fused_moe(**call)[0])
