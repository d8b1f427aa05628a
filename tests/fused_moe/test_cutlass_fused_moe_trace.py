# SPDX-License-Identifier: Apache-2.0
"""Definitions of ``cutlass_fused_moe``: the text of each reference, run on recorded inputs alone, against the op.

On the CPU; ``tests/trace`` runs the committed definitions on each device.
"""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import pytest
import torch

from flashinfer.fi_trace import dump_call
from flashinfer.fused_moe import ActivationType, cutlass_fused_moe
from flashinfer.fused_moe.cutlass.formats import Format, format_of
from flashinfer.trace import Tensor
from flashinfer.trace.definition import input_value
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace
from flashinfer.trace.templates.fused_moe_w4_layout import int4_weights, mxfp4_weights, shifted_mxfp4_weights

from .layers import E4M3, FP16, close, dense, fp8, fp8_block, int4_fp8, mxfp4, mxfp4_fp8

SIZES = (19, 128, 256, 3, 2)  # 2 and 4 blocks of 64 rows, 1 and 2 of 128 columns


def recorded(call: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that the definition of a call has, without numbers that the call leaves out."""
    specs = cutlass_fused_moe_trace(**call).inputs
    values = {name: input_value(name, spec, call) for name, spec in specs.items()}
    return {name: x for name, x in values.items() if x is not None or isinstance(specs[name], Tensor)}


def text_of(call: dict[str, Any]) -> Any:
    """Return the function that the definition of a call carries as text."""
    scope: dict[str, Any] = {}
    exec(cutlass_fused_moe.fi_trace(**call)["reference"], scope)
    return scope["run"]


def vector(low: float, high: float) -> torch.Tensor:
    """Return a number for each expert, all of them different."""
    return torch.linspace(low, high, SIZES[3])


def biases(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return biases of the size of the sums."""
    return {"fc1_expert_biases": torch.randn(3, 512).to(dtype), "fc2_expert_biases": torch.randn(3, 128).to(dtype)}


def constants() -> dict[str, torch.Tensor]:
    """Return constants that change most values, and differ from expert to expert."""
    return {
        "swiglu_alpha": vector(0.5, 1.7),
        "swiglu_beta": vector(0.5, 1.0),
        "swiglu_limit": vector(0.75, 1.5),
    }


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


PREFIXES = {
    Format.PLAIN: "cutlass_fused_moe",
    Format.FP8_TENSOR: "cutlass_fused_moe_fp8",
    Format.FP8_BLOCK: "cutlass_fused_moe_fp8_block",
    Format.MXFP4: "cutlass_fused_moe_mxfp4",
    Format.INT4_FP8: "cutlass_fused_moe_int4_fp8",
    Format.MXFP4_FP8: "cutlass_fused_moe_mxfp4_fp8",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, E4M3, torch.uint8])
def test_the_template_is_that_of_the_format_of_the_op(dtype):
    weight = torch.empty(2, 128, 64, dtype=dtype, device="meta")
    names = ("use_deepseek_fp8_block_scale", "use_w4_group_scaling", "use_packed_weights", "use_wfp4afp8_humming")
    for values in itertools.product((False, True), repeat=len(names)):
        flags = dict(zip(names, values, strict=True))
        chosen = cutlass_fused_moe_trace(fc1_expert_weights=weight, quant_scales=[], **flags).prefix
        assert chosen == PREFIXES[format_of(dtype, **flags)], flags


@pytest.mark.parametrize("quant, prefix", [((), ""), ((1,), ""), ((3,), "_per_expert")])
def test_the_template_of_e4m3_weights_is_that_of_the_shape_of_the_scale(quant, prefix):
    """A scale of one element is one for all; the fourth of the scales is not read and may have any shape."""
    call = fp8(*SIZES, device="cpu", per_expert=False)
    call["quant_scales"][1], call["quant_scales"][3] = torch.full(quant, 32.0), torch.ones(3)
    made = cutlass_fused_moe.fi_trace(**call)
    assert made["name"] == f"cutlass_fused_moe_fp8{prefix}_topk2_e3_h128_i256"
    assert made["inputs"]["fc2_quant"]["shape"] == (["num_local_experts"] if prefix else [])
    close(cutlass_fused_moe(**call)[0], text_of(call)(**recorded(call)))


