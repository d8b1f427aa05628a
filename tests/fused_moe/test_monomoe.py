# SPDX-License-Identifier: Apache-2.0
"""mono_moe: values, routing rules, orders of the up weight, scratchpads, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flashinfer import fused_moe
from flashinfer.fused_moe import alloc_scratchpad, interleave_for_tma_wgmma_up, mono_moe
from flashinfer.trace.templates.monomoe import mono_moe_trace

SOFTMAX, SIGMOID = mono_moe_trace.templates


def layer(tokens: int, device: str) -> dict[str, Any]:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block scales need SM90")
    sizes = {"num_experts": 6, "hidden_size": 256, "intermediate_size": 128, "up_rows": 256}
    made = SOFTMAX.init(num_tokens=tokens, device=device, **sizes)
    return {**made, "top_k": 2}


@pytest.fixture
def call(device) -> dict[str, Any]:
    return layer(3, device)


def assert_same_layer(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare. The weight is multiplied in at another place, so hidden values are rounded to e4m3 independently: each
    rounding errs by 2.6 % of the norm (6.25 % at most, uniform), the difference of two by 3.7 %.
    """
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.04, error


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_matches_reference(call, scoring_func, renormalize):
    out = mono_moe(**call, scoring_func=scoring_func, renormalize=renormalize)
    assert out.shape == (3, 256) and out.dtype == torch.bfloat16
    template = SIGMOID if scoring_func == "sigmoid" else SOFTMAX
    assert_same_layer(out, template.reference(**call, renormalize=renormalize))


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_one_token(device, scoring_func):
    """Check tokens one by one, which are one kernel each on SM90; the error is that of all of them."""
    template = SIGMOID if scoring_func == "sigmoid" else SOFTMAX
    call = layer(8, device)
    tokens = zip(call["activations_in"].split(1), call["router_logits"].split(1), strict=True)
    alone = [
        mono_moe(**{**call, "activations_in": x, "router_logits": y}, scoring_func=scoring_func) for x, y in tokens
    ]
    assert_same_layer(torch.cat(alone), template.reference(**call))


def test_other_numbers_of_tokens(device, call):
    """Check more tokens than the published kernel takes, and none."""
    many = {**call, "activations_in": torch.randn(17, 256, device=device).bfloat16()}
    many["router_logits"] = torch.randn(17, 6, device=device).bfloat16()
    assert_same_layer(mono_moe(**many), SOFTMAX.reference(**many))
    none = {**call, "activations_in": call["activations_in"][:0], "router_logits": call["router_logits"][:0]}
    assert mono_moe(**none).shape == (0, 256)


def test_ties_and_tiny_scales(device, call):
    tied = {**call, "router_logits": torch.zeros(3, 6, device=device).bfloat16()}
    assert_same_layer(mono_moe(**tied), SOFTMAX.reference(**tied))  # experts 0 and 1
    call["expert_scales_up"] = call["expert_scales_up"] * 3e-3
    assert bool(mono_moe(**call).isfinite().all())


def test_orders_of_the_up_weight(call):
    """Check that the interleaved weight gives the same bits, and the order by its definition."""
    expected = mono_moe(**call)
    up = call["expert_weights_up"]
    made = interleave_for_tma_wgmma_up(up)
    assert interleave_for_tma_wgmma_up(up) is made and up._tma_interleaved_up is made
    for wg, warp, half in ((0, 0, 0), (1, 3, 0), (0, 2, 1)):
        first = 128 + wg * 64 + warp * 16 + half * 8  # the second slab
        row = 64 + wg * 32 + warp * 8 + half * up.shape[1] // 2
        assert torch.equal(made[:, first : first + 8].float(), up[:, row : row + 8].float())
    assert torch.equal(mono_moe(**{**call, "expert_weights_up": made}, interleave_up=False), expected)


@pytest.mark.parametrize("tokens", [1, 3])
def test_out_and_scratchpad(device, tokens):
    """Check buffers: the result is the same, whether the scratchpad is used or too small."""
    call = layer(tokens, device)
    expected = mono_moe(**call)
    out = torch.full_like(expected, torch.nan)
    scratchpad = alloc_scratchpad(device)
    assert scratchpad.numel() == fused_moe.get_scratchpad_size_bytes() and not scratchpad.any()
    for pad in (scratchpad, scratchpad, torch.zeros(64, dtype=torch.uint8, device=device)):
        assert mono_moe(**call, out=out, scratchpad=pad) is out
        assert torch.equal(out, expected)
    assert bool(scratchpad.any())  # it was used
    assert fused_moe.has_monomoe() is True


