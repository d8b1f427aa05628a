# SPDX-License-Identifier: Apache-2.0
"""Error messages for wrong tensors: they name the op, the argument, the actual and the expected value."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError

from ..bad_arguments import check_refused, make_arguments, pattern, with_bad

FP16, BF16 = torch.float16, torch.bfloat16
ACT_AND_MUL = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]
GOOD = {
    **{op: {"input": ((4, 256), FP16), "out": ((4, 128), FP16)} for op in ACT_AND_MUL},
    "swiglu": {"x": ((4, 128), FP16), "gate": ((4, 128), FP16), "out": ((4, 128), FP16)},
}

# (ops, argument, (shape, dtype) or a function that changes the good tensor, text)
BAD = [
    (
        ACT_AND_MUL,
        "input",
        ((4, 255), FP16),
        "input.shape[-1] must be a multiple of 8 (16 bytes of float16).*, got 255",
    ),
    (ACT_AND_MUL, "input", ((4, 250), FP16), "input.shape[-1] must be a multiple of 8.*, got 250"),
    (ACT_AND_MUL, "input", ((4, 254), torch.float32), "input.shape[-1] must be a multiple of 4.*, got 254"),
    (ACT_AND_MUL, "input", ((4, 256), torch.int32), "input must be float16.*, got int32"),
    (ACT_AND_MUL, "input", ((4, 256), torch.float64), "input must be float16.*, got float64"),
    (ACT_AND_MUL, "input", lambda t: t.repeat(1, 2)[:, ::2], "input.stride(-1) must be 1.*, got 2"),
    (ACT_AND_MUL, "out", ((4, 127), FP16), "out.shape[1] must be 128 (half of input.shape[-1]).*, got 127"),
    (ACT_AND_MUL, "out", ((4, 256), FP16), "out.shape[1] must be 128 (half of input.shape[-1]).*, got 256"),
    (ACT_AND_MUL, "out", ((5, 128), FP16), "out.shape[0] must be 4 (that of input).*, got 5"),
    (ACT_AND_MUL, "out", ((1, 4, 128), FP16), "out must have 2 dimensions.*, got 3"),
    (ACT_AND_MUL, "out", ((512,), FP16), "out must have 2 dimensions.*, got 1"),
    (ACT_AND_MUL, "out", ((4, 128), BF16), "out must be float16.*, got bfloat16"),
    (ACT_AND_MUL, "out", lambda t: t.repeat(1, 2)[:, ::2], "out.stride(-1) must be 1.*, got 2"),
    (GOOD, "out", lambda t: t[:1].expand(t.shape), "out.stride(0) must not be 0"),
    (["swiglu"], "x", ((4, 128), torch.int32), "x must be float16.*, got int32"),
    (["swiglu"], "gate", ((4, 127), FP16), "gate must have shape (4, 128) (the shape of x).*, got (4, 127)"),
    (["swiglu"], "gate", ((128,), FP16), "gate must have shape (4, 128) (the shape of x).*, got (128,)"),
    (["swiglu"], "gate", ((4, 128), BF16), "gate must be float16.*, got bfloat16"),
    (["swiglu"], "out", ((4, 64), FP16), "out must have shape (4, 128).*, got (4, 64)"),
    (["swiglu"], "out", lambda t: t.repeat(1, 2)[:, ::2], "out.stride(-1) must be 1.*, got 2"),
]
CASES = [pytest.param(op, argument, bad, text, id=f"{op}-{text}") for ops, argument, bad, text in BAD for op in ops]


@pytest.mark.parametrize("op", GOOD)
def test_the_table_starts_from_good_calls(device, op):
    getattr(flashinfer, op)(**make_arguments(GOOD[op], device))


@pytest.mark.parametrize("op, argument, bad, text", CASES)
def test_bad_argument(device, op, argument, bad, text):
    arguments = with_bad(make_arguments(GOOD[op], device), argument, bad, device)
    check_refused(getattr(flashinfer, op), text, **arguments)


@pytest.mark.parametrize("op", ACT_AND_MUL)
def test_misaligned_width_without_out(device, op):
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        getattr(flashinfer, op)(torch.ones(3, 15, device=device, dtype=FP16))


@pytest.mark.parametrize("op", ACT_AND_MUL)
def test_no_dimension(device, op):
    with pytest.raises(ArgumentError, match=f"{op}: input must have at least 1 dimension, got 0"):
        getattr(flashinfer, op)(torch.ones((), device=device, dtype=FP16))


def test_rows_at_several_distances(device):
    x = torch.ones(3, 5, 256, device=device, dtype=FP16)
    with pytest.raises(ArgumentError, match=pattern("silu_and_mul: input.stride(0) must be 3840.*, got 256")):
        flashinfer.silu_and_mul(x.transpose(0, 1)[:4])


def test_swiglu_out_of_scattered_rows(device):
    x = torch.ones(3, 5, 4, device=device)
    with pytest.raises(ArgumentError, match="swiglu: out must have rows at one distance"):
        flashinfer.swiglu(x, x, out=torch.ones(5, 3, 4, device=device).transpose(0, 1))


def test_unknown_activation():
    with pytest.raises(ArgumentError, match=r"act_func_name must be one of silu, gelu, gelu_tanh.*, got 'relu'"):
        flashinfer.activation.gen_act_and_mul_module("relu")


@pytest.mark.parametrize("op, argument", [(op, name) for op, names in GOOD.items() for name in names])
def test_other_device(device, op, argument):
    arguments = make_arguments(GOOD[op], device)
    arguments[argument] = arguments[argument].to("cpu" if torch.device(device).type == "cuda" else "meta")
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+ must be on "):
        getattr(flashinfer, op)(**arguments)