def test_prepared_weights_are_read_back():
    """Compare with the values that the weights were made of, bit by bit; scales in each dtype that callers give."""
    call, values = mxfp4(*SIZES, device="cpu", span=20)
    for name, scale in zip(("fc1", "fc2"), call["quant_scales"], strict=True):
        for view in (scale, scale.view(torch.int32)):
            assert torch.equal(mxfp4_weights(call[f"{name}_expert_weights"], view), values[name])
    call, values = mxfp4_fp8(*SIZES, device="cpu")
    (offset1, factor1, _, offset2, factor2), names = call["quant_scales"], ("fc1", "fc2")
    for name, offset, factor in zip(names, (offset1, offset2), (factor1, factor2), strict=True):
        for view in (offset, offset.view(torch.uint8)):
            weights = shifted_mxfp4_weights(call[f"{name}_expert_weights"], view)
            assert torch.equal(weights, weights.to(E4M3).float())
            assert torch.equal(weights * factor.view(-1, 1, 1), values[name])
    call, values = int4_fp8(*SIZES, device="cpu")
    scales1, scales2, *_, alpha1, alpha2 = call["quant_scales"]
    for name, scale, alpha in zip(names, (scales1, scales2), (alpha1, alpha2), strict=True):
        for view in (scale, scale.view(FP16)):
            weights = int4_weights(call[f"{name}_expert_weights"], view)
            assert torch.equal(weights * alpha.view(-1, 1, 1), values[name])


def per_expert() -> dict[str, Any]:
    """Return a call whose hidden values have scales so different that one for all would not do."""
    call = fp8(*SIZES, device="cpu", per_expert=True)
    unread = call["quant_scales"][3]
    return {**call, "quant_scales": [vector(0.5, 1.5) / 1024, vector(2.0, 128.0), vector(1.5, 0.5) / 2048, unread]}


def int4() -> dict[str, Any]:
    """Return a call with int4 weights, whose experts have factors that are all different."""
    call = int4_fp8(*SIZES, device="cpu")[0]
    return {**call, "quant_scales": [*call["quant_scales"][:6], vector(0.5, 1.5), vector(1.5, 0.5)]}


def as_fp16(call: dict[str, Any]) -> dict[str, Any]:
    """Return an int4 call in fp16; its scales and factors are bits of bf16 numbers."""
    scales = [x.view(FP16) if x.dtype is torch.bfloat16 else x for x in call["quant_scales"]]
    return {**call, "input": call["input"].to(FP16), "output_dtype": FP16, "quant_scales": scales}


def without_acts(call: dict[str, Any]) -> dict[str, Any]:
    """Return an int4 call without factors of columns, and with None for what is not read."""
    nothing = torch.empty(0, dtype=torch.bfloat16)
    scale1, scale2, *_, alpha1, alpha2 = call["quant_scales"]
    return {**call, "quant_scales": [scale1, scale2, nothing, nothing, None, None, alpha1, alpha2]}


def as_bytes(call: dict[str, Any]) -> dict[str, Any]:
    """Return an fp16 call whose offsets are bytes; the scale that is not read is one per expert."""
    scales = [x.view(torch.uint8) if x.dtype is torch.int32 else x for x in call["quant_scales"]]
    scales[2] = torch.ones(3)
    return {**call, "input": call["input"].to(FP16), "output_dtype": FP16, "quant_scales": scales}


