# SPDX-License-Identifier: Apache-2.0
"""LayerNorms of diffusion transformers, fused with the gated residual before and the modulation after."""

from __future__ import annotations

import pytest
import torch

from flashinfer.norm import (
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
)
from flashinfer.testing import assert_close
from flashinfer.trace.templates.norm import (
    fused_dit_gate_residual_layernorm_gamma_beta_trace,
    fused_dit_gate_residual_layernorm_scale_shift_trace,
    fused_dit_residual_layernorm_scale_shift_trace,
)

HIDDEN = 3072
TOLERANCE = {"rtol": 1.6e-2, "atol": 1e-5}  # contract: two units in the last place of bfloat16

# function, reference, all tensors, optional tensors
FORMS = {
    "gate_gamma_beta": (
        fused_dit_gate_residual_layernorm_gamma_beta,
        fused_dit_gate_residual_layernorm_gamma_beta_trace.reference,
        ("input", "residual", "gate", "gamma", "beta"),
        ("gate_bias", "input_global_scaling_factor"),
    ),
    "gate_scale_shift": (
        fused_dit_gate_residual_layernorm_scale_shift,
        fused_dit_gate_residual_layernorm_scale_shift_trace.reference,
        ("input", "residual", "gate", "scale", "shift"),
        ("gate_bias", "scale_bias", "shift_bias", "input_global_scaling_factor"),
    ),
    "scale_shift": (
        fused_dit_residual_layernorm_scale_shift,
        fused_dit_residual_layernorm_scale_shift_trace.reference,
        ("input", "scale", "shift"),
        ("residual", "scale_bias", "shift_bias", "input_global_scaling_factor"),
    ),
}
on_each_form = pytest.mark.parametrize("form", FORMS)


def tensors(device, batch=2, seq=5, rank=3):
    """Return every tensor that a form may take; gate, scale and shift are slices of one (batch, seq, 6,
    hidden) buffer.
    """
    tokens = (batch, seq) if rank == 3 else (batch * seq,)
    modulation = torch.randn(*tokens, 6, HIDDEN, device=device).bfloat16()
    made = {name: modulation[..., i, :] for i, name in ((0, "shift"), (1, "scale"), (5, "gate"))}
    made |= {name: torch.randn(batch, seq, HIDDEN, device=device).bfloat16() for name in ("input", "residual")}
    made |= {name: torch.randn(HIDDEN, device=device) for name in ("gamma", "beta", "gate_bias", "scale_bias")}
    made["shift_bias"] = torch.randn(1, HIDDEN, device=device)
    made["input_global_scaling_factor"] = torch.tensor([0.7], device=device)
    return made


def call(form, given, optional=(), **keywords):
    """Return the result of the function and of the reference."""
    function, reference, names, _ = FORMS[form]
    arguments = [given[name] for name in names]
    extra = {name: given[name] for name in optional}
    return function(*arguments, **extra, **keywords), reference(*arguments, **extra)


@on_each_form
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("batch, seq", [(0, 4), (1, 1), (1, 7), (3, 1), (2, 33)])
def test_values(device, form, batch, seq, rank):
    actual, expected = call(form, tensors(device, batch, seq, rank))
    assert_close(actual, expected, **TOLERANCE)


@on_each_form
def test_each_optional_tensor(device, form):
    given = tensors(device)
    optional = FORMS[form][3]
    for chosen in (*((name,) for name in optional), optional):
        actual, expected = call(form, given, chosen)
        assert_close(actual, expected, **TOLERANCE, name=f"{form} with {chosen}")


@on_each_form
def test_bias_of_either_rank(device, form):
    given = tensors(device)
    flat = {name: t.reshape(-1) if name.endswith("_bias") else t for name, t in given.items()}
    tall = {name: t.reshape(1, -1) if name.endswith("_bias") else t for name, t in given.items()}
    biases = [name for name in FORMS[form][3] if name.endswith("_bias")]
    for first, second in zip(call(form, flat, biases)[0], call(form, tall, biases)[0], strict=True):
        assert torch.equal(first, second)


@on_each_form
def test_buffers_are_returned(device, form):
    given = tensors(device)
    residual_out, norm_out = torch.empty_like(given["input"]), torch.empty_like(given["input"])
    actual, expected = call(form, given, residual_out=residual_out, norm_out=norm_out)
    assert actual[0] is residual_out and actual[1] is norm_out
    assert_close(actual, expected, **TOLERANCE)


