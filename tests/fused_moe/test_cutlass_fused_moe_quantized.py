# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with 8-bit and 4-bit weights."""

from __future__ import annotations

import functools

import pytest
import torch

from flashinfer.fused_moe import (
    ActivationType,
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace
from flashinfer.trace.templates.shared import to_fp8

from ..attention.launches import kernels
from ..hopper.devices import needs_hopper
from .layers import (
    E4M3,
    FP16,
    by_rows,
    close,
    decode_e2m1,
    dense,
    folded,
    fp8,
    fp8_block,
    int4_fp8,
    mxfp4,
    mxfp4_fp8,
)

SM90_OR_CPU = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="other GPUs refuse the format"
)


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, FP16])
@pytest.mark.parametrize("per_expert", [False, True])
def test_fp8(device, output_dtype, per_expert):
    call = {**fp8(21, 128, 80, 4, 2, device=device, per_expert=per_expert), "output_dtype": output_dtype}
    dequant1, quant2, dequant2, _ = call["quant_scales"]
    scales = {"fc1_dequant": dequant1, "fc2_quant": quant2, "fc2_dequant": dequant2}
    close(cutlass_fused_moe(**call)[0], cutlass_fused_moe_trace(**call).reference(**call, **scales))


@SM90_OR_CPU
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 128, 128, 3, 2),
        (40, 256, 208, 4, 2),
        (40, 256, 384, 4, 2),
        (64, 256, 256, 32, 2),
        (200, 256, 384, 3, 2),
        (650, 256, 256, 3, 2),
        (650, 208, 256, 3, 2),
    ],
    ids=["one", "tails", "few", "fewest", "many", "gathered", "copied"],
)
def test_fp8_block(device, sizes):
    """``few``, ``fewest``, ``many``: at most 32, or at least 128 pairs per expert, whose GEMM 1 quantises on SM90.

    ``gathered``: more pairs than one launch sorts and copies, so that GEMM 1 gathers tokens, each quantised once.
    ``copied``: tokens end inside a block.
    """
    call = fp8_block(*sizes, device=device)
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=True))
    close(cutlass_fused_moe(**call)[0], cutlass_fused_moe_trace(**call).reference(**call, **scales))


#: Layers of e4m3 weights, with scales of blocks and with a factor per expert.
FP8_LAYERS = pytest.mark.parametrize(
    "make", [fp8_block, functools.partial(fp8, per_expert=True)], ids=["block", "tensor"]
)
#: GEMM 1 has 48, 30 and 576 tiles (128 weights by a pair): up to 176, a third more than SMs, are one kernel.
FEW_TOKENS = pytest.mark.parametrize(
    "sizes", [(2, 256, 384, 8, 4), (5, 400, 144, 6, 2), (8, 256, 1152, 16, 4)], ids=str
)


@SM90_OR_CPU
@FP8_LAYERS
@FEW_TOKENS
def test_e4m3_of_few_tokens(device, make, sizes):
    call = {**make(*sizes, device=device), "output_dtype": torch.bfloat16}
    names = ("fc1_scale", "fc2_scale") if make is fp8_block else ("fc1_dequant", "fc2_quant", "fc2_dequant")
    scales = dict(zip(names, call["quant_scales"], strict=False))
    out = cutlass_fused_moe(**call)[0]
    close(out, cutlass_fused_moe_trace(**call).reference(**call, **scales))
    assert torch.equal(cutlass_fused_moe(**call)[0], out)


@needs_hopper
@FP8_LAYERS
@FEW_TOKENS
def test_kernels_of_few_tokens(make, sizes):
    call = {**make(*sizes, device="cuda"), "output_dtype": torch.bfloat16}
    launched = kernels(lambda: cutlass_fused_moe(**call))
    assert ["Fp8FewKernel" in name for name in launched] == [True] if sizes[0] < 8 else len(launched) > 2, launched


@SM90_OR_CPU
def test_fp8_block_with_constants_and_ranks(device):
    call = {**fp8_block(17, 128, 128, 4, 2, device=device), "ep_size": 2, "ep_rank": 1}
    call["token_selected_experts"] += 2
    call["swiglu_limit"] = torch.full((4,), 0.5, device=device)
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=True))
    close(cutlass_fused_moe(**call)[0], cutlass_fused_moe_trace(**call).reference(**call, **scales))