def ungated(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with the first half of the rows of fc1, and an activation of one half."""
    rows, first, *scales = call["fc1_expert_weights"].shape[1] // 2, *call["quant_scales"]
    if first.ndim == 5:
        first = first[:, : rows // 64].contiguous()
    half = {"fc1_expert_weights": call["fc1_expert_weights"][:, :rows].contiguous(), "quant_scales": [first, *scales]}
    return {**call, **half, "activation_type": int(ActivationType.Relu2)}


def rewritten() -> dict[str, Any]:
    """Return a call with MXFP4 weights for e4m3 activations, whose factors are no powers of two and all different."""
    call = mxfp4_fp8(*SIZES, device="cpu")[0]
    offset1, factor1, unread, offset2, factor2 = call["quant_scales"]
    return {**call, "quant_scales": [offset1, factor1 * vector(0.6, 1.1), unread, offset2, factor2 * vector(1.1, 0.6)]}


NEW = {
    "fp8_per_expert": per_expert,
    "mxfp4": lambda: mxfp4(*SIZES, device="cpu")[0],
    "int4_fp8": int4,
    "int4_fp8 in fp16": lambda: as_fp16(int4()),
    "int4_fp8 without factors": lambda: without_acts(int4()),
    "mxfp4_fp8": rewritten,
    "mxfp4_fp8 in fp16": lambda: as_bytes(rewritten()),
}
FORMATS = ["fp8_per_expert", "mxfp4", "int4_fp8", "mxfp4_fp8"]


def agrees(call: dict[str, Any], out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return what the check of the template says, with as much as results of tens may differ by a step of bf16."""
    size = float(expected.float().square().mean().sqrt())
    return cutlass_fused_moe_trace(**call).check(expected, out, rtol=1e-2, atol=1e-2 * size)


@pytest.mark.parametrize("more", ["", "biases", "constants", "situ", "relu2"])
@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_the_text_and_the_op_agree(make, more):
    """With each optional input; ``constants`` on a rank that adds no biases 2, with tokens of another rank."""
    call = make()
    if more == "biases":
        call |= {**biases(call["output_dtype"]), "token_final_scales": None}
    elif more == "constants":
        call |= {**biases(call["output_dtype"]), **constants()}
        call |= {"ep_size": 2, "ep_rank": 1, "tp_size": 2, "tp_rank": 1}
        call["token_selected_experts"] += 2
    elif more == "situ":
        call |= {"activation_type": ActivationType.Situ}
        call |= {"situ_beta": vector(0.25, 0.5), "situ_linear_beta": vector(1.0, 2.0)}
    elif more == "relu2":
        call = ungated(call)
    out, expected = cutlass_fused_moe(**call)[0], text_of(call)(**recorded(call))
    assert out.dtype == expected.dtype == call["output_dtype"]
    assert agrees(call, out, expected)


CHANGES = {
    "biases 1": lambda inputs: {"fc1_expert_biases": None},
    "biases 2": lambda inputs: {"fc2_expert_biases": None},
    "rank of biases 2": lambda inputs: {"tp_rank": 1},
    "alpha": lambda inputs: {"swiglu_alpha": None},
    "beta": lambda inputs: {"swiglu_beta": None},
    "limit": lambda inputs: {"swiglu_limit": None},
    "scales of tokens": lambda inputs: {"token_final_scales": None},
    "rank of experts": lambda inputs: {"ep_rank": 1},
    "experts 1": lambda inputs: {"fc1_expert_weights": inputs["fc1_expert_weights"].flip(0)},
    "experts 2": lambda inputs: {"fc2_expert_weights": inputs["fc2_expert_weights"].flip(0)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", FORMATS)
def test_each_input_counts(name, change):
    call = {**NEW[name](), **biases(), **constants()}
    out, inputs = cutlass_fused_moe(**call)[0], recorded(call)
    run = text_of(call)
    assert agrees(call, out, run(**inputs)) and not agrees(call, out, run(**{**inputs, **change(inputs)}))


@pytest.mark.parametrize("name", FORMATS)
def test_each_scale_counts(name):
    """Reverse the order of each dimension: experts, blocks, and the places inside a block."""
    call = NEW[name]()
    out, inputs = cutlass_fused_moe(**call)[0], recorded(call)
    run, template = text_of(call), cutlass_fused_moe_trace(**call)
    read = [n for n, spec in template.inputs.items() if spec.param == "quant_scales" and not getattr(spec, "unread", 0)]
    read += [n for n in ("fc1_act", "fc2_act") if name == "int4_fp8"]
    assert len(read) == {"fp8_per_expert": 3, "mxfp4": 2, "int4_fp8": 6, "mxfp4_fp8": 4}[name]
    for scale in read:
        for dim in (dim for dim, size in enumerate(inputs[scale].shape) if size > 1):
            changed = {**inputs, scale: inputs[scale].flip(dim)}
            assert not agrees(call, out, run(**changed)), (scale, dim)


@pytest.mark.parametrize("chosen", FORMATS[1:])
@pytest.mark.parametrize("name", FORMATS[1:])
def test_another_format_gives_other_numbers(name, chosen):
    """Read the same bytes by the reference of each four-bit format: a wrong choice cannot pass."""
    call = NEW[name]()
    out, template = cutlass_fused_moe(**call)[0], cutlass_fused_moe_trace(**NEW[chosen]())
    inputs = {n: input_value(n, spec, call) for n, spec in template.inputs.items()}
    try:
        expected = template.reference(**{n: x for n, x in inputs.items() if x is not None}, output_dtype=torch.bfloat16)
    except (RuntimeError, TypeError, ValueError):  # shapes that do not fit
        assert name != chosen
        return
    assert agrees(call, out, expected) == (name == chosen)


@pytest.mark.parametrize("name", FORMATS)
def test_a_dump_writes_the_definition(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dump_call(cutlass_fused_moe, (), NEW[name]())
    (path,) = tmp_path.iterdir()
    size = "i256" if name == "fp8_per_expert" else "pi128"
    assert path.stem == json.loads(path.read_text())["name"] == f"cutlass_fused_moe_{name}_topk2_e3_h128_{size}"


@pytest.mark.parametrize("name", FORMATS)
def test_init_makes_calls(name):
    """Experts differ, results have the size of the tokens, and the op computes them like the reference."""
    template = cutlass_fused_moe_trace(**NEW[name]())
    inner = {"intermediate_size": 256} if name == "fp8_per_expert" else {"packed_intermediate": 128}
    call = template.init(seq_len=19, num_local_experts=3, top_k=2, hidden_size=128, fc1_rows=512, **inner, device="cpu")
    assert cutlass_fused_moe_trace(**call) is template
    out = cutlass_fused_moe(**call)[0]
    assert template.check(text_of(call)(**recorded(call)), out) and 0.1 < out.float().square().mean().sqrt() < 2
