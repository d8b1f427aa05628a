# SPDX-License-Identifier: Apache-2.0
"""Block-scaled fp8 products: every layout of scales, granularities with tails, and the texts of errors."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer import gemm
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.gemm.gemm_base import pad_indptr_to_multiple_of_4
from flashinfer.trace.templates import gemm_groupwise

from .scaled import BF16, E4M3, E5M2, FP16, close, factors, fp8, poisoned, scale_of


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3, BF16), (E5M2, E4M3, FP16), (E4M3, E5M2, BF16)])
@pytest.mark.parametrize("granularity", [(1, 128, 128), (128, 128, 128), (4, 32, 64)])
@pytest.mark.parametrize("major", ["K", "MN"])
def test_dense(major, granularity, dtypes, device):
    a, b = fp8(5, 272, device=device, dtype=dtypes[0]), fp8(136, 272, device=device, dtype=dtypes[1])
    gm, gn, gk = granularity
    scales = scale_of(a, gm, gk, major), scale_of(b, gn, gk, major)
    out = poisoned(5, 136, device=device, dtype=dtypes[2])
    returned = gemm.gemm_fp8_nt_groupwise(a, b, *scales, major, 1, granularity, out)
    assert returned is out
    template = gemm_groupwise.gemm_fp8_nt_groupwise_trace.choose(scale_major_mode=major)
    close(out, template.reference(a, b, *scales, granularity, dtypes[2]))
    again = gemm.gemm_fp8_nt_groupwise(
        a, b, *scales, scale_major_mode=major, scale_granularity_mnk=granularity, out_dtype=dtypes[2]
    )
    assert torch.equal(again, out)


def test_dense_trtllm_takes_its_own_layout(device):
    a, b = fp8(5, 256, device=device), fp8(136, 256, device=device)
    a_scale, b_scale = factors(2, 5, device=device).T, scale_of(b, 128, 128, "MN")
    out = gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, backend="trtllm")
    template = gemm_groupwise.gemm_fp8_nt_groupwise_trace.choose(scale_major_mode=None)
    close(out, template.reference(a, b, a_scale, b_scale))
    with pytest.raises(ArgumentError, match="k must be at least 256 with backend 'trtllm', got 128"):
        gemm.gemm_fp8_nt_groupwise(a[:, :128], b[:, :128], a_scale[:, :1], b_scale[:1], backend="trtllm")
    with pytest.raises(ArgumentError, match=re.escape("must be (1, 128, 128) with backend 'trtllm', got (1, 1, 128)")):
        rows = factors(2, 136, device=device)
        gemm.gemm_fp8_nt_groupwise(a, b, a_scale, rows, None, 1, (1, 1, 128), backend="trtllm")


@pytest.mark.parametrize("major", ["K", "MN"])
def test_blockscaled(major, device):
    a, b = fp8(130, 128, device=device), fp8(72, 128, device=device)
    scales = scale_of(a, 128, 128, major), scale_of(b, 128, 128, major)
    out = gemm.gemm_fp8_nt_blockscaled(a, b, *scales, major)
    template = gemm_groupwise.gemm_fp8_nt_blockscaled_trace.choose(scale_major_mode=major)
    close(out, template.reference(a, b, *scales))
    assert gemm.gemm_fp8_nt_blockscaled(a, b, *scales, major, out_dtype=FP16).dtype == FP16


@pytest.mark.parametrize("bounds", [(0, 3, 3, 8), (0, 0, 0, 0), (0, 128, 130, 131)])
@pytest.mark.parametrize("major, granularity", [("MN", (1, 128, 128)), ("K", (1, 128, 128)), ("MN", (1, 8, 32))])
def test_groups_may_be_empty(major, granularity, bounds, device):
    rows = bounds[-1]
    a, b = fp8(rows, 272, device=device), fp8(3, 24, 272, device=device)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=device)
    gm, gn, gk = granularity
    scales = scale_of(a, gm, gk, major), scale_of(b, gn, gk, major)
    out = poisoned(rows, 24, device=device)
    assert gemm.group_gemm_fp8_nt_groupwise(a, b, *scales, indptr, granularity, major, 1, out) is out
    template = gemm_groupwise.group_gemm_fp8_nt_groupwise_trace.choose(scale_major_mode=major)
    close(out, template.reference(a, b, *scales, indptr, granularity))


def group_arguments(device: str) -> dict:
    a, b = fp8(8, 128, device=device), fp8(2, 16, 128, device=device)
    indptr = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    return {
        "a": a,
        "b": b,
        "a_scale": scale_of(a, 1, 128, "MN"),
        "b_scale": scale_of(b, 128, 128, "MN"),
        "m_indptr": indptr,
    }


GROUP_ERRORS = [
    ({"a": lambda x: x.bfloat16()}, "a must be a float8 tensor"),
    ({"b": lambda x: x.half()}, "b must be a float8 tensor"),
    ({"a_scale": lambda x: x.half()}, "a_scale must be a float32 tensor"),
    ({"b_scale": lambda x: x.double()}, "b_scale must be a float32 tensor"),
    ({"m_indptr": lambda x: x.long()}, "m_indptr must be a int32 tensor"),
    ({"scale_major_mode": "M"}, "scale_major_mode must be either"),
    ({"mma_sm": 3}, "mma_sm must be either"),
    ({"scale_granularity_mnk": (1, 0, 128)}, "scale_granularity_mnk must be three positive integers"),
    ({"b": lambda x: x[:, :15]}, "n must be a multiple of 8, got 15"),
    ({"a": lambda x: x[:, :120], "b": lambda x: x[:, :, :120]}, "k must be a multiple of 16, got 120"),
    ({"a": lambda x: x[:, :112]}, "Shape mismatch: a and b must have the same k, got 112 and 128"),
    ({"a": lambda x: x[0]}, "Shape mismatch: a must have shape (m, k) and b (groups, n, k)"),
    ({"m_indptr": lambda x: x[:2]}, "Shape mismatch: m_indptr must have shape (3,), got (2,)"),
    ({"a_scale": lambda x: x.mT}, "Shape mismatch: a_scale must have shape (1, 8)"),
    ({"b_scale": lambda x: x[0]}, "Shape mismatch: b_scale must have shape (2, 1, 1)"),
    ({"out_dtype": torch.float32}, "Unsupported output dtype"),
    ({"out": lambda _: torch.empty(8, 16)}, "Unsupported output dtype"),
    ({"out": lambda _: torch.empty(8, 24, dtype=BF16)}, "Shape mismatch: out must have shape (8, 16), got (8, 24)"),
    ({"out": lambda _: torch.empty(8, 16, dtype=FP16), "out_dtype": BF16}, "dtype mismatch"),
    ({"out": lambda _: torch.empty(8, 16, dtype=BF16, device="meta")}, "out must be on"),
]


@pytest.mark.parametrize("changes, text", GROUP_ERRORS)
def test_texts_of_the_grouped_form(changes, text):
    arguments = group_arguments("cpu")
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name)) if callable(change) else change
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        gemm.group_gemm_fp8_nt_groupwise(**arguments)
    assert str(caught.value).startswith("group_gemm_fp8_nt_groupwise: ")


def test_texts_of_the_dense_form():
    a, b = fp8(8, 128, device="cpu"), fp8(16, 128, device="cpu")
    scales = factors(8, 1, device="cpu"), factors(1, 1, device="cpu")
    dense = gemm.gemm_fp8_nt_groupwise
    with pytest.raises(ValueError, match="scale_major_mode is required"):
        dense(a, b, *scales)
    with pytest.raises(ValueError, match="scale_major_mode must be either"):
        dense(a, b, *scales, "N")
    with pytest.raises(ValueError, match="Unsupported output dtype"):
        dense(a, b, *scales, "K", out_dtype=torch.float32)
    with pytest.raises(ValueError, match="a must be a float8 tensor"):
        dense(a.float(), b, *scales, "K")
    with pytest.raises(BackendSupportedError, match="does not support backend 'best'"):
        dense(a, b, *scales, "K", backend="best")
    with pytest.raises(ValueError, match="b_scale must have shape"):
        dense(a, b, scales[0], factors(2, 1, device="cpu"), "K")


def test_out_wins_over_out_dtype():
    a, b = fp8(4, 128, device="cpu"), fp8(8, 128, device="cpu")
    out = torch.empty(4, 8, dtype=FP16)
    scales = factors(4, 1, device="cpu"), factors(1, 1, device="cpu")
    assert gemm.gemm_fp8_nt_groupwise(a, b, *scales, "K", out=out, out_dtype=BF16) is out


def test_scales_are_not_truncated_to_powers_of_two(device):
    a, b = (torch.ones(4, 128, device=device).to(E4M3), torch.ones(8, 128, device=device).to(E4M3))
    scale = torch.full((4, 1), 1.75, device=device)
    out = gemm.gemm_fp8_nt_groupwise(a, b, scale, torch.full((1, 1), 1.5, device=device), "K")
    assert (out == 128 * 1.75 * 1.5).all()


@pytest.mark.parametrize(
    "name", sorted({*gemm.groupwise.__all__, *gemm.deepgemm.__all__} - {"pad_indptr_to_multiple_of_4"})
)
def test_hopper_and_cpu_are_supported(name):
    function = getattr(gemm, name)
    assert function.is_compute_capability_supported(90)
    assert function.is_compute_capability_supported(0)
    assert not function.is_compute_capability_supported(75)


def test_skip_check_leaves_out_checks():
    arguments = group_arguments("cpu")
    expected = gemm.group_gemm_fp8_nt_groupwise(**arguments)
    assert torch.equal(gemm.group_gemm_fp8_nt_groupwise(**arguments, mma_sm=7, skip_check=True), expected)


def test_torch_compile_keeps_the_call_in_the_graph():
    arguments = group_arguments("cpu")
    compiled = torch.compile(lambda **x: gemm.group_gemm_fp8_nt_groupwise(**x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), gemm.group_gemm_fp8_nt_groupwise(**arguments))


def test_pad_indptr():
    padded, rows = pad_indptr_to_multiple_of_4(torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32))
    assert padded.tolist() == [0, 4, 4, 12, 16] and padded.dtype == torch.int32
    assert rows.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 12]
