# SPDX-License-Identifier: Apache-2.0
"""SegmentGEMMWrapper: layouts of weights, segments on either device, empty segments, rows of no segment."""

from __future__ import annotations

import re

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer._runtime.errors import ArgumentError
from flashinfer.gemm import SegmentGEMMWrapper
from flashinfer.trace.templates.gemm_grouped import segment_gemm_run_trace

FP16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def wrapper(device: str, backend: str = "auto") -> SegmentGEMMWrapper:
    return SegmentGEMMWrapper(torch.empty(1024, dtype=torch.int8, device=device), backend)


def operands(
    rows: int, num_weights: int, column_major: bool, dtype: torch.dtype, device: str, n: int = 40, k: int = 72
):
    x = torch.randn(rows, k, device=device).to(dtype)
    weights = torch.randn(num_weights, *((n, k) if column_major else (k, n)), device=device) / k**0.5
    return x, weights.to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2**-7 if actual.dtype == BF16 else 1e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3])
@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("backend", ["auto", "sm80", "sm90"])
def test_values(backend, column_major, dtype, device):
    lengths = [3, 0, 1, 20]
    x, weights = operands(24, 4, column_major, dtype, device)
    seg_lens = torch.tensor(lengths, device=device)
    out = wrapper(device, backend).run(x, weights, 4, column_major, seg_lens=seg_lens)
    assert out.dtype == (BF16 if dtype == E4M3 else dtype)
    reference = segment_gemm_run_trace.choose(weight_column_major=column_major).reference
    close(out, reference(x, weights, seg_lens))
    indptr = torch.tensor([0, 3, 3, 4, 24], device=device)
    assert torch.equal(wrapper(device).forward(x, weights, 4, column_major, None, seg_lens * 0, indptr), out)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("column_major", [True, False])
def test_weight_indices(column_major, index_dtype, device):
    x, weights = operands(12, 3, column_major, FP16, device)
    seg_lens = torch.tensor([5, 0, 3, 4], dtype=index_dtype)  # on the host, also for a GPU
    which = torch.tensor([2, 0, 2, 1], dtype=index_dtype, device=device)
    out = torch.full((12, 40), torch.nan, dtype=FP16, device=device)
    returned = wrapper(device).run(x, weights, 4, column_major, out, seg_lens, None, which)
    assert returned is out
    reference = segment_gemm_run_trace.choose(weight_column_major=column_major).reference
    close(out, reference(x, weights, seg_lens, None, which))


def test_rows_of_no_segment(device):
    x, weights = operands(10, 2, True, FP16, device)
    indptr = torch.tensor([2, 5, 8], device=device)
    out = wrapper(device).run(x, weights, 2, True, seg_indptr=indptr)
    assert (out[:2] == 0).all() and (out[8:] == 0).all()
    close(out[2:5], (x[2:5].float() @ weights[0].float().T).half())
    given = torch.full((10, 40), 7.0, dtype=FP16, device=device)
    wrapper(device).run(x, weights, 2, True, out=given, seg_indptr=indptr)
    assert (given[:2] == 7).all() and (given[8:] == 7).all()
    assert torch.equal(given[2:8], out[2:8])


def test_dtype_of_out_is_kept(device):
    x, weights = operands(4, 1, True, E5M2, device)
    out = torch.empty(4, 40, dtype=FP16, device=device)
    assert wrapper(device).run(x, weights.float().to(E4M3), 1, True, out, torch.tensor([4])).dtype == FP16
    close(out, (x.float() @ weights[0].float().to(E4M3).float().T).half())


def test_lengths_are_summed_as_integers():
    """Check lengths that fp16 cannot represent: 2049 and 4099."""
    x, weights = operands(6149, 3, True, FP16, "cpu", n=8, k=8)
    seg_lens = torch.tensor([2049, 4099, 1])
    out = wrapper("cpu").run(x, weights, 3, True, seg_lens=seg_lens)
    close(out, segment_gemm_run_trace.reference(x, weights, seg_lens))


def test_no_rows(device):
    x, weights = operands(0, 2, True, FP16, device)
    assert wrapper(device).run(x, weights, 2, True, seg_lens=torch.tensor([0, 0])).shape == (0, 40)


ERRORS = [
    ({"seg_lens": None}, "seg_lens or seg_indptr must be given, got neither"),
    ({"seg_lens": torch.tensor([1, 3, 0])}, "seg_lens must have shape (2,), got (3,)"),
    ({"seg_indptr": torch.tensor([0, 4])}, "seg_indptr must have shape (3,), got (2,)"),
    ({"out": torch.empty(4, 41, dtype=FP16)}, "out must have shape (4, 40), got (4, 41)"),
    ({"weight_indices": torch.tensor([0])}, "weight_indices must have shape (2,), got (1,)"),
    ({"weight_column_major": False}, "x must have shape (rows, d_in) and weights as many d_in, got (4, 72)"),
    ({"weights": torch.empty(3, 40, 72, dtype=FP16)}, "weights must have one matrix for each of the 2 segments"),
    ({"weight_indices": torch.tensor([0, 2])}, "weight_indices"),
    ({"seg_indptr": torch.tensor([0, 3, 5])}, "groups"),
]


@pytest.mark.parametrize("changes, text", ERRORS)
def test_texts(changes, text):
    x, weights = operands(4, 2, True, FP16, "cpu")
    call = {"x": x, "weights": weights, "batch_size": 2, "weight_column_major": True, "seg_lens": torch.tensor([1, 3])}
    with pytest.raises(ValueError, match=re.escape(text)):
        wrapper("cpu").run(**{**call, **changes})


def test_unknown_backend():
    x, weights = operands(4, 1, True, FP16, "cpu")
    with pytest.raises(ArgumentError, match=r"Unsupported gemm backend.* got 'sm70'"):
        wrapper("cpu", "sm70").run(x, weights, 1, True, seg_lens=torch.tensor([4]))


def test_backend_of_a_device(monkeypatch):
    assert utils.determine_gemm_backend(torch.device("cpu")) == "sm80"
    for capability, has_sm90a, expected in (((9, 0), True, "sm90"), ((9, 0), False, "sm80"), ((10, 0), False, "sm80")):
        monkeypatch.setattr(utils, "get_compute_capability", lambda _, found=capability: found)
        monkeypatch.setattr(utils, "is_sm90a_supported", lambda _, found=has_sm90a: found)
        assert utils.determine_gemm_backend(torch.device("cuda", 0)) == expected


def test_buffers_and_names():
    segment = wrapper("cpu")
    segment.reset_workspace_buffer(torch.empty(8), torch.empty(4))
    assert flashinfer.SegmentGEMMWrapper is SegmentGEMMWrapper
    from flashinfer.trace.templates import attention

    assert attention.segment_gemm_run_trace is segment_gemm_run_trace
