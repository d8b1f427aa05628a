# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of experts: values, skipped pairs, order of sums, tables of addresses, errors."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer import fused_moe
from flashinfer._runtime.errors import ArgumentError
from flashinfer.fused_moe import (
    bgmv_moe,
    bgmv_moe_expand,
    bgmv_moe_gemm1_lora_delta,
    bgmv_moe_gemm2_lora_delta,
    bgmv_moe_shrink,
    fill_w_ptr,
)
from flashinfer.testing import assert_close
from flashinfer.trace.templates import bgmv_moe as templates

from ..attention.launches import kernels
from ..graphs import capture
from .adapters import EXPERTS, LORAS, TOKENS, bank, pairs_of, table

HALVES = [torch.float16, torch.bfloat16]
# rank and features: whole vectors; more than one part of shared memory and of a block; neither in vectors
SIZES = [(16, 64), (136, 264), (5, 37)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rank, features", SIZES)
@pytest.mark.parametrize("per_pair", [False, True])
def test_shrink(device, dtype, rank, features, per_pair):
    banks = [bank(rank, features, device, dtype) for _ in range(2)]
    w_ptr, stride = table(device, *banks)
    by = pairs_of(device)
    x = torch.randn(18 if per_pair else TOKENS, features, device=device).to(dtype)
    for y_dtype in (torch.float32, dtype):
        y = torch.randn(2, 18, rank, device=device).to(y_dtype)
        call = {"x": x, "w_ptr": w_ptr, **by, "lora_stride": stride, "per_pair_input": per_pair}
        expected = templates.bgmv_moe_shrink_trace.reference(y=y, **call)
        before = y.clone()
        assert bgmv_moe_shrink(y, **call) is None
        assert_close(y, expected)
        assert torch.equal(y[:, [0, 3, 5]], before[:, [0, 3, 5]])  # skipped


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rank, features", SIZES)
@pytest.mark.parametrize("finalize", [True, False])
def test_expand(device, dtype, rank, features, finalize):
    w_ptr, stride = table(device, *(bank(features, rank, device, dtype) for _ in range(2)))
    by = pairs_of(device)
    for x_dtype in (torch.float32, dtype):
        call: dict[str, Any] = {
            "x": torch.randn(2, 18, rank, device=device).to(x_dtype),
            "w_ptr": w_ptr,
            **by,
            "topk_weights": torch.rand(18, device=device),
            "slice_start_loc": torch.tensor([3, features + 4], device=device),
            "output_slices": [features, features],
            "lora_stride": stride,
            "finalize": finalize,
        }
        y = torch.randn(TOKENS if finalize else 18, 2 * features + 5, device=device)
        before = y.clone()
        expected = templates.bgmv_moe_expand_trace.reference(y=y, **call)
        bgmv_moe_expand(y, **call)
        assert_close(y, expected)
        assert torch.equal(y[:, :3], before[:, :3])
        skipped = [2, TOKENS - 1] if finalize else [0, 3, 5]
        assert torch.equal(y[skipped], before[skipped])


def test_sums_of_a_token_have_the_order_of_its_pairs(device):
    """Check the order: 1e8 and -1e8 cancel before 1 is added, not after; and the same bits come twice."""
    ones = torch.ones(1, 1, 1, 1, device=device, dtype=torch.bfloat16)
    w_ptr = torch.zeros(1, 1, dtype=torch.int64, device=device)
    stride = fill_w_ptr(w_ptr, ones, 1, 0)
    for values, total in (([1e8, -1e8, 1.0], 1.0), ([1e8, 1.0, -1e8], 0.0)):
        y, zeros = torch.zeros(1, 1, device=device), torch.zeros(3, dtype=torch.int64, device=device)
        x = torch.ones(1, 3, 1, device=device)
        weights = torch.tensor(values, device=device)
        bgmv_moe_expand(y, x, w_ptr, zeros, zeros, weights, zeros[:1], zeros[:1], [1], stride)
        assert y.item() == total


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_both_matrices_of_slices_of_different_sizes(device, dtype):
    by = pairs_of(device)
    a, b = [bank(16, 48, device, dtype) for _ in range(2)], [bank(n, 16, device, dtype) for n in (40, 24)]
    x, weights = torch.randn(TOKENS, 48, device=device).to(dtype), torch.rand(18, device=device)
    out = bgmv_moe(x, a, b, *by.values(), weights, EXPERTS, output_dim=70)
    expected = templates.bgmv_moe_trace.reference(x, a[0], b[0], *by.values(), weights, a[1], b[1], 70)
    assert out.dtype == dtype
    assert_close(out, expected)
    assert bool((out[[2, TOKENS - 1]] == 0).all()) and bool((out[:, 64:] == 0).all())
    assert torch.equal(out, bgmv_moe(x, a, b, *by.values(), weights, EXPERTS, output_dim=70))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_gemm1_delta(device, is_fused, index_dtype):
    hidden, inner, rank, dtype = 64, 40, 16, torch.float16
    a = [bank(rank, hidden, device, dtype) for _ in range(1 if is_fused else 2)]
    b = [bank(2 * inner, rank, device, dtype)] if is_fused else [bank(inner, rank, device, dtype) for _ in range(2)]
    (w_a, stride_a), (w_b, stride_b) = table(device, *a), table(device, *b)
    if is_fused:
        w_a, w_b = w_a[0], w_b[0]
    ids = torch.randint(0, EXPERTS, (TOKENS, 2), device=device).to(index_dtype)
    loras = torch.tensor([0, 1, -1, 2, 0, -1, 1], device=device, dtype=index_dtype)
    x = torch.randn(TOKENS, hidden, device=device).to(dtype)
    call = (x, w_a, stride_a, w_b, stride_b, ids, loras, rank, inner)
    options: dict[str, Any] = {"lora_dtype": dtype, "scale": 0.5, "out_dtype": torch.float32}
    out = bgmv_moe_gemm1_lora_delta(*call, **options)
    assert out.shape == (TOKENS, 2, 2 * inner) and out.dtype == torch.float32
    assert_close(out, templates.bgmv_moe_gemm1_lora_delta_trace.reference(*call, **options))
    assert bool((out[2] == 0).all()) and bool((out[0] != 0).any())


def test_gemm2_delta(device):
    hidden, inner, rank = 64, 40, 16
    w_a, stride_a = table(device, bank(rank, inner, device, torch.bfloat16))
    w_b, stride_b = table(device, bank(hidden, rank, device, torch.bfloat16))
    ids = torch.randint(0, EXPERTS, (TOKENS, 2), device=device).int()
    loras = torch.tensor([0, 1, -1, 2, 0, -1, 1], device=device)
    rows = torch.randperm(2 * TOKENS, device=device).int()
    rows[1] = -1
    x = torch.randn(2 * TOKENS, inner, device=device).bfloat16()
    weights = torch.rand(TOKENS, 2, device=device)
    call = (x, rows, w_a[0], stride_a, w_b, stride_b, ids, weights, loras, rank, hidden)
    out = bgmv_moe_gemm2_lora_delta(*call, scale=2.0)
    assert out.dtype == torch.bfloat16
    assert_close(out, templates.bgmv_moe_gemm2_lora_delta_trace.reference(*call, scale=2.0))
    assert bool((out[2] == 0).all())


def test_views_of_banks(device):
    """Check a bank whose experts and adapters are not adjacent: a part of a larger tensor, at an odd address."""
    wide = torch.randn(LORAS, EXPERTS + 1, 16 * 32 + 3, device=device).bfloat16()
    a = wide[:, 1:, 1 : 16 * 32 + 1].unflatten(2, (16, 32))
    w_ptr, stride = table(device, a)
    by, x = pairs_of(device), torch.randn(TOKENS, 32, device=device).bfloat16()
    by["sorted_token_ids"][1], by["expert_ids"][1], by["lora_indices"][4] = 4, 3, 1
    y = torch.zeros(1, 18, 16, device=device)
    bgmv_moe_shrink(y, x, w_ptr, **by, lora_stride=stride)
    assert stride == a.stride(0)
    assert_close(y[0, 1], a[1, 3].float() @ x[4].float())
    b = wide.flip(0)[:, :-1, 3 : 16 * 32 + 3].unflatten(2, (32, 16))  # both products, without a table
    weights = torch.rand(18, device=device)
    out = bgmv_moe(x, [a], [b], *by.values(), weights, EXPERTS)
    assert_close(out, templates.bgmv_moe_trace.reference(x, a, b, *by.values(), weights))
    assert torch.equal(out, bgmv_moe(x, [a], [b.contiguous()], *by.values(), weights, EXPERTS))


def test_tables_keep_their_banks_alive(device):
    import weakref

    first, second = bank(4, 8, device, torch.float16), bank(4, 8, device, torch.float16)
    seen = [weakref.ref(first), weakref.ref(second)]
    w_ptr, _ = table(device, first, second)
    del first, second
    assert all(ref() is not None for ref in seen)
    assert w_ptr[1].tolist() == [seen[1]()[0, e].data_ptr() for e in range(EXPERTS)]
    del w_ptr
    assert all(ref() is None for ref in seen)


def test_templates_can_make_their_inputs(device):
    for api in (bgmv_moe, bgmv_moe_gemm1_lora_delta, bgmv_moe_gemm2_lora_delta):
        template = getattr(templates, f"{api.__name__}_trace")
        inputs = template.init(num_tokens=5, device=device)
        made = api(**inputs)
        for name in ("a", "b"):
            if f"lora_{name}_weights" in inputs:
                inputs[f"lora_{name}"] = inputs.pop(f"lora_{name}_weights")[0]
        assert_close(made, template.reference(**inputs))
    for api in (bgmv_moe_shrink, bgmv_moe_expand):
        template = getattr(templates, f"{api.__name__}_trace")
        inputs = template.init(pairs=11, device=device)
        expected = template.reference(**inputs)
        api(**inputs)
        assert_close(inputs["y"], expected)


def test_nothing(device):
    w_ptr, stride = table(device, bank(16, 32, device, torch.bfloat16))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    y = torch.zeros(1, 0, 16, device=device)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, device=device)
    bgmv_moe_shrink(y, x, w_ptr, none, none, none, stride)
    a, b = bank(4, 32, device, torch.bfloat16), bank(8, 4, device, torch.bfloat16)
    weights = torch.zeros(0, device=device)
    assert bgmv_moe(x, [a], [b], none, none, none, weights, EXPERTS).shape == (0, 8)
    assert fused_moe.has_bgmv_moe() is True


