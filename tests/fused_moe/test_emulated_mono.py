# SPDX-License-Identifier: Apache-2.0
"""The kernel that computes a whole layer for few tokens, on the CPU (tests/emulation)."""

from __future__ import annotations

import ctypes
import functools
from typing import Optional

import pytest
import torch

from flashinfer.tllm_enums import ActivationType
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace

from ..emulation.build import Library, compile_emulated
from .layers import BF16, FP16, biased, close, dense, fp8, fp8_block, mxfp4, poisoned

ELEMENTS = {FP16: 1, BF16: 2, torch.float8_e4m3fn: 3}
FIRST, LOCAL = 2, 5  # the local experts; two before and one behind have other ranks
PLAIN, FP8_TENSOR, FP8_BLOCK, MXFP4 = 0, 1, 2, 3  # Format of moe/layer.h
NOT_SUPPORTED = 801  # cudaErrorNotSupported
GATED = (ActivationType.Swiglu, ActivationType.SwigluBias)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_mono.cpp", tmp_path_factory)


def run(
    library: Library,
    call: dict,
    out: torch.dtype,
    activation: ActivationType = ActivationType.Swiglu,
    scales=(None, None),
    biases=(None, None),
    constants=(None, None, None),
    multiprocessors: int = 3,
    format: int = PLAIN,
    factors=(None, None, None),
) -> torch.Tensor:
    """Compute a layer whose memory is poisoned with NaN."""
    options = (activation, scales, biases, constants, multiprocessors, format, factors)
    status, output = enqueue(library, call, out, *options)
    assert status == 0
    return output


def enqueue(
    library, call, out, activation, scales, biases, constants, multiprocessors, format, factors=(None, None, None)
):
    """Return the status of a layer, and its output. Factors: of sums 1, of sums 2, and of hidden values."""
    x, ids = call["input"], call["token_selected_experts"]
    fc1, fc2 = call["fc1_expert_weights"], call["fc2_expert_weights"]
    tokens, hidden, top_k, inner = *x.shape, ids.shape[1], fc2.shape[2] * (2 if format == MXFP4 else 1)
    between = torch.full((tokens * top_k, inner), torch.nan).to(x.dtype)
    output = torch.full((tokens, hidden), torch.nan, dtype=out)
    address = lambda t: 0 if t is None else t.data_ptr()  # noqa: E731
    fields = [tokens, top_k, LOCAL, FIRST, hidden, inner, x.data_ptr(), x.stride(0), ids.data_ptr()]
    fields += [address(t) for t in (call["token_final_scales"], fc1, fc2, *scales, *biases, between, output)]
    fields += [output.stride(0), ELEMENTS[x.dtype], ELEMENTS[out], int(activation), *map(address, constants), format]
    fields += [*map(address, factors), int(factors[2] is not None and factors[2].numel() > 1)]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    return library.call("layer", multiprocessors, ctypes.addressof(packed)), output


def hidden_of(sums: torch.Tensor, activation: ActivationType, constants: Optional[list]) -> torch.Tensor:
    if activation is ActivationType.Relu2:
        return sums.relu().square()
    up, gate = sums.chunk(2)
    if constants is None:
        return torch.nn.functional.silu(gate) * up
    alpha, beta, limit = constants
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def plain(call: dict, activation=ActivationType.Swiglu, biases=(None, None), constants=(None, None, None)):
    """Return the sum over slots in float64, and the same with hidden values and the result rounded."""
    x, ids = call["input"].double(), call["token_selected_experts"].long() - FIRST
    exact, rounded = torch.zeros_like(x), torch.zeros_like(x)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        e = int(ids[token, slot])
        if not 0 <= e < LOCAL:
            continue
        b1, b2 = (0.0 if b is None else b[e].double() for b in biases)
        of_expert = None if constants[0] is None else [float(c[e]) for c in constants]
        h = hidden_of(call["fc1_expert_weights"][e].double() @ x[token] + b1, activation, of_expert)
        scale = 1.0 if call["token_final_scales"] is None else float(call["token_final_scales"][token, slot])
        for total, values in ((exact, h), (rounded, h.to(call["input"].dtype).double())):
            total[token] += scale * (call["fc2_expert_weights"][e].double() @ values + b2)
    return exact, rounded.to(call["input"].dtype).double()


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def layer(tokens: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype = BF16, is_gated: bool = True) -> dict:
    call = dense(tokens, hidden, inner, LOCAL, top_k, "cpu", total=LOCAL + FIRST + 1)
    for name in ("input", "fc1_expert_weights", "fc2_expert_weights"):
        call[name] = call[name].to(dtype)
    if not is_gated:
        call["fc1_expert_weights"] = call["fc1_expert_weights"][:, :inner].contiguous()
    return call


