# SPDX-License-Identifier: Apache-2.0
"""A whole layer of experts with the four kernels for SM90, on the CPU (tests/emulation)."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ..emulation.build import Library, compile_emulated
from .layers import BF16, E4M3, FP16, biased, dense, fp8, poisoned

ELEMENTS = {torch.float32: 0, FP16: 1, BF16: 2, E4M3: 3}
TILES_BF16, FEW_BF16, FEW_FP8 = 0, 1, 2
FIRST, LOCAL = 2, 5  # the local experts; two before and one behind have other ranks


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_layer.cpp", tmp_path_factory)


def run(
    library: Library,
    kernel: int,
    call: dict,
    out: torch.dtype,
    scales=(None, None, None),
    biases=(None, None),
    limit=None,
):
    """Compute a layer whose memory is poisoned with NaN."""
    x, ids = call["input"], call["token_selected_experts"]
    fc1, fc2 = call["fc1_expert_weights"], call["fc2_expert_weights"]
    (tokens, hidden), top_k, inner = x.shape, ids.shape[1], fc2.shape[2]
    pairs = tokens * top_k

    def memory(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((pairs, columns), torch.nan).to(dtype)

    tables = torch.full((2 * pairs + LOCAL + 1 + 2,), -7, dtype=torch.int32)
    buffers = [memory(hidden, x.dtype), memory(inner, x.dtype), memory(hidden, out)]
    output = torch.full((tokens, hidden), torch.nan, dtype=out)
    tensors = [x, ids, fc1, fc2, tables, *buffers, output, call["token_final_scales"]]
    fields = [tokens, top_k, LOCAL, FIRST, hidden, inner, *(t.data_ptr() for t in tensors)]
    fields += [ELEMENTS[x.dtype], ELEMENTS[out], *(0 if t is None else t.data_ptr() for t in (*scales, *biases, limit))]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    assert library.call("layer", kernel, ctypes.addressof(packed)) == 0
    return output


def plain(call: dict, hidden_of, out_of, factors=(None, None), biases=(None, None)) -> torch.Tensor:
    """Return the sum over slots in float64; ``hidden_of`` and ``out_of`` round hidden values and outputs of experts."""
    x, ids = call["input"].double(), call["token_selected_experts"].long() - FIRST
    total = torch.zeros_like(x)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        e = int(ids[token, slot])
        if not 0 <= e < LOCAL:
            continue
        f1, f2 = (1.0 if f is None else f[e].double() for f in factors)
        b1, b2 = (0.0 if b is None else b[e].double() for b in biases)
        up, gate = (call["fc1_expert_weights"][e].double() @ x[token] * f1 + b1).chunk(2)
        h = hidden_of(torch.nn.functional.silu(gate) * up, e)
        y = out_of(call["fc2_expert_weights"][e].double() @ h * f2) + b2
        total[token] += y * call["token_final_scales"][token, slot].double()
    return total


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("kernel, tokens, top_k", [(FEW_BF16, 1, 3), (FEW_BF16, 19, 2), (TILES_BF16, 150, 2)])
def test_bf16(library, kernel, tokens, top_k):
    """The error is that of the places where values are rounded: hidden values, outputs of experts, the sum."""
    call = dense(tokens, 136, 72, LOCAL, top_k, "cpu", total=LOCAL + FIRST + 1)
    biases = ((torch.randn(LOCAL, 144)).to(BF16), (torch.randn(LOCAL, 136)).to(BF16))
    out = run(library, kernel, call, BF16, biases=biases).double()
    exact = plain(call, lambda h, e: h, lambda y: y, biases=biases)
    rounded = plain(call, lambda h, e: h.to(BF16).double(), lambda y: y.to(BF16).double(), biases=biases)
    assert rms(out - exact) <= 1.02 * rms(rounded.to(BF16).double() - exact)
    assert torch.equal(out.isnan(), torch.zeros_like(out, dtype=torch.bool))


def test_more_pairs_than_threads(library):
    """Each thread of the first kernel sorts four pairs."""
    call = dense(70, 64, 40, LOCAL, 4, "cpu", total=LOCAL + FIRST + 1)
    out = run(library, FEW_BF16, call, BF16)
    torch.testing.assert_close(out.double(), plain(call, lambda h, e: h, lambda y: y), rtol=1e-2, atol=1e-2)


def test_many_slots(library):
    """More slots than the unrolled loops have steps."""
    call = dense(5, 64, 40, LOCAL, 11, "cpu", total=16)
    out = run(library, FEW_BF16, call, BF16)
    torch.testing.assert_close(out.double(), plain(call, lambda h, e: h, lambda y: y), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("out_type", [BF16, FP16])
def test_fp8(library, out_type):
    """Sums of raw codes leave the range of fp16: factors of experts are applied before the rounding."""
    call = fp8(21, 144, 80, LOCAL, 2, device="cpu", per_expert=False)
    call["token_selected_experts"] = torch.randint(0, LOCAL + FIRST + 1, (21, 2), dtype=torch.int32)
    factor1, quantizer, factor2, _ = call["quant_scales"]
    out = run(library, FEW_FP8, call, out_type, scales=(factor1, quantizer, factor2))
    to_code = lambda h, e: (h * quantizer).clamp(-448, 448).to(E4M3).double()  # noqa: E731
    expected = plain(call, to_code, lambda y: y.to(out_type).double(), factors=(factor1, factor2))
    # A hidden value near the middle of two codes may fall to either, an eighth away.
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * rms(expected))


@pytest.mark.parametrize("has_constants", [False, True])
def test_blocks_quantised_by_product_1(library, has_constants):
    """Codes and scales are those of the kernel of activations, bit by bit."""
    rows, experts, hidden, inner = 31, 5, 384, 256
    ids = torch.tensor([0] * 9 + [1] * 8 + [3] * 13 + [4], dtype=torch.int32)
    offsets = torch.tensor([int((ids < e).sum()) for e in range(experts + 1)], dtype=torch.int32)
    x, fc1 = torch.randn(rows, hidden).to(E4M3), torch.randn(experts, 2 * inner, hidden).to(E4M3)
    x[3] = 0
    token_scales = torch.rand(hidden // 128, rows) / 16
    weight_scales = torch.rand(experts, 2 * inner // 128, hidden // 128) + 0.5
    bias = torch.randn(experts, 2 * inner).to(BF16) if has_constants else None
    constants = [torch.rand(experts) + 1 if has_constants else None for _ in ("alpha", "beta", "limit")]
    sums = torch.full((rows, 2 * inner), torch.nan, dtype=BF16)
    results = []
    for through in (None, sums):
        codes = torch.full((rows, inner), 77, dtype=torch.uint8)
        scales = torch.full((inner // 128, rows), torch.nan)
        tensors = [x, fc1, ids, torch.arange(rows, dtype=torch.int32), offsets, token_scales, weight_scales]
        fields = [rows, experts, hidden, inner, *(t.data_ptr() for t in tensors)]
        fields += [0 if t is None else t.data_ptr() for t in (bias, through, codes, scales, *constants)]
        packed = (ctypes.c_int64 * len(fields))(*fields)
        assert library.call("hidden_blocks", ctypes.addressof(packed)) == 0
        results.append((codes, scales))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not results[0][1].isnan().any() and results[0][0].float().std() > 1


@pytest.mark.parametrize("kernel, tokens", [(FEW_BF16, 9), (TILES_BF16, 150), (FEW_FP8, 9)])
def test_nan_stays_nan(library, kernel, tokens):
    """With a limit, in the epilogue of GEMM 1: results that depend on NaN are NaN, the others are what they were."""
    sizes = (tokens, 144, 80, LOCAL, 2)
    call = fp8(*sizes, device="cpu", per_expert=False) if kernel == FEW_FP8 else dense(*sizes, "cpu")
    call["token_selected_experts"] += FIRST
    call, limit = biased(call, 80), torch.full((LOCAL,), 1.5)
    scales = call["quant_scales"][:3] or (None, None, None)

    def results(x: dict) -> torch.Tensor:
        biases = (x["fc1_expert_biases"], x["fc2_expert_biases"])
        return run(library, kernel, x, BF16, scales=scales, biases=biases, limit=limit)

    clean = results(call)
    for place in ("token", "up", "gate bias", "down"):
        changed, mask = poisoned(call, place, first=FIRST)
        out = results(changed)
        assert torch.equal(out.isnan(), mask) and torch.equal(out[~mask], clean[~mask]), place
    high, infinite = (results(poisoned(call, "gate bias", x, FIRST)[0]) for x in (1e30, torch.inf))
    assert torch.equal(high, infinite) and bool(high.isfinite().all())