def calls_of_both_products(device: str) -> dict[Any, tuple[Any, ...]]:
    """Calls of the functions that launch both kernels, with arguments as an engine has them."""
    hidden, inner, rank = 48, 40, 16
    a, b = bank(rank, hidden, device, torch.bfloat16), bank(inner, rank, device, torch.bfloat16)
    (w_a, stride_a), (w_b, stride_b) = table(device, a, a), table(device, b, b)
    by, x = pairs_of(device), torch.randn(TOKENS, hidden, device=device).bfloat16()
    ids = torch.randint(0, EXPERTS, (TOKENS, 2), device=device).int()
    loras, rows = by["lora_indices"].int(), torch.randperm(2 * TOKENS, device=device).int()
    weights, per_row = torch.rand(18, device=device), torch.randn(2 * TOKENS, hidden, device=device).bfloat16()
    strides = (w_a[0], stride_a, w_b[0], stride_b)
    return {
        bgmv_moe: (x, [a, a], [b, b], *by.values(), weights, EXPERTS, 100),
        bgmv_moe_gemm1_lora_delta: (x, w_a, stride_a, w_b, stride_b, ids, loras, rank, inner),
        bgmv_moe_gemm2_lora_delta: (per_row, rows, *strides, ids, torch.rand_like(ids.float()), loras, rank, inner),
    }


