# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong tensors: they name the op, the argument, the actual and the expected value."""

from __future__ import annotations

import pytest
import torch

import flashinfer.norm

from ..bad_arguments import check_refused, make_arguments, with_bad

FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn

# Op -> arguments of a good call, name -> (shape, dtype).
RMSNORM = {"input": ((4, 4096), FP16), "weight": ((4096,), FP16)}
FUSED_ADD = {"input": ((4, 4096), FP16), "residual": ((4, 4096), FP16), "weight": ((4096,), FP16)}
LAYERNORM = {"input": ((4, 4096), BF16), "gemma": ((4096,), torch.float32), "beta": ((4096,), torch.float32)}
OUT = {"out": ((4, 4096), FP8)}
SCALE = {"scale": ((1,), torch.float32)}
GOOD = {
    "rmsnorm": {**RMSNORM, "out": ((4, 4096), FP16)},
    "gemma_rmsnorm": {**RMSNORM, "out": ((4, 4096), FP16)},
    "fused_add_rmsnorm": FUSED_ADD,
    "gemma_fused_add_rmsnorm": FUSED_ADD,
    "rmsnorm_quant": {**OUT, **RMSNORM, **SCALE},
    "fused_add_rmsnorm_quant": {**OUT, **FUSED_ADD, **SCALE},
    "layernorm": LAYERNORM,
    "layernorm_quant": {**OUT, **LAYERNORM, **SCALE},
}

# (ops, argument, (shape, dtype) or a function that changes the good tensor, text)
RMS = [op for op in GOOD if "rmsnorm" in op]
RESIDUAL = [op for op in GOOD if "fused_add" in op]
INPLACE = [op for op in RESIDUAL if "quant" not in op]
WITH_OUT = ["rmsnorm", "gemma_rmsnorm"]
QUANT = [op for op in GOOD if "quant" in op]
LAYER = ["layernorm", "layernorm_quant"]
BAD = [
    (RMS, "weight", ((4000,), FP16), "weight.shape[0] must be 4096.*, got 4000"),
    (RMS, "weight", ((1, 4096), FP16), "weight must have 1 dimension.*, got 2"),
    (RMS, "weight", ((4096,), BF16), "weight must be float16.*, got bfloat16"),
    (RMS, "weight", lambda t: t.repeat(2)[::2], "weight must be contiguous"),
    (RMS, "input", ((4096,), FP16), "input must have 2 to 3 dimensions, got 1"),
    (RMS, "input", ((1, 2, 3, 4096), FP16), "input must have 2 to 3 dimensions, got 4"),
    (RMS, "input", ((4, 4096), torch.int32), "input must be float16.*, got int32"),
    (RMS, "input", lambda t: t.repeat(1, 2)[:, ::2], "input.stride(-1) must be 1.*, got 2"),
    (WITH_OUT, "out", ((4, 4000), FP16), "out must have shape (4, 4096).*, got (4, 4000)"),
    (WITH_OUT, "out", ((5, 4096), FP16), "out must have shape (4, 4096).*, got (5, 4096)"),
    (WITH_OUT, "out", ((4, 4096), BF16), "out must be float16.*, got bfloat16"),
    (WITH_OUT, "out", lambda t: t.repeat(1, 2)[:, ::2], "out.stride(-1) must be 1.*, got 2"),
    (RESIDUAL, "residual", ((3, 4096), FP16), "residual must have shape (4, 4096).*, got (3, 4096)"),
    (RESIDUAL, "residual", ((4, 4096), BF16), "residual must be float16.*, got bfloat16"),
    (RESIDUAL, "residual", lambda t: t.repeat(1, 2)[:, ::2], "residual.stride(-1) must be 1.*, got 2"),
    (QUANT, "out", ((4, 4096), FP16), "out must be float8_e4m3fn or float8_e5m2.*, got float16"),
    (QUANT, "out", ((4, 4000), FP8), "out must have shape (4, 4096).*, got (4, 4000)"),
    (QUANT, "scale", ((2,), torch.float32), "scale must be a scalar tensor"),
    (RESIDUAL, "residual", lambda t: t[:1].expand(t.shape), "residual.stride(0) must not be 0"),
    (INPLACE, "input", lambda t: t[:1].expand(t.shape), "input.stride(0) must not be 0"),
    (WITH_OUT + QUANT, "out", lambda t: t[:1].expand(t.shape), "out.stride(0) must not be 0"),
    (QUANT, "scale", lambda t: None, "scale must be a scalar tensor of float32, got a NoneType"),
    (LAYER, "input", ((4, 4096), FP16), "input must be bfloat16"),
    (LAYER, "input", ((4, 2, 4096), BF16), "input must have 2 dimensions, got 3"),
    (LAYER, "input", lambda t: t.repeat(1, 2)[:, :4096], "input must be contiguous"),
    (LAYER, "gemma", ((4000,), torch.float32), "gemma.shape[0] must be 4096.*, got 4000"),
    (LAYER, "gemma", ((4096,), BF16), "gemma must be float32.*, got bfloat16"),
    (LAYER, "beta", ((1, 4096), torch.float32), "beta must have 1 dimension.*, got 2"),
]
CASES = [
    pytest.param(op, argument, change, text, id=f"{op}-{text}") for ops, argument, change, text in BAD for op in ops
]


@pytest.mark.parametrize("op", GOOD)
def test_the_table_starts_from_good_calls(device, op):
    getattr(flashinfer.norm, op)(**make_arguments(GOOD[op], device))


@pytest.mark.parametrize("op, argument, change, text", CASES)
def test_bad_argument(device, op, argument, change, text):
    arguments = with_bad(make_arguments(GOOD[op], device), argument, change, device)
    check_refused(getattr(flashinfer.norm, op), text, **arguments)


@pytest.mark.parametrize(
    "op, argument", [(op, name) for op, names in GOOD.items() for name in names if name != "scale"]
)
def test_other_device(device, op, argument):
    """Check a tensor on another device; scale is exempt, because it is moved."""
    arguments = make_arguments(GOOD[op], device)
    arguments[argument] = arguments[argument].to("cpu" if torch.device(device).type == "cuda" else "meta")
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+ must be on "):
        getattr(flashinfer.norm, op)(**arguments)