@on_each_form
def test_statistics_use_the_unrounded_sum(device, form):
    """Check that the result is closer to the exact norm of the sum than to the norm of the rounded residual."""
    given = tensors(device)
    given["input"] *= 2.0**-9  # below the last bit of the residual
    (_, norm), (_, expected) = call(form, given, ("residual",) if form == "scale_shift" else ())
    assert (norm.float() - expected.float()).abs().mean() < 1e-4


@on_each_form
def test_rows_of_zeros(device, form):
    given = {name: torch.zeros_like(t) if name != "gamma" else t for name, t in tensors(device).items()}
    given |= {name: tensors(device)[name] for name in ("gate", "scale", "shift", "beta")}
    (residual_out, norm), _ = call(form, given)
    assert not residual_out.any()
    expected = given["beta"].bfloat16().expand_as(norm) if form == "gate_gamma_beta" else given["shift"]
    assert_close(norm, expected)


@on_each_form
def test_nan_stays_in_its_row(device, form):
    given = tensors(device)
    given["input"][1, 2, 17] = torch.nan
    (_, norm), (_, expected) = call(form, given)
    assert norm.isnan().flatten(0, 1).all(dim=-1).nonzero().flatten().tolist() == [1 * 5 + 2]
    assert_close(norm, expected, **TOLERANCE, equal_nan=True)


@on_each_form
def test_both_quantised_outputs(device, form):
    with pytest.raises(ValueError, match="Cannot use both"):
        call(form, tensors(device), use_nvfp4=True, use_mxfp8=True)


@on_each_form
def test_quantised_output_needs_a_later_gpu(device, form):
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0):
        pytest.skip("this device has it")
    with pytest.raises(RuntimeError, match="SM100"):
        call(form, tensors(device), use_mxfp8=True)
    with pytest.raises(RuntimeError, match="SM100"):
        call(form, tensors(device), use_nvfp4=True, global_scaling_factor=torch.ones(1, device=device))


@on_each_form
def test_nvfp4_needs_its_factor(device, form):
    with pytest.raises(ValueError, match="global_scaling_factor"):
        call(form, tensors(device), use_nvfp4=True)


def contiguous(name):
    return {name: lambda t: t.contiguous()}


BAD = {
    "hidden": ({"input": lambda t: t[..., :1024].contiguous()}, "3072"),
    "input dtype": ({"input": lambda t: t.float()}, "input .*bfloat16"),
    "input layout": ({"input": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
    "scale rows": (contiguous("scale"), "row stride"),
    "shift rows": (contiguous("shift"), "row stride"),
    "scale dtype": ({"scale": lambda t: t.float()}, "scale"),
    "scale size": ({"scale": lambda t: t[:, 1:]}, "scale"),
    "norm_out shape": ({"norm_out": lambda t: t[:, 1:]}, "norm_out shape"),
    "norm_out dtype": ({"norm_out": lambda t: t.float()}, "norm_out dtype"),
    "residual_out shape": ({"residual_out": lambda t: t[:, 1:]}, "residual_out"),
    "bias size": ({"scale_bias": lambda t: t[1:]}, "scale_bias"),
    "bias dtype": ({"shift_bias": lambda t: t.bfloat16()}, "shift_bias"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(device, case):
    given = tensors(device)
    given |= {name: torch.empty_like(given["input"]) for name in ("residual_out", "norm_out")}
    changes, text = BAD[case]
    given |= {name: change(given[name]) for name, change in changes.items()}
    names = ("residual", "scale_bias", "shift_bias", "residual_out", "norm_out")
    with pytest.raises(ValueError, match=text):
        fused_dit_residual_layernorm_scale_shift(
            given["input"], given["scale"], given["shift"], **{name: given[name] for name in names}
        )


def test_rows_of_single_token_sequences_must_be_six_apart(device):
    """Check one token per sequence: the batch dimension carries the row stride; a dense tensor would be overrun."""
    given = tensors(device, batch=3, seq=1)
    with pytest.raises(ValueError, match="row stride"):
        fused_dit_residual_layernorm_scale_shift(given["input"], given["scale"].contiguous(), given["shift"])


def test_batches_must_follow_each_other(device):
    given = tensors(device, batch=3, seq=2)
    apart = torch.randn(6, 2, 6, HIDDEN, device=device).bfloat16()[::2, :, 0]
    with pytest.raises(ValueError, match="row stride"):
        fused_dit_residual_layernorm_scale_shift(given["input"], apart, given["shift"])
