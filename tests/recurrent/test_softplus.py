# SPDX-License-Identifier: Apache-2.0
"""The softplus of each rule and each form of its kernels, read off a state to which nothing is added.

Random tokens seldom come where ``log(1 + e^x)`` and a straight line are near each other but not equal, 3 to 12. These
are there, and a threshold below 10 in place of 20 fails.
"""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from flashinfer.mamba import checkpointing_ssu, selective_state_update, ssd_combined_fwd
from flashinfer.recurrent import recurrent_kda

from .gdn_inputs import BF16, ints
from .mamba_inputs import tied
from .softplus import HEADS, NUMBERS, check


def constant(shape: tuple[int, ...], value: float, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, value, device=device, dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 3, 64], ids=["decode", "verify", "prefill"])
def test_kda(device, tokens):
    """A gate for each key channel: half of a number from the token, half from the bias."""
    numbers = torch.tensor(NUMBERS, device=device).repeat(128 // HEADS)
    rate = 0.5 / tokens
    q = torch.randn(1, tokens, 1, 128, device=device).to(BF16)
    state = torch.ones(1, 1, 128, 128, device=device)
    before = state.clone()
    recurrent_kda(
        q, q, q, (numbers / 2).to(BF16).expand(1, tokens, 1, 128).contiguous(), constant((1, tokens, 1), 0.0, device),
        A_log=constant((1,), math.log(rate), device, torch.float32), dt_bias=numbers - (numbers / 2).to(BF16).float(),
        initial_state=state, use_gate_in_kernel=True,
    )  # fmt: skip
    channels = state.view(1, 1, 128, 128 // HEADS, HEADS)
    check(before.view_as(channels), channels, rate * tokens, 4)


@pytest.mark.parametrize("form", ["decode", "values first", "verify"])
def test_gdn(device, form):
    """A number for each value head, from the projection and the bias."""
    numbers, tokens = torch.tensor(NUMBERS, device=device), 3 if form == "verify" else 1
    rate, shape = 0.5 / tokens, (1, tokens, HEADS)
    q = torch.randn(1, tokens, HEADS, 128, device=device).to(BF16)
    a = (numbers / 2).to(BF16)
    gates = (constant((HEADS,), math.log(rate), device, torch.float32), a.expand(shape).contiguous())
    gates += (numbers - a.float(), constant(shape, -200.0, device))
    state = torch.ones(1, HEADS, 128, 128, device=device)
    before = state.clone()
    if form == "verify":
        options = {"disable_state_update": False}
        gated_delta_rule_mtp(q, q, q, state, ints([0], device=device), *gates, **options)
    else:
        step = gated_delta_rule_decode if form == "values first" else gated_delta_rule_decode_pretranspose
        step(q, q, q, state, *gates)
    check(before, state, rate * tokens, 1)


def mamba(device: str, lead: tuple[int, ...], tokens: int) -> dict[str, torch.Tensor]:
    """Return tokens that add nothing, and steps that are the numbers."""
    numbers = torch.tensor(NUMBERS, device=device)
    return {
        "x": torch.zeros(*lead, HEADS, 64, device=device, dtype=BF16),
        "dt": (numbers / 2).expand(*lead, HEADS).contiguous(),
        "A": constant((HEADS,), -0.5 / tokens, device, torch.float32),
        "B": torch.randn(*lead, 1, 128, device=device).to(BF16),
        "C": torch.randn(*lead, 1, 128, device=device).to(BF16),
        "dt_bias": numbers / 2,
    }


@pytest.mark.parametrize("tokens", [1, 4])
def test_state_update(device, tokens):
    given = mamba(device, (1,) if tokens == 1 else (1, tokens), tokens)
    given |= {"dt": tied(given["dt"], 64), "A": tied(given["A"], 64, 128), "dt_bias": tied(given["dt_bias"], 64)}
    state = torch.ones(1, HEADS, 64, 128, device=device)
    before = state.clone()
    skip = tied(torch.zeros(HEADS, device=device), 64)
    selective_state_update(state, D=skip, **given, dt_softplus=True, cache_steps=tokens if tokens > 1 else 0)
    check(before, state, 0.5, 1)


def test_chunk_scan(device):
    given, state = mamba(device, (1, 70), 70), torch.ones(1, HEADS, 64, 128, device=device)
    _, final = ssd_combined_fwd(**given, dt_softplus=True, initial_states=state)
    check(state, final, 0.5, 1)


def test_replay(device):
    """The ring keeps processed steps."""
    given = mamba(device, (1, 2), 2)
    given |= {"dt": tied(given["dt"], 64), "A": tied(given["A"], 64, 128), "dt_bias": tied(given["dt_bias"], 64)}
    rings = (
        torch.zeros(1, HEADS, 8, 64, device=device, dtype=BF16),
        torch.zeros(1, 1, 8, 128, device=device, dtype=BF16),
    )
    steps = torch.zeros(1, HEADS, 8, device=device)
    start, live = ints([0], device=device), ints([0], device=device)
    state, out = torch.ones(1, HEADS, 64, 128, device=device), torch.empty_like(given["x"])
    order = ("x", "dt", "A", "B", "C")
    checkpointing_ssu(
        state, *rings, steps, start, live, *(given[name] for name in order), out, dt_bias=given["dt_bias"],
        dt_softplus=True, state_batch_indices=ints([0], device=device),
    )  # fmt: skip
    expected = torch.nn.functional.softplus(torch.tensor(NUMBERS, device=device).double(), threshold=1000.0)
    torch.testing.assert_close(steps[0, :, 0].double(), expected, rtol=1e-6, atol=1e-6)
