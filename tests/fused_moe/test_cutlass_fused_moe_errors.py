# SPDX-License-Identifier: Apache-2.0
"""Calls that ``cutlass_fused_moe`` and its helpers refuse, and the texts that callers match."""

from __future__ import annotations

import pytest
import torch

from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size

from ..bad_arguments import check_refused, with_bad
from .layers import BF16, FP16, dense, fp8, fp8_block, mxfp4

INT32, FP32, U8 = torch.int32, torch.float32, torch.uint8

#: Argument, what it becomes, and the text of the error.
BAD = [
    ("input", ((5, 64), FP32), "input must be .*, got float32"),
    ("input", ((5, 56), BF16), "input.shape[1] must be 64.*, got 56"),
    ("input", ((1, 5, 64), BF16), "input must have .* dimensions, got 3"),
    ("token_selected_experts", ((5, 2), torch.int64), "token_selected_experts must be .*, got int64"),
    ("token_selected_experts", ((4, 2), INT32), "token_selected_experts.shape[0] must be 5.*, got 4"),
    ("token_selected_experts", ((10,), INT32), "token_selected_experts must have .* dimensions, got 1"),
    ("token_final_scales", ((5, 2), BF16), "token_final_scales must be .*, got bfloat16"),
    ("token_final_scales", ((5, 3), FP32), "token_final_scales must have shape .*, got (5, 3)"),
    ("fc1_expert_weights", ((3, 64, 64), FP16), "fc1_expert_weights must be .*, got float16"),
    ("fc1_expert_weights", ((64, 64), BF16), "fc1_expert_weights must have .* dimensions, got 2"),
    (
        "fc1_expert_weights",
        ((3, 48, 64), BF16),
        "must be 2 times the inner dimension of fc2_expert_weights = 32, got 48",
    ),
    ("fc1_expert_weights", ((3, 64, 56), BF16), "fc1_expert_weights.shape[2] must be 64"),
    ("fc2_expert_weights", ((2, 64, 32), BF16), "fc2_expert_weights.shape[0] must be 3.*, got 2"),
    ("fc2_expert_weights", lambda x: x.transpose(1, 2), "fc2_expert_weights"),
    ("output_dtype", FP16, "output must be bfloat16.*, got float16"),
    ("output_dtype", FP32, "output_dtype must be float16 or bfloat16"),
    ("quant_scales", [torch.ones(3)], "quant_scales must be empty for 16-bit weights, got 1 tensors"),
    ("fc1_expert_biases", ((3, 64), BF16), "fc1_expert_biases and fc2_expert_biases must be given together"),
    ("swiglu_alpha", ((2,), FP32), "swiglu_alpha must have 3 elements.*, got 2"),
    ("swiglu_beta", ((3,), BF16), "swiglu_beta must be .*, got bfloat16"),
    ("swiglu_limit", ((4,), FP32), "swiglu_limit must have 3 elements.*, got 4"),
    ("output", ((5, 32), BF16), "output must have shape (5, 64), got (5, 32)"),
    ("output", ((5, 64), FP16), "output must have dtype torch.bfloat16"),
    ("cluster_size", 2, "smart_router"),
    ("ep_rank", 1, "ep_rank must be from 0 to ep_size - 1 = 0, got 1"),
    ("tp_rank", -1, "tp_rank must be from 0 to tp_size - 1 = 0, got -1"),
    ("profile_ids", [1], "profile_ids must contain 2 numbers, got 1"),
    ("workspace_buffer", ((1 << 20,), FP32), "dtype must be int8 or uint8"),
    ("workspace_buffer", ((2, 1 << 20), U8), "workspace_buffer must be 1-D"),
    ("workspace_buffer", lambda _: torch.zeros(1 << 20, dtype=U8)[::2], "workspace_buffer must be contiguous"),
]


@pytest.mark.parametrize("name, bad, text", BAD, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD)])
def test_wrong_arguments(name, bad, text):
    good = {**dense(5, 64, 32, 3, 2, "cpu"), name: None} if name not in dense(1, 8, 8, 1, 1, "cpu") else None
    arguments = good or dense(5, 64, 32, 3, 2, "cpu")
    check_refused(cutlass_fused_moe, text, **with_bad(arguments, name, bad, "cpu"))


def test_sizes_that_are_no_multiples():
    check_refused(cutlass_fused_moe, "hidden size must be divisible by 8, got 60", **dense(2, 60, 32, 2, 1, "cpu"))
    check_refused(cutlass_fused_moe, "intermediate size must be divisible by 8", **dense(2, 64, 36, 2, 1, "cpu"))
    call = fp8(2, 64, 40, 2, 1, device="cpu", per_expert=False)
    check_refused(cutlass_fused_moe, "intermediate size must be divisible by 16, got 40", **call)


