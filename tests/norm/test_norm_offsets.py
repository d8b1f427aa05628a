# SPDX-License-Identifier: Apache-2.0
"""Offsets beyond 2^31 elements. Rows lie 2^31 apart in a buffer of which little is ever touched."""

from __future__ import annotations

import pytest
import torch

from flashinfer.norm import fused_add_rmsnorm, fused_add_rmsnorm_quant, rmsnorm, rmsnorm_quant
from flashinfer.testing import assert_close
from flashinfer.trace.templates.norm import (
    fused_add_rmsnorm_quant_trace,
    fused_add_rmsnorm_trace,
    rmsnorm_quant_trace,
    rmsnorm_trace,
)

from ..tensors import randn

FAR = 2**31
HIDDEN = 128


@pytest.fixture
def far_rows(device, tmp_path):
    """Return make(values), which places rows FAR elements apart. On the CPU the buffer is a sparse file."""

    def make(values: torch.Tensor) -> torch.Tensor:
        size = (values.shape[0] - 1) * FAR + values[0].numel()
        if torch.device(device).type == "cpu":
            path = str(tmp_path / f"{len(list(tmp_path.iterdir()))}.bin")
            buffer = torch.from_file(path, shared=True, size=size * values.element_size(), dtype=torch.uint8)
        else:
            buffer = torch.empty(size * values.element_size(), dtype=torch.uint8, device=device)
        view = buffer.view(values.dtype).as_strided(values.shape, (FAR, *values.stride()[1:]))
        for row, source in zip(view, values, strict=True):  # row by row: one copy of all would cover the gaps too
            row.copy_(source)
        return view

    return make


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, HIDDEN), (2, 3, HIDDEN)], ids=["rows", "heads"])
def test_rmsnorm(device, far_rows, shape, dtype):
    x, w = randn(*shape, dtype=dtype, device=device), randn(HIDDEN, dtype=dtype, device=device)
    expected = rmsnorm_trace.reference(x, w)
    view = far_rows(x)
    assert_close(rmsnorm(view, w, out=torch.empty_like(x)), expected)
    rmsnorm(view, w, out=view)
    assert_close(view, expected)


def test_fused_add_rmsnorm(device, far_rows):
    x, residual = (randn(2, HIDDEN, dtype=torch.float16, device=device) for _ in range(2))
    w = randn(HIDDEN, dtype=torch.float16, device=device)
    expected, total = fused_add_rmsnorm_trace.reference(x, residual, w)
    far_x, far_residual = far_rows(x), far_rows(residual)
    fused_add_rmsnorm(far_x, far_residual, w)
    assert_close(far_x, expected)
    assert torch.equal(far_residual, total)


def test_quantised(device, far_rows):
    x, residual = (randn(2, HIDDEN, dtype=torch.float16, device=device) for _ in range(2))
    w, scale = randn(HIDDEN, dtype=torch.float16, device=device), torch.tensor(0.5, device=device)
    out = far_rows(torch.zeros(2, HIDDEN, device=device).to(torch.float8_e4m3fn))
    far_residual = far_rows(residual)
    rmsnorm_quant(out, far_rows(x), w, scale)
    assert_close(out, rmsnorm_quant_trace.reference(x, w, scale))
    expected, total = fused_add_rmsnorm_quant_trace.reference(x, residual, w, scale)
    fused_add_rmsnorm_quant(out, x, far_residual, w, scale)
    assert_close(out, expected)
    assert torch.equal(far_residual, total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(175_000, 12_288), (16_800, 1024, 128)], ids=["rows", "heads"])
def test_more_elements_than_an_int32_counts(device, shape, dtype):
    if torch.device(device).type == "cpu":
        pytest.skip("takes 9 GB and seconds; the CPU's offsets are covered by the rows far apart")
    if torch.cuda.mem_get_info(device)[0] < 12 * 2**30:
        pytest.skip("takes 9 GB")
    x = torch.empty(shape, dtype=dtype, device=device).normal_()
    w = randn(shape[-1], dtype=dtype, device=device)
    out = rmsnorm(x, w)
    for part in (slice(0, 2), slice(shape[0] // 2, shape[0] // 2 + 2), slice(-2, None)):
        assert_close(out[part], rmsnorm_trace.reference(x[part], w))
