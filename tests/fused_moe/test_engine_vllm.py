# SPDX-License-Identifier: Apache-2.0
"""Layers of experts of vLLM 0.33 on Hopper: its preparation of weights, its call, the model's definition.

vLLM has fc1 of a checkpoint as [gate ; up], in turns for GPT-OSS, and calls with the halves swapped. Each test starts
from the checkpoint, so that a wrong half, a bias or scale in another order, or an argument that is ignored shows.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, pad

from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm, interleave_moe_weights_for_sm90_mixed_gemm
from flashinfer.fused_moe.core import ActivationType

from .layers import BF16, E4M3, FP16, decode_e2m1, packed
from .vllm_calls import INF, TOKENS, apply, close, halves_swapped, in_a_parameter, model, oai, plain, routed, three

UNGATED = {ActivationType.Relu2: lambda z: z.relu() ** 2}
GATED = {ActivationType.Swiglu: oai(), ActivationType.Geglu: lambda g, u: gelu(g) * u}


@pytest.mark.parametrize("dtype, id_dtype", [(BF16, torch.int32), (FP16, torch.int64)])
@pytest.mark.parametrize("activation", [*GATED, *UNGATED], ids=str)
def test_unquantized(device, dtype, id_dtype, activation):
    """Qwen3-MoE and Mixtral (Swiglu), Gemma (Geglu), Nemotron (Relu2, whose fc1 is one matrix)."""
    experts, hidden, inner = 8, 64, 96
    gate, up, down = three(experts, inner, hidden, device, dtype)
    is_gated = activation in GATED
    w1 = halves_swapped(torch.cat((gate, up), dim=1)) if is_gated else up
    for tokens in TOKENS:
        x, routing = torch.randn(tokens, hidden, device=device).to(dtype), routed(tokens, 2, experts, device, id_dtype)
        with torch.inference_mode():
            out = apply(x, in_a_parameter(w1), in_a_parameter(down), **routing, **plain(dtype), activation=activation)
        act = GATED[activation] if is_gated else UNGATED[activation]
        close(out, model(x, *routing.values(), gate if is_gated else None, up, down, act), 0.01)


def test_ranks_of_expert_parallelism(device):
    """Each rank computes its slice of the experts from global ids; the sum of the ranks is the layer."""
    experts, hidden, inner, ep_size = 12, 64, 96, 3
    matrices = three(experts, inner, hidden, device, BF16)
    x, routing = torch.randn(17, hidden, device=device).to(BF16), routed(17, 4, experts, device)
    routing["topk_ids"][5] = -1  # a token of padding
    total = torch.zeros(17, hidden, device=device)
    for rank in range(ep_size):
        mine = slice(rank * 4, rank * 4 + 4)
        gate, up, down = (w[mine] for w in matrices)
        w1 = halves_swapped(torch.cat((gate, up), dim=1))
        out = apply(x, w1, down.contiguous(), **routing, **plain(BF16), ranks=(1, 0, ep_size, rank))
        close(out, model(x, *routing.values(), gate, up, down, oai(), first=rank * 4), 0.01)
        total += out.float()
    close(total, model(x, *routing.values(), *matrices, oai()), 0.01)
    assert total[5].eq(0).all() and total.any(dim=1).sum() == 16


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(E4M3)


#: Mixtral and Llama 4 without and with padding of the intermediate size to 16, Nemotron's to 128, a limit of Swiglu.
FP8_LAYERS = [
    (ActivationType.Swiglu, 2, 224, 224, None),
    (ActivationType.Swiglu, 1, 72, 80, None),
    (ActivationType.Swiglu, 2, 224, 224, 0.5),
    (ActivationType.Relu2, 2, 192, 256, None),
]


@pytest.mark.parametrize("out_dtype", [BF16, FP16])
@pytest.mark.parametrize("activation, top_k, inner, padded, limit", FP8_LAYERS)
def test_fp8_per_tensor(device, out_dtype, activation, top_k, inner, padded, limit):
    """Weights with one scale per expert, tokens with one; scales of activations are 0-d tensors: maxima of experts."""
    experts, hidden = 8, 128
    is_gated = activation is ActivationType.Swiglu
    matrices = three(experts, inner, hidden, device, torch.float32)
    w13, down = torch.cat(matrices[:2], dim=1) if is_gated else matrices[1], matrices[2]
    s13, s2 = (w.abs().amax(dim=(1, 2)) / 448 for w in (w13, down))
    w13, down = to_e4m3(w13 / s13.view(-1, 1, 1)), to_e4m3(down / s2.view(-1, 1, 1))
    a1, a2 = torch.tensor([0.009, 0.01], device=device).max(), torch.tensor([0.03, 0.02], device=device).max()

    def zeros_after(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return pad(x.view(torch.uint8), (0, columns - x.shape[2], 0, rows - x.shape[1])).view(E4M3)

    parts = [zeros_after(part, padded, hidden) for part in w13.chunk(2 if is_gated else 1, dim=1)]
    w1 = halves_swapped(torch.cat(parts, dim=1)) if is_gated else parts[0]
    w2 = zeros_after(down, hidden, padded)
    scales = [in_a_parameter(s13 * a1), 1.0 / a2, in_a_parameter(s2 * a2), in_a_parameter(a1)]
    values = [w.float() * s13.view(-1, 1, 1) for w in w13.chunk(2 if is_gated else 1, dim=1)]
    gate, up = values if is_gated else (None, values[0])
    act = oai(limit=limit or INF) if is_gated else UNGATED[activation]
    for tokens in TOKENS:
        x, routing = torch.randn(tokens, hidden, device=device).to(out_dtype), routed(tokens, top_k, experts, device)
        x8 = to_e4m3(x.float() / a1)
        with torch.inference_mode():
            out = apply(
                x8, w1, w2, **routing, out_dtype=out_dtype, quant_scales=scales, activation=activation,
                constants=(None, None, limit),
            )  # fmt: skip
        expected = model(
            x8.float() * a1, *routing.values(), gate, up, down.float() * s2.view(-1, 1, 1), act,
            rounds=lambda h: to_e4m3(h / a2).float() * a2,
        )  # fmt: skip
        close(out, expected, 0.04)  # a hidden value between two codes may take the other one


def spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the scale of each element, of scales of 128 x 128 blocks."""
    return scales.repeat_interleave(128, dim=1)[:, :rows].repeat_interleave(128, dim=2)[:, :, :columns]