def test_alignment():
    call = dense(3, 64, 32, 2, 1, "cpu")
    weights = call["fc1_expert_weights"]
    moved = torch.empty(weights.numel() + 1, dtype=BF16)[1:].view(weights.shape).copy_(weights)
    check_refused(cutlass_fused_moe, "fc1_expert_weights must be 16B-aligned", **{**call, "fc1_expert_weights": moved})


@pytest.mark.parametrize("flag", ["min_latency_mode", "use_mxfp8_act_scaling"])
def test_modes_of_other_hardware(flag):
    with pytest.raises(NotImplementedError, match=flag):
        cutlass_fused_moe(**dense(2, 64, 32, 2, 1, "cpu"), **{flag: True})


def test_weights_of_other_hardware():
    """Check the text for NVFP4 experts, which engines pass as int64 views with six scales on any GPU."""
    call = dense(2, 64, 32, 2, 1, "cpu")
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        call[name] = torch.zeros(*call[name].shape[:2], call[name].shape[2] // 16, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"fc1_expert_weights must .* NVFP4, which needs Blackwell"):
        cutlass_fused_moe(**{**call, "quant_scales": [torch.ones(2)] * 6})


def test_fp8_output():
    with pytest.raises(NotImplementedError, match="FP8 output"):
        cutlass_fused_moe(**{**dense(2, 64, 32, 2, 1, "cpu"), "output_dtype": torch.float8_e4m3fn})


def test_unknown_activation():
    for wrong in (11, 42):
        with pytest.raises(ValueError, match="Unsupported activation_type"):
            cutlass_fused_moe(**dense(2, 64, 32, 2, 1, "cpu"), activation_type=wrong)


def test_wrong_scales():
    call = fp8_block(2, 128, 128, 2, 1, device="cpu")
    text = "quant_scales must have 2 tensors, got 1"
    check_refused(cutlass_fused_moe, text, **{**call, "quant_scales": call["quant_scales"][:1]})
    first, second = call["quant_scales"]
    text = "the scale of fc1_expert_weights.shape[1] must be 2.*, got 1"
    check_refused(cutlass_fused_moe, text, **{**call, "quant_scales": [first[:, :1].contiguous(), second]})
    packed, _ = mxfp4(2, 128, 128, 2, 1, device="cpu")
    check_refused(cutlass_fused_moe, "input must be .*, got float16", **{**packed, "input": packed["input"].half()})
    first, second = packed["quant_scales"]
    text = "the scale of fc2_expert_weights must have 1024 bytes, got 512"
    check_refused(cutlass_fused_moe, text, **{**packed, "quant_scales": [first, second[:1]]})


def test_scales_that_were_not_folded():
    """Scales as a checkpoint has them have as many bytes, in another order: the layer would multiply by wrong ones."""
    call, values = mxfp4(2, 128, 128, 2, 1, device="cpu")
    raw = [values["fc1_scale"], values["fc2_scale"]]
    text = "the scale of fc1_expert_weights must be folded by interleave_moe_scales_for_sm90_mixed_gemm to 5 dimensions"
    check_refused(cutlass_fused_moe, f"{text}.*, got (2, 256, 4)", **{**call, "quant_scales": raw})
    first, second = call["quant_scales"]
    text = "the scale of fc2_expert_weights must be .*, got (2, 1, 2, 16, 16)"
    check_refused(cutlass_fused_moe, text, **{**call, "quant_scales": [first, second.transpose(1, 2).contiguous()]})


SIZE = {"max_num_tokens": 4, "hidden_size": 64, "intermediate_size": 32, "num_experts_total": 6, "top_k": 2}
BAD_SIZES = [
    *((name, 0, f"{name} must be at least 1, got 0") for name in SIZE),
    ("tp_size", 0, "tp_size must be at least 1, got 0"),
    ("tp_rank", 1, "tp_rank must be"),
    ("ep_rank", 2, "ep_rank must be"),
    ("ep_size", 4, "num_experts_total must be divisible by ep_size = 4, got 6"),
    ("device", "meta", "device must be a CUDA device or the CPU, got meta"),
]


@pytest.mark.parametrize("name, bad, text", BAD_SIZES, ids=[name for name, *_ in BAD_SIZES])
def test_wrong_sizes_of_workspaces(name, bad, text):
    good = {**SIZE, "x_dtype": BF16, "weight_dtype": BF16, "device": "cpu"}
    check_refused(cutlass_fused_moe_workspace_size, text, **{**good, name: bad})


def test_workspace_is_that_of_one_rank():
    sizes = {**SIZE, "x_dtype": BF16, "weight_dtype": BF16, "device": "cpu"}
    whole = cutlass_fused_moe_workspace_size(**{**sizes, "num_experts_total": 600})
    assert cutlass_fused_moe_workspace_size(**{**sizes, "num_experts_total": 600}, ep_size=3) < whole
    with pytest.raises(NotImplementedError, match="min_latency_mode"):
        cutlass_fused_moe_workspace_size(**sizes, min_latency_mode=True)