def test_calls_are_two_launches_and_no_kernel_of_torch(device, monkeypatch):
    """Check what a call costs: a native call per slice, two kernels each, and memory."""
    module = sys.modules["flashinfer.fused_moe.bgmv_moe"]  # the function of that name hides it
    native, launched = module._native_apply[device == "cuda"], []
    monkeypatch.setitem(module._native_apply, device == "cuda", lambda *args: (launched.append(1), native(*args)))

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    for api, arguments in calls_of_both_products(device).items():
        seen: set[str] = set()
        launched.clear()
        with Calls():
            api(*arguments)
        assert len(launched) == (2 if api is bgmv_moe else 1)  # two slices of bgmv_moe, which may differ in size
        assert seen <= {"aten::empty", "aten::empty_strided", "aten::new_empty"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_and_kernels():
    """Check that a capture works, and that the GPU runs two kernels for each slice and no other."""
    for api, arguments in calls_of_both_products("cuda").items():
        expected = api(*arguments)
        graph, made = capture(lambda: api(*arguments))  # noqa: B023
        made.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, expected)
        names = kernels(lambda: api(*arguments))  # noqa: B023
        assert len(names) == (4 if api is bgmv_moe else 2) and all("Bgmv" in name for name in names)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_pairs_of_a_token_are_found_in_their_order(device, monkeypatch, index_dtype):
    """Check the same bits from pairs that the kernel searches and from pairs that were sorted before."""
    module = sys.modules["flashinfer.fused_moe.bgmv_moe"]
    by = {name: ids.to(index_dtype) for name, ids in pairs_of(device, 700).items()}
    a, b = bank(16, 48, device, torch.bfloat16), bank(40, 16, device, torch.bfloat16)
    x, weights = torch.randn(TOKENS, 48, device=device).bfloat16(), torch.rand(700, device=device)
    out = bgmv_moe(x, [a], [b], *by.values(), weights, EXPERTS)
    assert_close(out, templates.bgmv_moe_trace.reference(x, a, b, *by.values(), weights))
    monkeypatch.setattr(module, "_SEARCHED_PAIRS", 0)
    assert torch.equal(out, bgmv_moe(x, [a], [b], *by.values(), weights, EXPERTS))