@pytest.mark.parametrize(
    "tokens, top_k, hidden, inner",
    [(1, 3, 136, 72), (8, 2, 200, 40), (13, 2, 1032, 24), (2, 4, 64, 1100 // 8 * 8)],
    ids=["one", "eight", "two-tiles", "deep"],
)
def test_values(library, tokens, top_k, hidden, inner):
    """The error is that of the places where values are rounded: hidden values and the result."""
    call = layer(tokens, hidden, inner, top_k)
    biases = torch.randn(LOCAL, 2 * inner).to(BF16), torch.randn(LOCAL, hidden).to(BF16)
    out = run(library, call, BF16, biases=biases).double()
    exact, rounded = plain(call, biases=biases)
    assert rms(out - exact) <= 1.02 * rms(rounded - exact)
    assert not out.isnan().any()


@pytest.mark.parametrize("activation", [ActivationType.Relu2, ActivationType.SwigluBias])
def test_activations(library, activation):
    """fp16; a plain activation has tiles of 16 rows."""
    call = layer(3, 96, 56, 2, FP16, is_gated=activation in GATED)
    constants = (None, None, None)
    if activation in GATED:
        constants = tuple(torch.rand(LOCAL) + shift for shift in (1.0, 0.5, 0.2))
    out = run(library, call, FP16, activation, constants=constants).double()
    exact, rounded = plain(call, activation, constants=constants)
    assert rms(out - exact) <= 1.02 * rms(rounded - exact) + 1e-12


def test_repeated_and_missing_experts(library):
    """A token may choose an expert twice, or none of this rank; scales may be missing."""
    call = layer(4, 72, 40, 3)
    call["token_selected_experts"] = torch.tensor([[3, 3, 4], [0, 1, 7], [-1, 6, 6], [2, 2, 2]], dtype=torch.int32)
    call["token_final_scales"] = None
    out = run(library, call, BF16).double()
    exact, rounded = plain(call)
    assert rms(out - exact) <= 1.02 * rms(rounded - exact)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_no_expert_of_this_rank(library):
    call = layer(2, 64, 32, 2)
    call["token_selected_experts"].fill_(0)
    assert torch.equal(run(library, call, BF16), torch.zeros(2, 64, dtype=BF16))


def test_independent_of_other_tokens(library):
    """The same bits in every batch, on every device and in every order of threads; others may be infinite."""
    call = layer(8, 328, 200, 3)
    call["input"][5, 3] = torch.inf
    whole = run(library, call, BF16)
    library.seed(7)
    assert torch.equal(run(library, call, BF16, multiprocessors=4).nan_to_num(), whole.nan_to_num())
    for token in (0, 3, 7):
        names = ("input", "token_selected_experts", "token_final_scales")
        alone = {**call, **{name: call[name][token : token + 1].contiguous() for name in names}}
        assert torch.equal(run(library, alone, BF16)[0], whole[token])


def test_again(library):
    """The barrier of the grid serves the next launch."""
    call = layer(1, 64, 32, 2)
    assert torch.equal(run(library, call, BF16, multiprocessors=2), run(library, call, BF16, multiprocessors=5))


def moved(call: dict) -> dict:
    """Return a call whose experts begin at ``FIRST``."""
    return {**call, "token_selected_experts": call["token_selected_experts"] + FIRST}


@pytest.mark.parametrize("out_type", [BF16, FP16])
@pytest.mark.parametrize(
    "top_k, hidden, inner",
    [(4, 256, 384), (2, 400, 144), (3, 128, 272), (1, 4224, 16), (5, 128, 528)],
    ids=["whole", "parts", "part", "wide", "deep"],
)
def test_fp8_block(library, top_k, hidden, inner, out_type):
    """Tokens and hidden values are quantised by 1 x 128, of which the last may be a part.

    Wide and deep: more of these than a product has in one pass of all warps.
    """
    call = {**fp8_block(1, hidden, inner, LOCAL, top_k, device="cpu"), "output_dtype": out_type}
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=True))
    biases = torch.randn(LOCAL, 2 * inner).to(out_type), torch.randn(LOCAL, hidden).to(out_type)
    call["fc1_expert_biases"], call["fc2_expert_biases"] = biases
    expected = cutlass_fused_moe_trace(**call).reference(**call, **scales)
    out = run(library, moved(call), out_type, scales=call["quant_scales"], biases=biases, format=FP8_BLOCK)
    close(out, expected)


