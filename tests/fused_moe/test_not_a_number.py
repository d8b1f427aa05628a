# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in each place of a layer: whichever kernel serves a number of tokens, NaN stays NaN.

A limit of SwiGLU cuts infinity off, but must not turn NaN into a number (include/flashinfer/moe/swiglu.h).
"""

from __future__ import annotations

import functools

import pytest
import torch

from flashinfer.fused_moe import ActivationType, cutlass_fused_moe

from .layers import PLACES, biased, dense, fp8, fp8_block, int4_fp8, mxfp4, mxfp4_fp8, poisoned

EXPERTS, INNER = 4, 384
FORMATS = {
    "bf16": dense,
    "e4m3": functools.partial(fp8, per_expert=False),
    "e4m3-blocks": fp8_block,
    "mxfp4": mxfp4,
    "mxfp4-e4m3": mxfp4_fp8,
    "int4-e4m3": int4_fp8,
}
#: One kernel for a token, one for few, weights on the M side of the products, and tokens on the M side.
TOKENS = (1, 5, 19, 300)
ACTIVATIONS = {
    "swiglu": {},
    "limited": {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 1.5},
    "step": {"activation_type": ActivationType.SwigluStep, "swiglu_limit": 1.5},
}


def layer(name: str, tokens: int, device: str) -> dict:
    made = FORMATS[name](tokens, 256, INNER, EXPERTS, 2, device=device)
    call = biased(made[0] if isinstance(made, tuple) else made, INNER)
    return {**call, "output_dtype": torch.bfloat16}


def run(call: dict, activation: str) -> torch.Tensor:
    device = call["input"].device
    constants = {
        name: torch.full((EXPERTS,), x, device=device) if isinstance(x, float) else x
        for name, x in ACTIVATIONS[activation].items()
    }
    return cutlass_fused_moe(**call, **constants)[0]


def served(device: str, name: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0) and name not in ("bf16", "e4m3"):
        pytest.skip("other GPUs refuse the format")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_nan(device, name, tokens):
    """All results that depend on the number are NaN, the others are what they were."""
    served(device, name)
    call = layer(name, tokens, device)
    has_numbers = call["fc1_expert_weights"].is_floating_point() and not name.startswith(("mxfp4", "int4"))
    places = [place for place in PLACES if has_numbers or place not in ("up", "gate", "down")]
    for activation in ACTIVATIONS:
        clean = run(call, activation)
        assert bool(clean.isfinite().all())
        for place in places:
            changed, mask = poisoned(call, place)
            out = run(changed, activation)
            assert torch.equal(out.isnan(), mask), (activation, place)
            assert torch.equal(out[~mask], clean[~mask]), (activation, place)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", FORMATS)
def test_infinity_is_limited(device, name, tokens):
    """Infinity is what any number above the limit is."""
    served(device, name)
    call = layer(name, tokens, device)
    for activation in ("limited", "step"):
        for place, sign in (("gate bias", 1), ("up bias", 1), ("up bias", -1)):
            out, expected = (run(poisoned(call, place, sign * x)[0], activation) for x in (torch.inf, 1e30))
            assert bool(out.isfinite().all()) and torch.equal(out, expected), (activation, place)


@pytest.mark.parametrize("tokens", TOKENS)
def test_infinity_without_a_limit(device, tokens):
    call = layer("bf16", tokens, device)
    for place in PLACES:
        changed, mask = poisoned(call, place, torch.inf)
        out = run(changed, "swiglu")
        assert torch.equal(~out.isfinite(), mask), place
