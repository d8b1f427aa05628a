# SPDX-License-Identifier: Apache-2.0
"""Kept launches of ``cutlass_fused_moe``: later calls of the same facts take no checks and pass on the same."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from flashinfer import utils
from flashinfer._runtime import kept
from flashinfer._runtime.arch import get_compute_capability
from flashinfer.autotuner import AutoTuner
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.cutlass import api
from flashinfer.fused_moe.cutlass import call as cutlass_op
from flashinfer.fused_moe.cutlass.formats import Format
from flashinfer.tllm_enums import ActivationType

from ..entered_files import entered_files
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
def calls(monkeypatch):
    """Return the calls of native code, arguments by name, and of the op, which the checks lead to."""
    found = SimpleNamespace(native=[], checked=[])
    real = api.fused_moe

    def op(*args):
        found.checked.append(args)
        real(*args)

    monkeypatch.setattr(AutoTuner, "was_used", False)  # tests that ran before may have tuned
    monkeypatch.setattr(api, "fused_moe", op)
    monkeypatch.setitem(
        cutlass_op.native_fused_moe, False, lambda *args: found.native.append(dict(zip(NAMES, args, strict=True)))
    )
    cutlass_op.layer_launches.clear()
    yield found
    cutlass_op.layer_launches.clear()


def same(one: dict, other: dict) -> None:
    """Check that two calls of native code have the same arguments, but for the output."""
    for name in set(NAMES) - {"output"}:
        is_tensor = isinstance(one[name], torch.Tensor)
        assert one[name] is other[name] if is_tensor else one[name] == other[name], name


@pytest.mark.parametrize("number, format", [(0, "bf16"), (1, "fp8"), (2, "fp8_block"), (3, "mxfp4")])
@pytest.mark.parametrize("is_given", [False, True])
def test_later_calls_go_straight(calls, number, format, is_given):
    call = layer(format) | {"ep_size": 2, "ep_rank": 1, "tp_size": 2, "tp_rank": 1}
    cutlass_fused_moe(**call)
    given = torch.empty(TOKENS, HIDDEN, dtype=call["output_dtype"]) if is_given else None
    result, *others = cutlass_fused_moe(**call, output=given)
    assert len(calls.checked) == 1 and len(calls.native) == 2
    first, passed = calls.native
    same(first, passed)
    assert passed["output"] is result and (result is given or not is_given)
    assert result.shape == (TOKENS, HIDDEN) and result.dtype is call["output_dtype"] and result.is_contiguous()
    assert [tuple(x.shape) for x in others] == [(1,), (EXPERTS, TOKENS), (EXPERTS,)]
    assert passed["format"] == number and passed["activation"] == int(ActivationType.Swiglu)
    assert passed["first_expert"] == EXPERTS and passed["adds_bias2"] is False and passed["ranks"] == 2
    scales = {"bf16": (), "fp8": ("factor1", "quant2", "factor2")}.get(format, ("scale1", "scale2"))
    assert all(passed[name] is scale for name, scale in zip(scales, call["quant_scales"], strict=False))
    optional = {"scale1", "scale2", "factor1", "factor2", "quant1", "quant2"}
    assert all(passed[name] is None for name in optional - set(scales))


def test_later_calls_enter_one_file(calls):
    """Then follow csrc/fused_moe.cu, fused_moe_arguments.h, and fused_moe_mono.h or fused_moe_product.h."""
    call = layer("fp8_block")
    for _ in range(2):
        cutlass_fused_moe(**call)
    path, out = ["_runtime/codegen_wrapper.py", "fused_moe/cutlass/call.py"], torch.empty(TOKENS, HIDDEN, dtype=BF16)
    assert entered_files(lambda: cutlass_fused_moe(**call)) == [*path, "_runtime/allocation.py"]
    assert entered_files(lambda: cutlass_fused_moe(**call, output=out)) == path


def test_any_number_of_tokens_has_one_launch(calls):
    call = layer("bf16")
    tokens = ("input", "token_selected_experts", "token_final_scales")
    for count in (4, 0, 1, 3):
        result = cutlass_fused_moe(**call | {name: call[name][:count] for name in tokens})
        assert [tuple(x.shape) for x in result] == [(count, HIDDEN), (1,), (EXPERTS, count), (EXPERTS,)]
    assert len(calls.checked) == 1 and len(calls.native) == 4


LIMIT = torch.ones(EXPERTS)
OTHER_FACTS = [
    {"activation_type": ActivationType.Geglu},
    {"activation_type": int(ActivationType.SwigluBias)},
    {"swiglu_limit": LIMIT},
    {"enable_pdl": False},
    {"tp_size": 2, "tp_rank": 1},
    {"ep_size": 8, "ep_rank": 1},
    {"ep_size": 8, "ep_rank": 1, "enable_alltoall": True},
    {"enable_alltoall": True},
    {"tune_max_num_tokens": 64},
    {"fc1_expert_weights": torch.zeros(EXPERTS + 1, 2 * INNER, HIDDEN, dtype=BF16), "ep_size": 2, "ep_rank": 1},
]
SAME_FACTS = [
    {"input": torch.zeros(HIDDEN, TOKENS, dtype=BF16).T},
    {"token_final_scales": None},
    {"quant_scales": None},
    {"situ_beta": LIMIT},
    {"workspace_buffer": torch.empty(1 << 20, dtype=torch.uint8)},
]


@pytest.mark.parametrize("change", [*OTHER_FACTS, *SAME_FACTS])
def test_other_facts_are_another_choice(calls, change):
    """Check that a launch for other arguments is never taken, and what it passes on is what the checks would."""
    call = layer("bf16")
    cutlass_fused_moe(**call)
    for _ in range(2):
        cutlass_fused_moe(**call | change)
    cutlass_op.layer_launches.clear()
    cutlass_fused_moe(**call | change)
    is_other = any(change is other for other in OTHER_FACTS)
    assert len(calls.checked) == 2 + is_other and len(calls.native) == 4
    for passed in calls.native[1:3]:
        copy = {"input": passed["input"]} if "input" in change else {}  # a contiguous one
        assert passed["input"].is_contiguous()
        same(passed, calls.native[3] | copy)


@pytest.mark.parametrize("ep_size, alltoall, ranks", [(1, False, 1), (8, False, 8), (8, True, 2), (1, True, 1)])
def test_ranks_that_share_the_experts(calls, ep_size, alltoall, ranks):
    """Tiles are chosen for one pair in so many; of the two experts of a token that was sent, one is of this rank."""
    cutlass_fused_moe(**layer("bf16"), ep_size=ep_size, enable_alltoall=alltoall)
    assert [passed["ranks"] for passed in calls.native] == [ranks]


def test_constants_of_swiglu_select_another_activation(calls):
    cutlass_fused_moe(**layer("bf16"), swiglu_limit=LIMIT, enable_pdl=False)
    assert calls.native[0]["limit"] is LIMIT and calls.native[0]["activation"] == int(ActivationType.SwigluBias)
    assert calls.native[0]["pdl"] is False


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
def test_what_the_checks_refuse_is_refused_after_calls_that_they_take(calls, monkeypatch, change):
    monkeypatch.undo()  # native code compares shapes and dtypes
    call = layer("bf16")
    cutlass_fused_moe(**call)
    cutlass_fused_moe(**call, profile_ids=[0, 1])
    with pytest.raises((ValueError, NotImplementedError), match=r"cutlass_fused_moe|activation"):
        cutlass_fused_moe(**{**call, **change})


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "fp8_block", "mxfp4"])
def test_kinds_of_sm90_products(monkeypatch, kind):
    monkeypatch.setitem(cutlass_op._is_sm90, -1, True)
    formats = {"fp8": Format.FP8_TENSOR, "fp8_block": Format.FP8_BLOCK, "mxfp4": Format.MXFP4}
    assert cutlass_op.sm90_kind(-1, FP16 if kind == "fp16" else BF16, formats.get(kind, Format.PLAIN)) == kind
    monkeypatch.setitem(cutlass_op._is_sm90, -1, False)
    assert cutlass_op.sm90_kind(-1, BF16, Format.PLAIN) is None


def test_a_replaced_probe_is_asked(calls, monkeypatch):
    call = layer("bf16")
    cutlass_fused_moe(**call)
    monkeypatch.setattr(utils, "device_support_pdl", lambda device: False)
    for _ in range(2):
        cutlass_fused_moe(**call)
    assert len(calls.checked) == 3 and [passed["pdl"] for passed in calls.native] == [True, False, False]


def test_the_log_tells_the_choice(calls, monkeypatch, caplog):
    monkeypatch.setattr(kept, "knobs", SimpleNamespace(log_level=3))
    monkeypatch.setattr(logging.getLogger("flashinfer.api"), "propagate", True)
    with caplog.at_level(logging.INFO, "flashinfer.api"):
        for _ in range(3):
            cutlass_fused_moe(**layer("fp8_block"), ep_size=2, ep_rank=1)
    (line,) = set(caplog.messages)
    assert line.startswith("cutlass_fused_moe (") and line.endswith(
        "-> launch_layer (fp8_block, Swiglu, general products, experts from 2 of 2 ranks)"
    )


@needs_hopper
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8", "fp8_block", "mxfp4"])
def test_same_bits_as_checked_calls(monkeypatch, format):
    call = layer(format, "cuda")
    result = [cutlass_fused_moe(**call)[0] for _ in range(2)]
    monkeypatch.setattr(utils, "get_compute_capability", lambda device: get_compute_capability(device))
    expected = cutlass_fused_moe(**call)[0]
    assert all(x.equal(expected) for x in result)