@pytest.mark.parametrize("out_type", [BF16, FP16])
@pytest.mark.parametrize(
    "tokens, top_k, hidden, inner",
    [(2, 4, 256, 384), (8, 2, 400, 144), (3, 3, 128, 272), (5, 1, 4224, 16), (2, 3, 128, 2320)],
    ids=["whole", "parts", "part", "wide", "deep"],
)
def test_fp8_block_of_few(library, tokens, top_k, hidden, inner, out_type):
    """The same for 2 to 8 tokens. Deep: a warp has two chunks of an expert."""
    call = {**fp8_block(tokens, hidden, inner, LOCAL, top_k, device="cpu"), "output_dtype": out_type}
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=True))
    biases = torch.randn(LOCAL, 2 * inner).to(out_type), torch.randn(LOCAL, hidden).to(out_type)
    call["fc1_expert_biases"], call["fc2_expert_biases"] = biases
    expected = cutlass_fused_moe_trace(**call).reference(**call, **scales)
    out = run(library, moved(call), out_type, scales=call["quant_scales"], biases=biases, format=FP8_BLOCK)
    close(out, expected)


def test_fp8_block_independent_of_other_tokens(library):
    """The same bits beside any other tokens, on every device and in every order of threads; others may be infinite."""
    call = moved(fp8_block(6, 208, 2320, LOCAL, 3, device="cpu"))
    call["token_selected_experts"][0, :2] = call["token_selected_experts"][0, 1]  # one twice
    call["token_selected_experts"][2] = torch.tensor([0, FIRST + LOCAL, FIRST + 4])  # one of three here
    call["token_selected_experts"][3] = 0  # none here
    call["input"][5, 3] = torch.inf
    whole = run(library, call, BF16, scales=call["quant_scales"], format=FP8_BLOCK)
    assert torch.equal(whole[3], torch.zeros_like(whole[3]))
    for multiprocessors in (4, 29):
        library.seed(multiprocessors)
        again = run(library, call, BF16, multiprocessors=multiprocessors, scales=call["quant_scales"], format=FP8_BLOCK)
        assert torch.equal(again.nan_to_num(), whole.nan_to_num())
    for rows in ([2, 0], [4, 5, 1, 2, 3]):
        names = ("input", "token_selected_experts", "token_final_scales")
        some = {**call, **{name: call[name][rows].contiguous() for name in names}}
        out = run(library, some, BF16, scales=call["quant_scales"], format=FP8_BLOCK)
        assert torch.equal(out.nan_to_num(), whole[rows].nan_to_num())


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize(
    "tokens, top_k, hidden, inner",
    [(1, 4, 256, 384), (8, 2, 400, 144), (5, 1, 4224, 16), (2, 3, 128, 2320)],
    ids=["one", "parts", "wide", "deep"],
)
def test_fp8_tensor(library, tokens, top_k, hidden, inner, per_expert):
    call = {**fp8(tokens, hidden, inner, LOCAL, top_k, device="cpu", per_expert=per_expert), "output_dtype": BF16}
    biases = torch.randn(LOCAL, 2 * inner).to(BF16), torch.randn(LOCAL, hidden).to(BF16)
    call["fc1_expert_biases"], call["fc2_expert_biases"] = biases
    factor1, quantizer, factor2, _ = call["quant_scales"]
    named = {"fc1_dequant": factor1, "fc2_dequant": factor2, "fc2_quant": quantizer}
    expected = cutlass_fused_moe_trace(**call).reference(**call, **named)
    factors = (factor1, factor2, quantizer)
    out = run(library, moved(call), BF16, biases=biases, format=FP8_TENSOR, factors=factors)
    close(out, expected)
    library.seed(tokens)
    again = run(library, moved(call), BF16, biases=biases, multiprocessors=8, format=FP8_TENSOR, factors=factors)
    assert torch.equal(again, out)


