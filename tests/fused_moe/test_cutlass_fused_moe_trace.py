# SPDX-License-Identifier: Apache-2.0
"""Definitions of ``cutlass_fused_moe``: the text of each reference, run on recorded inputs alone, against the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.fused_moe import ActivationType, cutlass_fused_moe
from flashinfer.trace.definition import input_value
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace

from .layers import close, dense, fp8, fp8_block

SIZES = (19, 128, 256, 3, 2)


def recorded(call: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that the definition of a call has; those that the call leaves out have their defaults."""
    inputs = cutlass_fused_moe_trace(**call).inputs.items()
    values = {name: input_value(name, spec, call) for name, spec in inputs}
    return {name: x for name, x in values.items() if x is not None or name == "token_final_scales"}


def text_of(call: dict[str, Any]) -> Any:
    """Return the function that the definition of a call carries as text."""
    scope: dict[str, Any] = {}
    exec(cutlass_fused_moe.fi_trace(**call)["reference"], scope)
    return scope["run"]


def vector(low: float, high: float) -> torch.Tensor:
    """Return a number for each expert, all of them different."""
    return torch.linspace(low, high, SIZES[3])


EIGHT_BITS = {
    "dense": lambda: dense(*SIZES, "cpu"),
    "fp8": lambda: fp8(*SIZES, device="cpu", per_expert=False),
    "fp8_block": lambda: fp8_block(*SIZES, device="cpu"),
}


@pytest.mark.parametrize("make", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_constants_of_situ_are_inputs(make):
    call = {**make(), "activation_type": ActivationType.Situ}
    call |= {"situ_beta": vector(0.25, 0.5), "situ_linear_beta": vector(1.0, 2.0)}
    close(cutlass_fused_moe(**call)[0], text_of(call)(**recorded(call)))


@pytest.mark.parametrize("make", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_biases_that_a_call_lacks_have_the_dtype_that_the_op_takes(make):
    inputs = cutlass_fused_moe.fi_trace(**make())["inputs"]
    assert {inputs[name]["dtype"] for name in ("fc1_expert_biases", "fc2_expert_biases")} == {"bfloat16"}