def test_new_scales_of_the_same_weight(call):
    first = mono_moe(**call)
    call["expert_scales_up"] = call["expert_scales_up"].flip(1)
    second = mono_moe(**call)
    assert not torch.equal(first, second)
    assert_same_layer(second, SOFTMAX.reference(**call))


@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "interleaved"])
@pytest.mark.parametrize("name", ["expert_weights_up", "expert_scales_up"])
def test_weights_that_are_written_again(call, name, is_raw):
    """New weights arrive in the old tensors when a model is trained on; the copy of the old ones must not be used."""
    up = call["expert_weights_up"].view(torch.uint8).clone().view(torch.float8_e4m3fn)  # a tensor without copies
    call |= {"expert_weights_up": up if is_raw else interleave_for_tma_wgmma_up(up)}
    old = mono_moe(**call, interleave_up=is_raw)
    written = call[name]
    written.copy_(written.float().flip(1).to(written.dtype))
    new = mono_moe(**call, interleave_up=is_raw)
    same = {**call, "expert_weights_up": call["expert_weights_up"].clone()}
    assert torch.equal(new, mono_moe(**same, interleave_up=is_raw)) and not torch.equal(new, old)


def test_an_interleaved_copy_follows_its_weight(call):
    up = call["expert_weights_up"].clone()
    old = interleave_for_tma_wgmma_up(up)
    up.copy_(up.float().flip(1).to(up.dtype))
    new = interleave_for_tma_wgmma_up(up)
    assert torch.equal(new.float(), interleave_for_tma_wgmma_up(up.clone()).float()) and new is not old
    assert up._tma_interleaved_up is new is interleave_for_tma_wgmma_up(up)


def test_weights_made_in_inference_mode(call):
    """Tensors made in inference mode do not count how often they were written."""
    expected = mono_moe(**call)
    with torch.inference_mode():
        made = {name: call[name].clone() for name in ("expert_weights_up", "expert_scales_up")}
        assert all(torch.equal(mono_moe(**{**call, **made}), expected) for _ in range(2))


@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "interleaved"])
@pytest.mark.parametrize("name", ["expert_weights_up", "expert_scales_up"])
def test_weights_that_are_written_in_inference_mode(call, name, is_raw):
    """Check that no copy is kept of what nobody counts the writes of."""
    with torch.inference_mode():
        up, scales = call["expert_weights_up"].clone(), call["expert_scales_up"].clone()
        call |= {"expert_weights_up": up if is_raw else interleave_for_tma_wgmma_up(up), "expert_scales_up": scales}
        old, copied = mono_moe(**call, interleave_up=is_raw), interleave_for_tma_wgmma_up(up)
        written = call[name]
        written.copy_(written.float().flip(1).to(written.dtype))
        new = mono_moe(**call, interleave_up=is_raw)
        fresh = {**call, "expert_weights_up": call["expert_weights_up"].clone()}
        assert torch.equal(new, mono_moe(**fresh, interleave_up=is_raw)) and not torch.equal(new, old)
        up.zero_()
        assert not interleave_for_tma_wgmma_up(up).float().any() and copied.float().any()


def test_saved_weights_have_no_copies(call, tmp_path):
    up = call["expert_weights_up"].clone()
    expected = mono_moe(**{**call, "expert_weights_up": up})
    torch.save(up, tmp_path / "up")
    assert (tmp_path / "up").stat().st_size < up.numel() * 1.1 + 4096
    for copied in (torch.load(tmp_path / "up", weights_only=True), copy.deepcopy(up)):
        assert torch.equal(mono_moe(**{**call, "expert_weights_up": copied}), expected)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"scoring_func": "relu"}, "scoring_func must be 'softmax' or 'sigmoid', got 'relu'"),
        ({"activations_in": torch.zeros(3, 256)}, r"activations_in must be torch\.bfloat16 with 2 dimensions"),
        ({"router_logits": torch.zeros(3, 5).bfloat16()}, r"shapes must be .* \(3, 5\)"),
        ({"expert_scales_up": torch.zeros(6, 1, 2)}, r"expert_scales_up must be \(6, 2, 2\), got \(6, 1, 2\)"),
        ({"scratchpad": torch.zeros(64)}, r"scratchpad must be torch\.uint8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(device, call, changes, text):
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    with pytest.raises(ValueError, match=f"mono_moe: {text}"):
        mono_moe(**{**call, **moved})
    with pytest.raises(ValueError, match="rows in slabs of 128"):
        interleave_for_tma_wgmma_up(torch.zeros(1, 96, 8, dtype=torch.uint8))