def test_few_pairs_of_many_tokens_and_views(device):
    """Check tokens without pairs, and arguments that are copied first: another dtype, or not contiguous."""
    w_a, stride_a = table(device, bank(8, 32, device, torch.bfloat16))
    w_b, stride_b = table(device, bank(64, 8, device, torch.bfloat16))
    ids = torch.randint(0, EXPERTS, (2, TOKENS), device=device).t()
    rows, loras = torch.arange(2 * TOKENS, device=device), torch.arange(2 * TOKENS, device=device)[::2] % LORAS
    x, weights = torch.randn(2 * TOKENS, 32, device=device), torch.rand(2, TOKENS, device=device).t().half()
    call = (x, rows, w_a[0], stride_a, w_b[0], stride_b, ids, weights, loras, 8, 64)
    out = bgmv_moe_gemm2_lora_delta(*call, out_dtype=torch.float32)
    assert_close(out, templates.bgmv_moe_gemm2_lora_delta_trace.reference(*call, out_dtype=torch.float32), atol=1e-2)
    none, no_weights = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    a, b = bank(8, 32, device, torch.bfloat16), bank(64, 8, device, torch.bfloat16)
    empty = bgmv_moe(x.bfloat16(), [a], [b], none, none, rows * 0, no_weights, EXPERTS, output_dim=70)
    assert empty.shape == (2 * TOKENS, 70) and bool((empty == 0).all())


@pytest.mark.parametrize("api", [bgmv_moe, bgmv_moe_gemm1_lora_delta, bgmv_moe_gemm2_lora_delta])
def test_compiles_to_one_graph(device, api):
    arguments = calls_of_both_products(device)[api]
    compiled = torch.compile(api, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), api(*arguments))