def by_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return the values of rows quantised to e4m3 by 1 x 128."""
    columns = x.shape[-1]
    blocks = pad(x.float(), (0, -columns % 128)).unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    return (to_e4m3(blocks / scale).float() * scale).flatten(-2)[..., :columns]


#: Experts of a rank, top k, hidden, intermediate, constants, ranks: DeepSeek; a hidden size that ends inside a block,
#: on the second of two expert-parallel ranks; MiniMax, with constants of Swiglu.
BLOCK_LAYERS = [
    (8, 4, 256, 128, (None, None, None), (1, 0, 1, 0)),
    (4, 2, 320, 256, (None, None, None), (1, 0, 2, 1)),
    (8, 2, 256, 128, (1.702, 1.0, 1.0), (1, 0, 1, 0)),
]


@pytest.mark.parametrize("experts, top_k, hidden, inner, constants, ranks", BLOCK_LAYERS)
def test_fp8_block(device, experts, top_k, hidden, inner, constants, ranks):
    """Scales are swapped with their weights; those of an expert without weights are clamped to 1e-10."""
    matrices = [to_e4m3(w * 100 * w.shape[2] ** 0.5) for w in three(experts, inner, hidden, device, torch.float32)]
    scales = []
    for w in matrices:
        shape = (experts, -(-w.shape[1] // 128), -(-w.shape[2] // 128))
        scales.append((torch.rand(shape, device=device) + 0.5) / 100 / w.shape[2] ** 0.5)
    for s in scales:
        s[0] = 1e-23
    values = [w.float() * spread(s, *w.shape[1:]) for w, s in zip(matrices, scales, strict=True)]
    w1 = halves_swapped(torch.cat(matrices[:2], dim=1).view(torch.uint8)).view(E4M3)
    quant_scales = [halves_swapped(torch.cat(scales[:2], dim=1)).clamp_(min=1e-10), scales[2].clamp(min=1e-10)]
    act = oai(*(default if c is None else c for c, default in zip(constants, (1.0, 0.0, INF), strict=True)))
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=device).to(BF16)
        routing = routed(tokens, top_k, experts * ranks[2], device)
        with torch.inference_mode():
            out = apply(
                x, w1, matrices[2], **routing, out_dtype=BF16, quant_scales=quant_scales, constants=constants,
                ranks=ranks, block=True,
            )  # fmt: skip
        expected = model(
            by_blocks(x), *routing.values(), *values, act, first=ranks[3] * experts,
            rounds=lambda h: by_blocks(h.to(BF16)),
        )  # fmt: skip
        close(out, expected, 0.05)  # sums of GEMM 1 are rounded to bf16 first, which moves codes


def interleaved(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and scales of MXFP4 as the kernels read them."""
    weights = interleave_moe_weights_for_sm90_mixed_gemm(codes.contiguous(), "fp4")
    return weights, interleave_moe_scales_for_sm90_mixed_gemm(scales.to(torch.uint8))