@SM90_OR_CPU
@pytest.mark.parametrize("tokens, as_int32", [(1, False), (19, True), (300, False)])
def test_mxfp4(device, tokens, as_int32):
    """The layer of GPT-OSS: biases, and constants of the activation; scales as bytes or as their int32 view."""
    call, weights = mxfp4(tokens, 128, 256, 3, 2, device=device)
    if as_int32:
        call["quant_scales"] = [x.view(torch.int32) for x in call["quant_scales"]]
    biases = {
        "fc1_expert_biases": torch.randn(3, 512, device=device).bfloat16(),
        "fc2_expert_biases": torch.randn(3, 128, device=device).bfloat16(),
    }
    constants = {
        "swiglu_alpha": torch.full((3,), 1.702, device=device),
        "swiglu_beta": torch.full((3,), 1.0, device=device),
        "swiglu_limit": torch.full((3,), 7.0, device=device),
    }
    expected = folded(
        call,
        weights["fc1"],
        weights["fc2"],
        activation_type=int(ActivationType.Swiglu),
        round_hidden=lambda h, expert: h.bfloat16().float(),
        **biases,
        **constants,
    )
    torch.testing.assert_close(cutlass_fused_moe(**call, **biases, **constants)[0], expected, rtol=2e-2, atol=2e-2)


@SM90_OR_CPU
@pytest.mark.parametrize("activation", [ActivationType.Geglu, ActivationType.Relu2])
def test_mxfp4_with_an_activation_of_its_own(device, activation):
    """Activations that GEMM 1 does not apply; experts of another rank contribute nothing."""
    call, weights = mxfp4(23, 256, 128, 4, 2, device=device)
    call |= {"ep_size": 2, "ep_rank": 1, "activation_type": activation}
    call["token_selected_experts"] += 2
    if not activation.is_gated:
        call["fc1_expert_weights"] = call["fc1_expert_weights"][:, :128].contiguous()
        call["quant_scales"][0] = call["quant_scales"][0][:, :2].contiguous()
        weights["fc1"] = weights["fc1"][:, :128]
    expected = folded(
        call,
        weights["fc1"],
        weights["fc2"],
        activation_type=int(activation),
        ep_rank=1,
        round_hidden=lambda h, expert: h.bfloat16().float(),
    )
    torch.testing.assert_close(cutlass_fused_moe(**call)[0], expected, rtol=2e-2, atol=2e-2)


@SM90_OR_CPU
@pytest.mark.parametrize("tokens", [1, 7, 40, 130, 700])
def test_mxfp4_is_the_same_at_each_call(device, tokens):
    """Bits repeat, for tiles of every size and experts without tokens; a given buffer changes nothing."""
    call, _ = mxfp4(tokens, 128, 128, 5, 2, device=device)
    call["token_selected_experts"] = call["token_selected_experts"].clamp(max=3)
    first = cutlass_fused_moe(**call)[0]
    size = cutlass_fused_moe_workspace_size(
        *(tokens, 128, 128, 5, 2),
        x_dtype=torch.bfloat16,
        weight_dtype=torch.uint8,
        use_w4_group_scaling=True,
        device=device,
    )
    buffer = torch.full((size,), 255, dtype=torch.uint8, device=device)
    assert torch.equal(cutlass_fused_moe(**call, workspace_buffer=buffer)[0], first) and first.isfinite().all()


@SM90_OR_CPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16])
def test_int4_with_fp8_activations(device, dtype):
    call, weights = int4_fp8(19, 128, 256, 3, 2, device=device)
    call |= {"input": call["input"].to(dtype), "output_dtype": dtype}
    expected = folded(
        call,
        weights["fc1"],
        weights["fc2"],
        x=to_fp8(call["input"].float() * weights["fc1_factor"], E4M3).float(),
        round_hidden=lambda h, expert: to_fp8(h * weights["fc2_factor"], E4M3).float(),
    )
    close(cutlass_fused_moe(**call)[0], expected)


@SM90_OR_CPU
@pytest.mark.parametrize(
    "tokens, dtype", [(1, torch.bfloat16), (19, torch.bfloat16), (19, FP16), (300, torch.bfloat16)]
)
def test_mxfp4_with_fp8_activations(device, tokens, dtype):
    call, weights = mxfp4_fp8(tokens, 128, 256, 3, 2, device=device)
    call |= {"input": call["input"].to(dtype), "output_dtype": dtype}
    expected = folded(
        call, weights["fc1"], weights["fc2"], x=by_rows(call["input"]), round_hidden=lambda h, expert: by_rows(h)
    )
    close(cutlass_fused_moe(**call)[0], expected)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0), reason="needs a GPU other than SM90"
)
@pytest.mark.parametrize("make", [mxfp4, int4_fp8, mxfp4_fp8])
def test_four_bits_are_refused_on_other_gpus(make):
    call, _ = make(3, 128, 128, 3, 2, device="cuda")
    with pytest.raises(NotImplementedError, match="must be False on GPUs other than SM90"):
        cutlass_fused_moe(**call)


@pytest.mark.parametrize("make", [fp8_block, mxfp4, int4_fp8, mxfp4_fp8])
def test_a_token_does_not_see_the_others(make):
    """On the CPU, in every format."""
    made = make(60, 128, 128, 3, 2, device="cpu")
    call = made[0] if isinstance(made, tuple) else made
    whole = cutlass_fused_moe(**call)[0]
    alone = {name: call[name][7:8] for name in ("input", "token_selected_experts", "token_final_scales")}
    assert torch.equal(cutlass_fused_moe(**{**call, **alone})[0], whole[7:8])


