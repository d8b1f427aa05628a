# SPDX-License-Identifier: Apache-2.0
"""Inputs of the chunked gated delta rule, its reference in float64, and the tolerances of the contract."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flashinfer.trace.templates.recurrent_gdn_prefill import exact_gated_delta_rule

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: Outputs (atol, rtol), then states; those of states in 8 or 16 bits are the last.
TOLERANCES = {BF16: ((1e-2, 1e-2), (5e-3, 1e-3)), F16: ((2e-3, 1e-3), (1e-3, 1e-4))}
ROUNDED_STATES = (1e-1, 5e-2)


class Case:
    """Requests of ``lens`` tokens with ``heads`` = (query, key, value) heads; keys and queries are normalised."""

    def __init__(self, lens, heads=(2, 2, 4), dtype=BF16, device="cpu", g="uniform", beta=True, initial=True, seed=0):
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device)

        def uniform(*shape):
            return torch.rand(shape, generator=generator, device=device)

        self.lens, self.dtype, self.device = list(lens), dtype, device
        self.tokens, self.heads, self.scale = sum(lens), max(heads), 128**-0.5
        self.q, self.k = (F.normalize(normal(self.tokens, h, 128), dim=-1).to(dtype) for h in heads[:2])
        self.v = normal(self.tokens, heads[2], 128).to(dtype)
        shape = (self.tokens, self.heads)
        self.g = {
            None: lambda: None,
            "uniform": lambda: uniform(*shape),
            "slow": lambda: torch.exp(-0.1 * uniform(*shape)),
            "tiny": lambda: torch.where(uniform(*shape) < 0.3, torch.tensor(1e-12, device=device), uniform(*shape)),
            "zero": lambda: torch.where(uniform(*shape) < 0.3, torch.zeros((), device=device), uniform(*shape)),
            "gates": lambda: torch.exp(torch.full(shape, -100.0, device=device)),
        }[g]()
        self.beta = uniform(*shape) if beta else None
        self.initial = 0.1 * normal(len(lens), self.heads, 128, 128) if initial else None
        self.offsets = torch.tensor([0, *lens], device=device).cumsum(0)

    @property
    def arguments(self) -> dict:
        """Arguments of the function and of the reference."""
        tensors = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta")}
        return {**tensors, "initial_state": self.initial, "cu_seqlens": self.offsets}

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and final states in float64, token by token."""
        return exact_gated_delta_rule(**self.arguments)


def close(case: Case, out, final=None, tolerances=None) -> None:
    of_out, of_state = tolerances or TOLERANCES[case.dtype]
    expected, state = case.expected()
    torch.testing.assert_close(out.double(), expected, atol=of_out[0], rtol=of_out[1])
    if final is not None:
        exists = torch.tensor(case.lens) > 0
        torch.testing.assert_close(final[exists].double(), state[exists], atol=of_state[0], rtol=of_state[1])