#: Rank and size of tensor and expert parallelism. GPT-OSS slices hold 96 of 128 columns, and its hidden size is padded.
GPT_OSS_RANKS = [(1, 0, 1, 0), (2, 0, 1, 0), (2, 1, 1, 0), (1, 0, 2, 1)]


@pytest.mark.parametrize("ranks", GPT_OSS_RANKS, ids=lambda x: "tp{1}of{0}-ep{3}of{2}".format(*x))
def test_gpt_oss(device, ranks):
    """Rows of gate and up in turn, biases, Swiglu with 1.702, 1 and 7, both sizes padded to 128 with zero bytes."""
    experts, top_k, hidden, inner, wide, padded = 4, 4, 192, 96, 256, 128
    codes = [packed(experts, n, k, device) for n, k in ((inner, hidden), (inner, hidden), (hidden, inner))]
    bytes_of_scales = [
        torch.randint(118, 122, (*w.shape[:2], w.shape[2] // 16), device=device).to(torch.uint8) for w in codes
    ]
    b_gate, b_up, b_down = (torch.randn(experts, w.shape[1], device=device).to(BF16) for w in codes)
    gate, up, down = (
        decode_e2m1(w) * torch.exp2(s.float() - 127).repeat_interleave(32, dim=-1)
        for w, s in zip(codes, bytes_of_scales, strict=True)
    )

    def checkpoint(gate: torch.Tensor, up: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the parameter of the engine: zeros, and rows of the checkpoint at its begin."""
        whole = torch.zeros(experts, 2 * padded, columns, dtype=gate.dtype, device=device)
        whole[:, : 2 * inner, : gate.shape[2]] = torch.stack((gate, up), dim=2).flatten(1, 2)
        return whole

    def up_first(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[:, 1::2], x[:, ::2]), dim=1)

    w13, s13 = (checkpoint(x[0], x[1], wide // per) for x, per in ((codes, 2), (bytes_of_scales, 32)))
    w2, s2 = (
        pad(x[2], (0, padded // per - x[2].shape[2], 0, wide - hidden))
        for x, per in ((codes, 2), (bytes_of_scales, 32))
    )
    w1, scales1 = interleaved(up_first(w13), up_first(s13))
    w2, scales2 = interleaved(w2, s2)
    b13 = up_first(checkpoint(b_gate.unsqueeze(2), b_up.unsqueeze(2), 1)).squeeze(2).to(torch.float32).to(BF16)
    biases = (b13, pad(b_down, (0, wide - hidden)))
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=device).to(BF16) * 8  # so that the limit counts
        routing = routed(tokens, top_k, experts * ranks[2], device)
        with torch.inference_mode():
            out = apply(
                pad(x, (0, wide - hidden)), in_a_parameter(w1), in_a_parameter(w2), **routing, out_dtype=BF16,
                quant_scales=[in_a_parameter(scales1), in_a_parameter(scales2)], biases=biases,
                constants=(1.702, 1.0, 7.0), ranks=ranks, w4=True,
            )  # fmt: skip
        expected = model(
            x, *routing.values(), gate, up, down, oai(1.702, 1.0, 7.0),
            (b_gate, b_up, b_down if ranks[1] == 0 else None), ranks[3] * experts, lambda h: h.to(BF16).float(),
        )  # fmt: skip
        close(out[:, :hidden], expected, 0.01)
        assert out[:, hidden:].eq(0).all()


def test_mxfp4_with_halves_of_a_checkpoint(device):
    """DeepSeek-V4: [gate ; up] in halves, no biases, and of the constants the limit alone."""
    experts, top_k, hidden, inner = 8, 2, 256, 128
    codes = packed(experts, 2 * inner, hidden, device), packed(experts, hidden, inner, device)
    scales = [torch.randint(118, 122, (*w.shape[:2], w.shape[2] // 16), device=device).to(torch.uint8) for w in codes]
    w13, down = (
        decode_e2m1(w) * torch.exp2(s.float() - 127).repeat_interleave(32, dim=-1)
        for w, s in zip(codes, scales, strict=True)
    )
    w1, scales1 = interleaved(halves_swapped(codes[0]), halves_swapped(scales[0]))
    w2, scales2 = interleaved(codes[1], scales[1])
    for tokens in TOKENS:
        x, routing = torch.randn(tokens, hidden, device=device).to(BF16) * 8, routed(tokens, top_k, experts, device)
        out = apply(
            x, w1, w2, **routing, out_dtype=BF16, quant_scales=[scales1, scales2], constants=(None, None, 3.0), w4=True
        )
        expected = model(
            x, *routing.values(), *w13.chunk(2, dim=1), down, oai(limit=3.0), rounds=lambda h: h.to(BF16).float()
        )
        close(out, expected, 0.01)