def test_fp8_block_plain_activation_of_few(library):
    call = {**fp8_block(4, 272, 256, LOCAL, 3, device="cpu"), "activation_type": ActivationType.Relu2}
    call["fc1_expert_weights"] = call["fc1_expert_weights"][:, :256].contiguous()
    call["quant_scales"] = [call["quant_scales"][0][:, :2].contiguous(), call["quant_scales"][1]]
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=True))
    expected = cutlass_fused_moe_trace(**call).reference(**call, **scales)
    options = {"scales": call["quant_scales"], "format": FP8_BLOCK}
    close(run(library, moved(call), BF16, ActivationType.Relu2, **options), expected)


def test_fp8_block_on_other_devices(library):
    """The same bits on every device and in every order of threads; the last block of columns is a part.

    Tiles have rows of two experts, and one block has more tiles than a batch.
    """
    call = moved(fp8_block(1, 400, 272, LOCAL, 3, device="cpu"))
    options = {"scales": call["quant_scales"], "format": FP8_BLOCK}
    options["biases"] = torch.randn(LOCAL, 2 * 272).to(BF16), torch.randn(LOCAL, 400).to(BF16)
    first = run(library, call, BF16, **options)
    for multiprocessors in (1, 4, 29):
        library.seed(multiprocessors)
        assert torch.equal(run(library, call, BF16, multiprocessors=multiprocessors, **options), first)


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP4], ids=["fp8", "mxfp4"])
def test_order_of_slots(library, format):
    """One token has the same bits whatever the order of its slots; those of large scales cancel out."""
    sizes = (1, 128, 256, LOCAL, 4)
    call = fp8_block(*sizes, device="cpu") if format == FP8_BLOCK else mxfp4(*sizes, "cpu")[0]
    call["token_selected_experts"] = torch.tensor([[3, 0, 1, 2]], dtype=torch.int32)
    call["token_final_scales"] = torch.tensor([[1e5, 1.0, -1e5, 0.5]])
    for x in (call["fc1_expert_weights"], call["fc2_expert_weights"], *call["quant_scales"]):
        x.view(torch.uint8)[3] = x.view(torch.uint8)[1]
    outs = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        names = ("token_selected_experts", "token_final_scales")
        moved_slots = moved({**call, **{name: call[name][:, order].contiguous() for name in names}})
        outs.append(run(library, moved_slots, BF16, scales=call["quant_scales"], format=format))
    assert torch.equal(outs[1], outs[0]) and torch.equal(outs[2], outs[0])