def test_interleaved_scales(device):
    """Compare with the formula of the docstring."""
    scales = torch.randint(0, 255, (2, 128, 8), device=device).to(torch.uint8)
    folded_scales = interleave_moe_scales_for_sm90_mixed_gemm(scales)
    assert folded_scales.shape == (2, 2, 2, 16, 16) and folded_scales.is_contiguous()
    for row, group in ((0, 0), (17, 3), (63, 5), (100, 7)):
        b, s, i = row // 64, row % 64 // 16, row % 16
        assert folded_scales[1, b, group // 4, i, s * 4 + group % 4] == scales[1, row, group]


def test_rewritten_mxfp4_is_exact_within_the_range(device):
    codes = torch.randint(0, 256, (2, 64, 64), device=device).to(torch.uint8)
    raw = torch.randint(100, 112, (2, 64, 4), device=device).to(torch.uint8)
    out, offset, residual = preprocess_moe_weights_for_sm90_mixed_gemm_humming(codes, raw, interleave=False)
    base = raw.view(2, -1).amin(dim=1).int()
    assert torch.equal(offset.int(), raw.int() - base.view(-1, 1, 1) + 1)
    assert torch.equal(residual, torch.exp2(base.float() - 127) * 0.5)
    assert torch.equal(decode_e2m1(out), decode_e2m1(codes)) and not ((out & 15) == 8).any()


def test_rewritten_mxfp4_rounds_small_groups(device):
    """Exponents below the range are raised: 0.5, 3 and -0.5 divided by 2, and by 16."""
    codes = torch.zeros(1, 1, 48, dtype=torch.uint8, device=device)
    codes[0, 0, :2] = torch.tensor([0x51, 0x89], dtype=torch.uint8)  # 0.5, 3, -0.5, -0
    codes[0, 0, 16:18] = torch.tensor([0x51, 0x89], dtype=torch.uint8)
    raw = torch.tensor([[[119, 116, 120]]], dtype=torch.uint8, device=device)
    out, offset, _ = preprocess_moe_weights_for_sm90_mixed_gemm_humming(codes, raw, 0, interleave=False)
    assert offset.flatten().tolist() == [1, 1, 1]
    assert out[0, 0, :2].tolist() == [0x31, 0x09]  # 0.25 -> 0.5 (a tie), 1.5, -0.25 -> -0.5, 0
    assert out[0, 0, 16:18].tolist() == [0x00, 0x08]  # zeros, one of which keeps its sign


BAD = [
    (interleave_moe_weights_for_sm90_mixed_gemm, (torch.zeros(2, 16),), {}, "must be 3D"),
    (interleave_moe_weights_for_sm90_mixed_gemm, (torch.zeros(2, 16, 32),), {}, "must be uint8"),
    (
        interleave_moe_weights_for_sm90_mixed_gemm,
        (torch.zeros(2, 16, 32, dtype=torch.uint8), "fp8"),
        {},
        "quant_type must be one of",
    ),
    (interleave_moe_scales_for_sm90_mixed_gemm, (torch.zeros(64, 4),), {}, "must be 3D"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (torch.zeros(1, 64, 4), 48), {}, "must be positive and divide 128"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (torch.zeros(1, 64, 4),), {}, "unsupported element size"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (torch.zeros(1, 60, 4).byte(),), {}, "must be divisible by 64"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (torch.zeros(1, 64, 6).byte(),), {}, "K/group_size="),
    (
        preprocess_moe_weights_for_sm90_mixed_gemm_humming,
        (torch.zeros(1, 64, 64).byte(), torch.zeros(1, 64, 4).byte(), 12),
        {},
        "max_range must be",
    ),
]


@pytest.mark.parametrize("function, args, kwargs, text", BAD, ids=[text for *_, text in BAD])
def test_refused_preparations(function, args, kwargs, text):
    with pytest.raises(ValueError, match=text):
        function(*args, **kwargs)


@needs_hopper
@pytest.mark.parametrize("format", ["bf16", "fp8", "fp8_block", "mxfp4"])
def test_tiles_of_one_rank_of_many(format):
    """A rank of eight has an eighth of the rows, and the kernels of a layer of so many tokens."""
    makers = {
        "bf16": dense,
        "fp8": lambda *sizes, device: fp8(*sizes, device=device, per_expert=False),
        "fp8_block": fp8_block,
        "mxfp4": lambda *sizes, device: mxfp4(*sizes, device)[0],
    }

    def products(tokens: int, ranks: int) -> list[str]:
        call = makers[format](tokens, 512, 512, 8, 2, device="cuda")
        return [name for name in kernels(lambda: cutlass_fused_moe(**call, ep_size=ranks)) if "Gemm" in name]

    assert products(2048, 8) == products(256, 1) != products(2048, 1)
