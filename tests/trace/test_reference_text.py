# SPDX-License-Identifier: Apache-2.0
"""A committed definition suffices to make a call and to validate it: the emitted text agrees with the op."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from flashinfer.jit import cpu_targets
from flashinfer.trace import default_check

from .calls import CUDA_ONLY, DEFINITIONS, NAMES, NO_CALL, Call, dtype_of, load, named, tensors_of


def limits_of(call: Call, device: str) -> dict[str, float]:
    """Return limits of the check, where the rounding of a machine is coarser than the published tolerance."""
    if call.name.startswith("single_"):
        if device == "cuda":
            return {"rtol": 2e-2, "atol": 2e-2}  # as in tests/attention: probabilities are bfloat16, too
        if "avx512_bf16" in cpu_targets.cpu_flags():
            # Matrix registers multiply bfloat16 only, so probabilities p are rounded: each by up to 2^-8 p, half of a
            # step just above a power of 2, the result by up to 2^-8 of the largest value. Then reference and result
            # are rounded to bfloat16: by up to 2^-8 of each.
            return {"rtol": 2**-7, "atol": 2**-8 * float(call.inputs["v"].abs().max())}
    # The published tolerance for norms and single requests is tighter than one rounding step of bfloat16.
    return {"max_mismatch_pct": 1.0} if re.search("_(norm|single)_check", call.definition.get("check", "")) else {}


def check_sizes_and_types(call: Call, outputs: dict[str, Any]) -> None:
    """Check that outputs have the shapes and element types of the definition."""
    for name, value in outputs.items():
        entry = call.definition["outputs"][name]
        sizes = [call.axes[axis] for axis in entry["shape"]]  # None if no input has the axis
        value = tensors_of(value)[0]
        assert len(sizes) == value.ndim
        assert [size for size in sizes if size is not None] == [
            size for size, expected in zip(value.shape, sizes, strict=True) if expected is not None
        ]
        assert value.dtype == dtype_of(entry)


def check_reference(call: Call, expected: dict[str, Any]) -> None:
    """Check that the reference of the template returns the same bits as the text did, after the same seed."""
    reference = call.template.reference
    known = call.axes.keys() - call.inputs.keys()
    fixed = {name: call.axes[name] for name in inspect.signature(reference).parameters if name in known}
    dtypes = {f"{n}_dtype": dtype_of(e) for n, e in call.definition["outputs"].items()}
    fixed |= {name: dtypes[name] for name in inspect.signature(reference).parameters if name in dtypes}
    torch.manual_seed(0)  # some draw tokens
    outputs = named(call.definition, reference(**call.reference_arguments(), **fixed))
    for name, value in expected.items():
        for one, other in zip(tensors_of(value), tensors_of(outputs[name]), strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_definitions_without_a_call_exist():
    assert NO_CALL.keys() <= NAMES


@DEFINITIONS
def test_text_is_the_reference_and_the_op_agrees(name, device):
    """Run the text of a definition once, and compare the definition, the reference and the op with its outputs."""
    call = load(name, device)
    torch.manual_seed(0)  # some draw tokens
    expected = call.expected()
    check_sizes_and_types(call, expected)
    check_reference(call, expected)
    if device == "cpu" and call.name in CUDA_ONLY:
        return
    check = call._function("check", "check") if "check" in call.definition else default_check
    limits = limits_of(call, device)
    if device == "cuda" and call.name == "fp8_blockscale_gemm_sm90":
        # The tensor cores keep 13 bits of sums of 8-bit products, relative to the largest term.
        limits = {"rtol": 2**-7, "atol": 2**-12 * max(float(x.abs().max()) for x in expected.values())}
    tied = inspect.signature(check).parameters.keys() & {"logits", "seq_lens", "top_k"}  # to accept any of equals
    assert check(expected, call.actual(), **limits, **{name: call.inputs[name] for name in tied})


@pytest.mark.parametrize("error, is_accepted", [(0.0, True), (2**-6, False)])
def test_limits_of_a_cpu_that_multiplies_bfloat16(monkeypatch, error, is_accepted):
    """Round probabilities to bfloat16 as such a CPU does: its limits accept that, and no larger error."""
    call = load("single_decode_h32_kv8_d128", "cpu")
    q, k, v = (call.inputs[name].float() for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
    weights = (k @ q.unsqueeze(-1)).squeeze(-1).mul(q.shape[-1] ** -0.5)
    p = (weights - weights.amax(-1, keepdim=True)).exp()
    out = (p.bfloat16().float().unsqueeze(1) @ v).squeeze(1) / p.sum(-1, keepdim=True)
    out = out + error * v.abs().max()
    expected, got = call.expected(), {"output": out.bfloat16()}
    check = call._function("check", "check")
    monkeypatch.setattr(cpu_targets, "cpu_flags", lambda: frozenset())
    assert not check(expected, got, **limits_of(call, "cpu"))  # the published tolerance, for CPUs that do not round
    monkeypatch.setattr(cpu_targets, "cpu_flags", lambda: frozenset(["avx512_bf16"]))
    assert check(expected, got, **limits_of(call, "cpu")) == is_accepted