def test_fp8_block_plain_activation(library):
    """Without gates a tile has pairs of rows that are half of an expert apart."""
    call = {**fp8_block(1, 272, 256, LOCAL, 3, device="cpu"), "activation_type": ActivationType.Relu2}
    call["fc1_expert_weights"] = call["fc1_expert_weights"][:, :256].contiguous()
    call["quant_scales"] = [call["quant_scales"][0][:, :2].contiguous(), call["quant_scales"][1]]
    scales = dict(zip(("fc1_scale", "fc2_scale"), call["quant_scales"], strict=True))
    expected = cutlass_fused_moe_trace(**call).reference(**call, **scales)
    options = {"scales": call["quant_scales"], "format": FP8_BLOCK}
    close(run(library, moved(call), BF16, ActivationType.Relu2, **options), expected)


@pytest.mark.parametrize("ids", [(3, 3, 4), (0, 6, 3), (0, 1, 7), (-1, 2, 2)], ids=str)
def test_fp8_block_repeated_and_missing_experts(library, ids):
    """One token may choose an expert twice, or none of this rank: the sum of its choices, one by one."""
    call = fp8_block(1, 144, 128, LOCAL, 3, device="cpu")
    call["token_selected_experts"] = torch.tensor([ids], dtype=torch.int32)
    options = {"scales": call["quant_scales"], "format": FP8_BLOCK}
    names, parts = ("token_selected_experts", "token_final_scales"), []
    for slot in range(3):
        one = {**call, **{name: call[name][:, slot : slot + 1].contiguous() for name in names}}
        parts.append(run(library, one, FP16, **options).double())
    errors = (run(library, call, BF16, **options).double() - sum(parts)).abs()
    assert bool((errors <= 2.0**-8 * sum(part.abs() for part in parts) + 1e-6).all())  # bf16 errs by 2^-9


@pytest.mark.parametrize(
    "tokens, top_k, hidden, inner, format",
    [
        (9, 1, 128, 128, FP8_BLOCK),
        (8, 9, 128, 2048, FP8_BLOCK),  # 1152 slots of sums
        (1, 33, 128, 128, FP8_BLOCK),  # a lane has a slot
        (2, 1, 128, 128, MXFP4),
        (1, 33, 128, 128, MXFP4),
    ],
)
def test_layers_without_room(library, tokens, top_k, hidden, inner, format):
    """Nothing is enqueued; such layers are computed in stages."""
    sizes = (tokens, hidden, inner, LOCAL, 1)
    call = fp8_block(*sizes, device="cpu") if format == FP8_BLOCK else mxfp4(*sizes, "cpu")[0]
    call["token_selected_experts"] = torch.full((tokens, top_k), FIRST, dtype=torch.int32)
    call["token_final_scales"] = torch.ones(tokens, top_k)
    none = (None, None)
    options = (ActivationType.Swiglu, call["quant_scales"], none, (*none, None), 3, format)
    status, output = enqueue(library, call, BF16, *options)
    assert status == NOT_SUPPORTED and bool(output.isnan().all())


@pytest.mark.parametrize("size", [2.0**-24, 2.0**24], ids=["tiny", "huge"])
def test_mxfp4_range(library, size):
    """The elements of one token are multiplied by 2^64 on the way; the output is as good as that of common elements."""
    call, values = mxfp4(1, 384, 128, LOCAL, 3, "cpu")
    call["input"] = (call["input"].double() * size).to(BF16)
    out = run(library, moved(call), BF16, scales=call["quant_scales"], format=MXFP4)
    decoded = moved({**call, "fc1_expert_weights": values["fc1"], "fc2_expert_weights": values["fc2"]})
    exact, rounded = plain(decoded)
    assert rms(rounded) > 0
    assert rms(out.double() - exact) <= 1.02 * rms(rounded - exact)