def test_errors(device):
    good = bank(16, 32, device, torch.bfloat16)
    w_ptr, stride = table(device, good)
    by = pairs_of(device)
    x, y = torch.randn(TOKENS, 32, device=device).bfloat16(), torch.zeros(1, 18, 16, device=device)
    with pytest.raises(ValueError, match=r"fill_w_ptr: weights must be \(max_loras, 4, rows, columns\)"):
        fill_w_ptr(w_ptr, good, 4, 0)
    with pytest.raises(ValueError, match="fill_w_ptr: weights must be contiguous in the last two dimensions"):
        fill_w_ptr(w_ptr, good.transpose(2, 3), EXPERTS, 0)
    with pytest.raises(ValueError, match=r"fill_w_ptr: w_ptr must be \(more than 1, 5\) int64, got \(1, 5\)"):
        fill_w_ptr(w_ptr, good, EXPERTS, 1)
    with pytest.raises(ValueError, match=r"bgmv_moe_shrink: x must be .*, got float32"):
        bgmv_moe_shrink(y, x.float(), w_ptr, **by, lora_stride=stride)
    with pytest.raises(ValueError, match=r"bgmv_moe_shrink: expert_ids must be int64.*, got int32"):
        bgmv_moe_shrink(y, x, w_ptr, **{**by, "expert_ids": by["expert_ids"].int()}, lora_stride=stride)
    with pytest.raises(ValueError, match=r"bgmv_moe_shrink: x.shape\[0\] must be 18.*, got 7"):
        bgmv_moe_shrink(y, x, w_ptr, **by, lora_stride=stride, per_pair_input=True)
    out, weights = torch.zeros(TOKENS, 16, device=device), torch.rand(18, device=device)
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    tail = (by["lora_indices"], starts)
    head = (w_ptr, by["sorted_token_ids"], by["expert_ids"], weights)
    with pytest.raises(ValueError, match=r"bgmv_moe_expand: output_slices must be 1 equal numbers, got \[16, 16\]"):
        bgmv_moe_expand(out, y, *head, *tail, [16, 16], stride)
    with pytest.raises(ValueError, match=r"bgmv_moe_expand: output_slices\[0\] must be from 0 to 16 .*, got 32"):
        bgmv_moe_expand(out, y, *head, *tail, [32], stride)
    with pytest.raises(ValueError, match="bgmv_moe_expand: x must be float16 or bfloat16"):
        bgmv_moe_expand(out, y, w_ptr.clone(), *head[1:], *tail, [16], stride)
    with pytest.raises(ValueError, match="bgmv_moe: output_dim must be at least 8"):
        b = bank(8, 16, device, torch.bfloat16)
        bgmv_moe(x, [good], [b], *by.values(), weights, EXPERTS, output_dim=4)
    with pytest.raises(ValueError, match="bgmv_moe: lora_a_weights and lora_b_weights must have one bank per slice"):
        bgmv_moe(x, [good], [], *by.values(), weights, EXPERTS)
    with pytest.raises(ValueError, match=r"lora_dtype must be torch\.float16 or torch\.bfloat16, got torch\.float32"):
        ids = torch.zeros(TOKENS, 2, dtype=torch.int32, device=device)
        bgmv_moe_gemm1_lora_delta(
            x, w_ptr, stride, w_ptr, stride, ids, by["lora_indices"], 16, 8, lora_dtype=torch.float32
        )


def test_errors_of_both_products(device):
    """Check that what the launcher of both kernels refuses is named as the caller knows it."""
    calls = calls_of_both_products(device)
    call = dict(enumerate(calls[bgmv_moe]))
    both = {
        "bgmv_moe: expert_ids must be int32 or int64, got float32": {4: call[4].float()},
        r"bgmv_moe: sorted_token_ids.shape\[0\] must be 18 \(expert_ids.shape\[0\]\), got 17": {3: call[3][1:]},
        r"bgmv_moe: lora_indices.shape\[0\] must be 7 \(x.shape\[0\]\), got 6": {5: call[5][1:]},
        "bgmv_moe: topk_weights must be float32, got float16": {6: call[6].half()},
        "bgmv_moe: topk_weights must have 18 elements, got 17": {6: call[6][1:]},
    }
    for text, change in both.items():
        with pytest.raises(ValueError, match=text):
            bgmv_moe(*(call | change).values())
    call = dict(enumerate(calls[bgmv_moe_gemm1_lora_delta]))
    gemm1 = {
        r"bgmv_moe_gemm1_lora_delta: hidden_states must have at least 7 rows .*, got 6": {0: call[0][1:]},
        r"bgmv_moe_gemm1_lora_delta: w_ptr_a must be \(num_experts,\) or .* with 1 or 2 slices": {
            1: call[1].repeat(2, 1)
        },
        "bgmv_moe_gemm1_lora_delta: w_ptr_b must have the two slices of w_ptr_a": {3: call[3][0]},
        "bgmv_moe_gemm1_lora_delta: w_ptr_b must be int64, got int32": {3: call[3].int()},
        "bgmv_moe_gemm1_lora_delta: lora_ids must have 1 dimension, got 2": {6: call[6][:, None]},
    }
    for text, change in gemm1.items():
        with pytest.raises(ValueError, match=text):
            bgmv_moe_gemm1_lora_delta(*(call | change).values())
    call = dict(enumerate(calls[bgmv_moe_gemm2_lora_delta]))
    gemm2 = {
        "bgmv_moe_gemm2_lora_delta: expanded_idx_to_permuted_idx must have 14 elements": {1: call[1][1:]},
        r"bgmv_moe_gemm2_lora_delta: lora_ids.shape\[0\] must be 7 .*, got 6": {8: call[8][1:]},
        "bgmv_moe_gemm2_lora_delta: topk_weights must have 14 elements, got 7": {7: call[7][:, :1]},
    }
    for text, change in gemm2.items():
        with pytest.raises(ValueError, match=text):
            bgmv_moe_gemm2_lora_delta(*(call | change).values())


