# SPDX-License-Identifier: Apache-2.0
"""Products in the contiguous and masked layouts of DeepGEMM, and the low-level names."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer import deep_gemm, gemm
from flashinfer.trace.templates import gemm_groupwise

from .scaled import BF16, close, factors, fp8, poisoned


def contiguous(groups: list[int], device: str, n: int = 136, k: int = 256) -> dict:
    """Make a call with the given group of each 128 rows."""
    rows = 128 * len(groups)
    indices = torch.tensor(groups, dtype=torch.int32, device=device).repeat_interleave(128)
    return {
        "a": fp8(rows, k, device=device),
        "b": fp8(3, n, k, device=device),
        "a_scale": factors(rows, -(-k // 128), device=device),
        "b_scale": factors(3, -(-n // 128), -(-k // 128), device=device),
        "m_indices": indices,
    }


@pytest.mark.parametrize("k", [256, 144])
def test_contiguous(k, device):
    arguments = contiguous([0, 2, 2], device, k=k)
    out = poisoned(384, 136, device=device)
    assert gemm.group_deepgemm_fp8_nt_groupwise(*arguments.values(), (1, 128, 128), out) is out
    close(out, gemm_groupwise.group_deepgemm_fp8_nt_groupwise_trace.reference(**arguments))


def test_contiguous_leaves_padding_alone(device):
    arguments = contiguous([1, -1, 0], device)
    arguments["m_indices"][100:128] = -1  # the end of a group that is no multiple of 128
    out = torch.full((384, 136), 7.0, dtype=BF16, device=device)
    gemm.group_deepgemm_fp8_nt_groupwise(**arguments, out=out)
    expected = gemm_groupwise.group_deepgemm_fp8_nt_groupwise_trace.reference(**arguments)
    close(out[:100], expected[:100])
    close(out[256:], expected[256:])
    assert (out[128:256] == 7).all() or (out[128:256] == 0).all()


def test_contiguous_without_rows(device):
    arguments = contiguous([], device)
    assert gemm.group_deepgemm_fp8_nt_groupwise(**arguments).shape == (0, 136)


@pytest.mark.parametrize("transposed", [False, True], ids=["row_major", "k_block_major"])
def test_masked(transposed, device):
    a, b = fp8(3, 20, 256, device=device), fp8(3, 136, 256, device=device)
    a_scale = factors(3, 2, 20, device=device).mT if transposed else factors(3, 20, 2, device=device)
    b_scale = factors(3, 2, 2, device=device)
    counts = torch.tensor([20, 0, 7], dtype=torch.int32, device=device)
    out = poisoned(3, 20, 136, device=device)
    returned = gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, counts, 9, (1, 128, 128), out)
    assert returned is out
    expected = gemm_groupwise.batch_deepgemm_fp8_nt_groupwise_trace.reference(a, b, a_scale, b_scale, counts)
    for group, count in enumerate(counts.tolist()):
        close(out[group, :count], expected[group, :count])


def test_low_level_names(device):
    arguments = contiguous([0, 1], device)
    expected = gemm.group_deepgemm_fp8_nt_groupwise(**arguments)
    a, b, a_scale, b_scale, m_indices = arguments.values()
    out = poisoned(256, 136, device=device)
    assert deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, m_indices) is None
    assert torch.equal(out, expected)
    counts = torch.tensor([256], dtype=torch.int32, device=device)
    out = poisoned(1, 256, 136, device=device)
    one = (b[:1], b_scale[:1])
    deep_gemm.m_grouped_fp8_gemm_nt_masked((a[None], a_scale[None]), one, out, counts, 256, (1, 128, 128))
    close(out[0, :128], expected[:128])
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 128
    assert [deep_gemm.get_tma_aligned_size(5, size) for size in (1, 2, 4)] == [16, 8, 8]


CONTIGUOUS_ERRORS = [
    ({"a": lambda x: x.to(torch.float8_e5m2)}, "a must be float8_e4m3fn, got torch.float8_e5m2"),
    ({"b": lambda x: x.bfloat16()}, "b must be float8_e4m3fn, got torch.bfloat16"),
    ({"m_indices": lambda x: x.long()}, "m_indices must be int32, got torch.int64"),
    ({"m_indices": lambda x: x[:-1]}, "m_indices must be contiguous with shape (128,), got shape (127,)"),
    ({"a": lambda x: x.T.contiguous().T}, "major_a must be KMajor"),
    ({"b": lambda x: x.mT.contiguous().mT}, "major_b must be KMajor"),
    ({"a": lambda x: x[None]}, "a must have shape (m, k), got (1, 128, 256)"),
    ({"b": lambda x: x[0]}, "b must have shape (groups, n, k), got (136, 256)"),
    ({"a": lambda x: x[:, :128]}, "a and b must have the same k, got 128 and 256"),
    ({"a_scale": lambda x: x.T}, "a_scale must have shape (128, 2)"),
    ({"out_dtype": torch.float16}, "d must be bfloat16"),
    ({"out_dtype": torch.float32}, "Unsupported output dtype"),
    ({"out": lambda _: torch.empty(136, 128, dtype=BF16).T}, "d must be row-major"),
    ({"scale_granularity_mnk": (1, 128, 64)}, "scale_granularity_mnk must be (1, 128, 128), got (1, 128, 64)"),
]


@pytest.mark.parametrize("changes, text", CONTIGUOUS_ERRORS)
def test_texts_of_the_contiguous_form(changes, text):
    arguments = contiguous([1], "cpu")
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name)) if callable(change) else change
    with pytest.raises(ValueError, match=re.escape(text)):
        gemm.group_deepgemm_fp8_nt_groupwise(**arguments)


def test_texts_of_the_masked_form():
    a, b = fp8(2, 4, 128, device="cpu"), fp8(2, 8, 128, device="cpu")
    scales = factors(2, 4, 1, device="cpu"), factors(2, 1, 1, device="cpu")
    counts = torch.tensor([4, 4], dtype=torch.int32)
    masked = gemm.batch_deepgemm_fp8_nt_groupwise
    with pytest.raises(ValueError, match="expected_m must be positive, got 0"):
        masked(a, b, *scales, counts, 0)
    with pytest.raises(ValueError, match="masked_m must be int32"):
        masked(a, b, *scales, counts.long(), 4)
    with pytest.raises(ValueError, match="masked_m must be contiguous with shape"):
        masked(a, b, *scales, counts[:1], 4)
    with pytest.raises(
        ValueError, match=re.escape("a must have shape (2, m, k), as many groups as b, got (1, 4, 128)")
    ):
        masked(a[:1], b, *scales, counts, 4)