def test_mxfp4_nan_scale(library):
    """A scale of 255 makes its row NaN, and no other."""
    call, _ = mxfp4(1, 384, 256, LOCAL, 1, "cpu")
    call["token_selected_experts"].fill_(1)
    clean = run(library, moved(call), BF16, scales=call["quant_scales"], format=MXFP4)
    scales = [x.clone() for x in call["quant_scales"]]
    scales[1].view(torch.uint8).view(LOCAL, -1)[1, 0] = 255
    out = run(library, moved(call), BF16, scales=scales, format=MXFP4)
    assert out.isnan().sum() == 1
    assert torch.equal(out[~out.isnan()], clean[~out.isnan()])


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("top_k, hidden, inner", [(4, 384, 256), (2, 128, 640)], ids=["wide", "deep"])
def test_mxfp4(library, top_k, hidden, inner, is_large):
    """Both products with gates and biases. Large: scales above 2."""
    call, values = mxfp4(1, hidden, inner, LOCAL, top_k, "cpu", span=0 if is_large else 4)
    biases = torch.randn(LOCAL, 2 * inner).to(BF16), torch.randn(LOCAL, hidden).to(BF16)
    scales, factor = call["quant_scales"], 1.0
    if is_large:
        scales, factor = [scales[0], torch.full_like(scales[1], 130)], 2.0**10
    constants = [torch.full((LOCAL,), x) for x in (1.702, 1.0, 7.0)]
    out = run(
        library,
        moved(call),
        BF16,
        ActivationType.SwigluBias,
        scales=scales,
        biases=biases,
        constants=constants,
        format=MXFP4,
    )
    weights = {"fc1_expert_weights": values["fc1"], "fc2_expert_weights": values["fc2"] * factor}
    decoded = moved({**call, **weights})
    exact, rounded = plain(decoded, biases=biases, constants=constants)
    assert rms(out.double() - exact) <= 1.02 * rms(rounded - exact)


@pytest.mark.parametrize(
    "top_k, hidden, inner, multiprocessors",
    [(1, 4224, 128, 5), (3, 128, 1408, 3), (2, 384, 128, 19), (4, 256, 640, 1)],
    ids=["wide", "deep", "many-blocks", "one-block"],
)
def test_mxfp4_alone(library, top_k, hidden, inner, multiprocessors):
    """More columns than a pass of all half warps has, blocks without rows of a product, and one block for all rows."""
    call, values = mxfp4(1, hidden, inner, LOCAL, top_k, "cpu")
    biases = torch.randn(LOCAL, 2 * inner).to(BF16), torch.randn(LOCAL, hidden).to(BF16)
    scales, decoded = call["quant_scales"], {"fc1_expert_weights": values["fc1"], "fc2_expert_weights": values["fc2"]}
    out = run(library, moved(call), BF16, scales=scales, biases=biases, multiprocessors=multiprocessors, format=MXFP4)
    exact, rounded = plain(moved({**call, **decoded}), biases=biases)
    assert rms(out.double() - exact) <= 1.02 * rms(rounded - exact)
    library.seed(3)
    again = run(library, moved(call), BF16, scales=scales, biases=biases, multiprocessors=7, format=MXFP4)
    assert torch.equal(again, out)  # the order of sums does not depend on the number of blocks


def test_mxfp4_plain_activation(library):
    """Without gates a stage has 16 rows of one expert; values of 16 bits leave in another type."""
    call, values = mxfp4(1, 256, 256, LOCAL, 3, "cpu")
    fc1 = call["fc1_expert_weights"][:, :256].contiguous()
    scales = [call["quant_scales"][0].view(LOCAL, 2, -1)[:, 0].contiguous(), call["quant_scales"][1]]
    biases = torch.randn(LOCAL, 256).to(FP16), torch.randn(LOCAL, 256).to(FP16)
    out = run(
        library,
        moved({**call, "fc1_expert_weights": fc1}),
        FP16,
        ActivationType.Relu2,
        scales=scales,
        biases=biases,
        format=MXFP4,
    )
    decoded = {"fc1_expert_weights": values["fc1"][:, :256], "fc2_expert_weights": values["fc2"]}
    exact, rounded = plain(moved({**call, **decoded}), ActivationType.Relu2, biases=biases)
    assert rms(out.double() - exact) <= 1.02 * rms(rounded - exact)