@pytest.mark.parametrize("adapter", [LORAS, LORAS + 1, 1 << 31, 1 << 62])
@pytest.mark.parametrize("name", ["bgmv_moe", "shrink", "expand", "gemm1", "gemm2"])
def test_adapters_that_the_banks_do_not_have(device, name, adapter):
    """Check that nothing behind the banks is read: the CPU refuses the number, CUDA takes it for no adapter."""
    inner, hidden, rank = 40, 48, 16
    a, b = bank(rank, hidden, device, torch.bfloat16), bank(inner, rank, device, torch.bfloat16)
    (w_a, stride_a), (w_b, stride_b) = table(device, a), table(device, b)
    tokens, experts = torch.arange(4, device=device), torch.tensor([0, 1, 2, 3], device=device)
    x, weights = torch.randn(4, hidden, device=device).bfloat16(), torch.rand(4, device=device)
    low, zero = torch.randn(1, 4, rank, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    of_tables = (w_a, stride_a, w_b, stride_b, experts[:, None])

    def call(adapters: torch.Tensor) -> torch.Tensor:
        if name == "bgmv_moe":
            return bgmv_moe(x, [a], [b], tokens, experts, adapters, weights, EXPERTS)
        if name == "gemm1":
            return bgmv_moe_gemm1_lora_delta(
                x, *table(device, a, a), *table(device, b, b), experts[:, None], adapters, rank, inner
            ).view(4, -1)
        if name == "gemm2":
            return bgmv_moe_gemm2_lora_delta(x, tokens, *of_tables, weights[:, None], adapters, rank, inner)
        y = torch.zeros(1, 4, rank, device=device) if name == "shrink" else torch.zeros(4, inner, device=device)
        if name == "shrink":
            bgmv_moe_shrink(y, x, w_a, tokens, experts, adapters, stride_a)
        else:
            bgmv_moe_expand(y, low, w_b, tokens, experts, weights, adapters, zero, [inner], stride_b)
        return y.view(4, -1)

    adapters = torch.tensor([0, adapter, -1, LORAS - 1], device=device)
    if device == "cpu":
        text = r"must be less than 3 \(adapters of the banks\), got " + f"{adapter} for token 1"
        with pytest.raises(ArgumentError, match=text):
            call(adapters)
    else:
        assert torch.equal(call(adapters), call(torch.tensor([0, -1, -1, LORAS - 1], device=device)))
    assert bool((call(torch.tensor([0, 1, -1, LORAS - 1], device=device))[[0, 1, 3]] != 0).any(1).all())


def test_banks_with_other_numbers_of_adapters(device):
    a, b = bank(16, 48, device, torch.bfloat16), bank(40, 16, device, torch.bfloat16)
    by, x, weights = pairs_of(device), torch.randn(TOKENS, 48, device=device).bfloat16(), torch.rand(18, device=device)
    text = r"bgmv_moe: lora_b_weights must have 3 adapters \(lora_a_weights\), got 2"
    with pytest.raises(ArgumentError, match=text):
        bgmv_moe(x, [a], [b[:2]], *by.values(), weights, EXPERTS)
    none = torch.full_like(by["lora_indices"], -1)
    assert bgmv_moe(x, [a[:0]], [b[:0]], *list(by.values())[:2], none, weights, EXPERTS).eq(0).all()
    if device == "cpu":
        with pytest.raises(ArgumentError, match="lora_indices must be less than 0"):
            bgmv_moe(x, [a[:0]], [b[:0]], *list(by.values())[:2], none + 1, weights, EXPERTS)
    else:
        assert bgmv_moe(x, [a[:0]], [b[:0]], *list(by.values())[:2], none + 1, weights, EXPERTS).eq(0).all()


def _gemm2_delta(device, dtype=torch.bfloat16, experts=(EXPERTS, EXPERTS), rank=8, width=32, hidden=64, stride=None):
    a = torch.ones(LORAS, experts[0], 8, 32, dtype=dtype, device=device)
    b = torch.ones(LORAS, experts[1], 64, 8, dtype=dtype, device=device)
    tables = [torch.zeros(1, n, dtype=torch.int64, device=device) for n in experts]
    strides = [fill_w_ptr(t, w, w.shape[1], 0) for t, w in zip(tables, (a, b), strict=True)]
    ids, rows = torch.tensor([[0, 3], [1, 2]], device=device), torch.arange(4, device=device)
    return bgmv_moe_gemm2_lora_delta(
        *(torch.ones(4, width, dtype=torch.bfloat16, device=device), rows),
        *(tables[0], strides[0] if stride is None else stride, tables[1], strides[1]),
        *(ids, torch.full((2, 2), 0.5, device=device), torch.zeros(2, dtype=torch.int64, device=device)),
        rank=rank,
        hidden_size=hidden,
    )


@pytest.mark.parametrize(
    "change, text",
    [
        (
            {"dtype": torch.float16},
            r"w_ptr_a must have the addresses of matrices \(8, 32\) in bfloat16, got .* float16",
        ),
        ({"experts": (2, 4)}, r"w_ptr_b must have 2 experts \(w_ptr_a\), got 4"),
        (
            {"rank": 16},
            r"w_ptr_a must have the addresses of matrices \(16, 32\) in bfloat16, got \(8, 32\) in bfloat16",
        ),
        ({"width": 65}, r"w_ptr_a must have the addresses of matrices \(8, 65\) .*, got \(8, 32\)"),
        ({"hidden": 63}, r"w_ptr_b must have the addresses of matrices \(63, 8\) .*, got \(64, 8\)"),
        ({"stride": 8 * 32}, "lora_stride_a must be 1280, which fill_w_ptr returned, got 256"),
        ({"rank": -1}, "rank must be at least 0, got -1"),
        ({"hidden": -1}, "hidden_size must be at least 0, got -1"),
    ],
)
def test_tables_of_other_banks(device, change, text):
    """Check the banks that a table remembers, wherever a call would read them as something else."""
    assert _gemm2_delta(device)[:, 0].tolist() == [256.0, 256.0]
    with pytest.raises(ArgumentError, match=f"bgmv_moe_gemm2_lora_delta: {text}"):
        _gemm2_delta(device, **change)


def test_tables_of_other_banks_in_single_products(device):
    w_ptr, stride = table(device, bank(16, 32, device, torch.bfloat16), bank(16, 32, device, torch.bfloat16))
    by, x = pairs_of(device), torch.randn(TOKENS, 32, device=device).bfloat16()
    y = torch.zeros(2, 18, 16, device=device)
    wrong = [
        (torch.zeros(2, 18, 8, device=device), x, stride, r"w_ptr must have the addresses of matrices \(8, 32\)"),
        (y, x[:, :31].contiguous(), stride, r"w_ptr must have .* \(16, 31\) in bfloat16, got \(16, 32\) in bfloat16"),
        (y, x.half(), stride, r"w_ptr must have .* in float16, got \(16, 32\) in bfloat16"),
        (y, x, stride + 1, "lora_stride must be 2560, which fill_w_ptr returned, got 2561"),
    ]
    for y_bad, x_bad, stride_bad, text in wrong:
        with pytest.raises(ArgumentError, match=f"bgmv_moe_shrink: {text}"):
            bgmv_moe_shrink(y_bad, x_bad, w_ptr, **by, lora_stride=stride_bad)
    weights, starts = torch.rand(18, device=device), torch.tensor([0, 16], device=device)
    out, tail = torch.zeros(TOKENS, 64, device=device), (by["lora_indices"], starts)
    head = (w_ptr, by["sorted_token_ids"], by["expert_ids"], weights)
    text = r"bgmv_moe_expand: w_ptr must have the addresses of matrices \(8, 32\) in bfloat16, got \(16, 32\)"
    with pytest.raises(ArgumentError, match=text):
        bgmv_moe_expand(out, torch.zeros(2, 18, 32, device=device), *head, *tail, [8, 8], stride)
    bgmv_moe_shrink(y, x, w_ptr.clone(), **by, lora_stride=stride)  # a copy remembers nothing
    fill_w_ptr(w_ptr, bank(8, 32, device, torch.bfloat16), EXPERTS, 1)  # a table of which one row was filled anew
    with pytest.raises(ArgumentError, match=r"w_ptr must .*, got banks that differ in shape, stride or"):
        bgmv_moe_shrink(y, x, w_ptr, **by, lora_stride=stride)


def test_matrices_that_only_the_second_table_has(device):
    """Check a table without a matrix, whose product the second one would read: memory that nobody wrote."""
    (w_a, stride_a), (w_b, stride_b) = (
        table(device, bank(*size, device, torch.bfloat16)) for size in ((16, 32), (64, 16))
    )
    w_a[0, 2] = 0
    junk = [torch.full((1, 6, 16), float("nan"), device=device) for _ in range(50)]
    del junk  # so that freed memory is not zero
    ids, loras = torch.tensor([[2, 1]] * 3, device=device), torch.tensor([1, 0, -1], device=device)
    x, weights = torch.randn(6, 32, device=device).bfloat16(), torch.ones(3, 2, device=device)
    rows = torch.arange(6, device=device)
    call = (x, rows, w_a, stride_a, w_b, stride_b, ids, weights, loras, 16, 64)
    out = bgmv_moe_gemm2_lora_delta(*call)
    assert_close(out, templates.bgmv_moe_gemm2_lora_delta_trace.reference(*call))
    assert bool((out[:2] != 0).any(1).all())


def test_tokens_are_checked_in_all_slices():
    """Check a table whose first row has no matrices: the number of a token is out of range all the same."""
    w_ptr, stride = table("cpu", *(bank(16, 32, "cpu", torch.bfloat16) for _ in range(2)))
    w_ptr[0] = 0
    ids = torch.tensor([5])
    x, y = torch.ones(3, 32, dtype=torch.bfloat16), torch.zeros(2, 1, 16)
    with pytest.raises(ArgumentError, match=r"rows must be less than 3 \(x.shape\[0\]\), got 5 for pair 0"):
        bgmv_moe_shrink(y, x, w_ptr, ids, ids - 4, torch.zeros(6, dtype=torch.int64), stride)


@pytest.mark.parametrize(
    "slice_id, weights, text",
    [
        (-1, torch.zeros(1, EXPERTS, 8, 32).half(), "slice_id must be at least 0, got -1"),
        (0, torch.zeros(1, EXPERTS, 8, 32, device="meta").half(), "weights must have memory .* cpu, got meta"),
    ],
)
def test_banks_without_a_row_or_memory(slice_id, weights, text):
    w_ptr = torch.zeros(2, EXPERTS, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=f"fill_w_ptr: {text}"):
        fill_w_ptr(w_ptr, weights, EXPERTS, slice_id)
    assert not hasattr(w_ptr, "banks") and not w_ptr.any()


def test_saved_tables_have_no_banks(device, tmp_path):
    """Check that files and deep copies have the addresses only, and are tables with unknown banks."""
    w_ptr, stride = table(device, bank(64, 128, device, torch.bfloat16))
    torch.save(w_ptr, tmp_path / "table")
    assert (tmp_path / "table").stat().st_size < 4096
    for copied in (torch.load(tmp_path / "table", weights_only=True), copy.deepcopy(w_ptr)):
        assert not copied.banks and torch.equal(copied, w_ptr)
        y, by = torch.zeros(1, 18, 64, device=device), pairs_of(device)
        bgmv_moe_shrink(y, torch.ones(TOKENS, 128, device=device).bfloat16(), copied, **by, lora_stride=stride)
        assert bool(y.any())