@pytest.mark.parametrize("ids", [(3, 3, 4), (0, 6, 3), (0, 1, 7), (-1, 2, 2)], ids=str)
def test_mxfp4_repeated_and_missing_experts(library, ids):
    """One token may choose an expert twice, or none of this rank."""
    call, values = mxfp4(1, 128, 128, LOCAL, 3, "cpu")
    call["token_selected_experts"] = torch.tensor([ids], dtype=torch.int32)
    out = run(library, call, BF16, scales=call["quant_scales"], format=MXFP4).double()
    exact, rounded = plain({**call, "fc1_expert_weights": values["fc1"], "fc2_expert_weights": values["fc2"]})
    assert rms(out - exact) <= 1.02 * rms(rounded - exact)


@pytest.mark.parametrize(
    "format, tokens, top_k, inner, ranks, is_one",
    [
        (PLAIN, 8, 2, 14336, 1, True),
        (FP8_BLOCK, 1, 8, 2048, 1, True),  # has a kernel of its own
        (FP8_BLOCK, 5, 8, 256, 1, True),  # 160 tiles of 128 weights by a pair: DeepSeek-V3 on eight GPUs
        (FP8_BLOCK, 6, 8, 256, 1, False),  # 192, more than a third above 132
        (FP8_BLOCK, 5, 8, 2048, 8, True),  # the experts of one rank of eight: 5 of 40 pairs
        (FP8_BLOCK, 9, 1, 128, 1, False),
        (FP8_TENSOR, 1, 1, 8192, 1, True),
        (FP8_TENSOR, 2, 1, 8192, 1, False),
        (MXFP4, 1, 4, 2944, 1, True),
        (MXFP4, 2, 4, 2944, 1, False),
    ],
)
def test_rule_of_one_kernel(library, format, tokens, top_k, inner, ranks, is_one):
    """Layers that take less time as one kernel, as measured (`few_e4m3_us` of benchmarks/results/h200.json)."""
    assert library.call("takes_one_kernel", format, tokens, top_k, inner, ranks) == is_one


@pytest.mark.parametrize(
    "format, tokens", [(PLAIN, 1), (PLAIN, 7), (FP8_TENSOR, 5), (FP8_BLOCK, 1), (FP8_BLOCK, 6), (MXFP4, 1)]
)
def test_nan_stays_nan(library, format, tokens):
    """With a limit: results that depend on NaN are NaN, the others are what they were; infinity is cut off."""
    make = {PLAIN: dense, FP8_TENSOR: functools.partial(fp8, per_expert=False), FP8_BLOCK: fp8_block, MXFP4: mxfp4}
    made = make[format](tokens, 128, 256, LOCAL, 2, device="cpu")
    call = moved(biased(made[0] if format == MXFP4 else made, 256))
    scales, factors = call["quant_scales"] or (None, None), (None, None, None)
    if format == FP8_TENSOR:
        scales, factors = (None, None), (scales[0], scales[2], scales[1])
    constants = [torch.full((LOCAL,), x) for x in (1.702, 1.0, 1.5)]

    def results(x: dict) -> torch.Tensor:
        biases = (x["fc1_expert_biases"], x["fc2_expert_biases"])
        options = {"scales": scales, "biases": biases, "constants": constants, "format": format, "factors": factors}
        return run(library, x, BF16, ActivationType.SwigluBias, **options)

    clean = results(call)
    for place in ("token", "up bias", "gate bias", *(() if format == MXFP4 else ("gate", "down"))):
        changed, mask = poisoned(call, place, first=FIRST)
        out = results(changed)
        assert torch.equal(out.isnan(), mask) and torch.equal(out[~mask], clean[~mask]), place
    high, infinite = (results(poisoned(call, "gate bias", x, FIRST)[0]) for x in (1e30, torch.inf))
    assert torch.equal(high, infinite) and bool(high.isfinite().all())
