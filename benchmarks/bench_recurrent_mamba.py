# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of Mamba-2: bound by the states in memory for decode, by products for prefill.

python benchmarks/bench_recurrent_mamba.py [-k selective] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, fp32, grid, main, nbytes, rand

import flashinfer.mamba as mamba
from flashinfer.testing import Tolerance
from flashinfer.trace.templates import recurrent_mamba as templates
from flashinfer.trace.templates import recurrent_mamba_chunk as chunk_templates
from flashinfer.trace.templates import recurrent_mamba_replay as replay_templates

# Heads of Nemotron-H; one request and batches of a server.
HEADS, DIM, GROUPS, DSTATE = 128, 64, 8, 128
CUDA = grid(batch_size=[1, 64, 256], dtype=[bf16]) + grid(batch_size=[64], dtype=[fp32])
CPU = grid(batch_size=[4], dtype=[bf16])


def _weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A, D and dt_bias: one number for each head, expanded with stride 0."""
    a, d, bias = -torch.exp(rand(HEADS)), rand(HEADS, bf16), rand(HEADS, bf16)
    return a.view(-1, 1, 1).expand(HEADS, DIM, DSTATE), d.view(-1, 1).expand(-1, DIM), bias.view(-1, 1).expand(-1, DIM)


@case("selective_state_update", cpu=CPU, cuda=CUDA)
def selective_state_update(batch_size: int, dtype: torch.dtype) -> Bench:
    state = rand(batch_size, HEADS, DIM, DSTATE, dtype)
    x, b, c = rand(batch_size, HEADS, DIM, bf16), *(rand(batch_size, GROUPS, DSTATE, bf16) for _ in range(2))
    dt = rand(batch_size, HEADS, bf16).unsqueeze(-1).expand(-1, -1, DIM)
    a, d, bias = _weights()

    def run(state: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return mamba.selective_state_update(state, x, dt, a, b, c, d, dt_bias=bias, dt_softplus=True)

    def reference(state: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        ref = templates.selective_state_update_trace.reference
        return ref(state, x, dt, a, b, c, d, dt_bias=bias, dt_softplus=True)[0]

    return Bench(
        run=run,
        args=(state, x, b, c),
        reference=reference,
        bytes=2 * nbytes(state) + nbytes(x, x, b, c),
        flops=6 * batch_size * HEADS * DIM * DSTATE,
    )


@case("checkpointing_ssu", cpu=grid(batch_size=[4], tokens=[4], live=[6]), cuda=[
    {"batch_size": 64, "tokens": 1, "live": 8},
    {"batch_size": 64, "tokens": 4, "live": 6},
    {"batch_size": 64, "tokens": 4, "live": 14},
])  # fmt: skip
def checkpointing_ssu(batch_size: int, tokens: int, live: int) -> Bench:
    """Replay ``live`` tokens, then run new ones; a ring has 16 + ``tokens`` rows."""
    ring = 16 + tokens
    state = rand(batch_size, HEADS, DIM, DSTATE, bf16)
    x_cache, b_cache = rand(batch_size, HEADS, ring, DIM, bf16), rand(batch_size, GROUPS, ring, DSTATE, bf16)
    dt_cache, start = torch.rand(batch_size, HEADS, ring), torch.zeros(batch_size, dtype=torch.int32)
    x = rand(batch_size, tokens, HEADS, DIM, bf16)
    b, c = (rand(batch_size, tokens, GROUPS, DSTATE, bf16) for _ in range(2))
    dt = rand(batch_size, tokens, HEADS, bf16).unsqueeze(-1).expand(-1, -1, -1, DIM)
    a, d, bias = _weights()
    held = torch.full((batch_size,), live, dtype=torch.int32)
    scratch = mamba.allocate_checkpointing_ssu_scratch(batch_size, HEADS, tokens, 16, bf16, x.device)
    names = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), scratch, strict=True))

    def run(state: torch.Tensor, x_cache: torch.Tensor, b_cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rings = (state, x_cache, b_cache, dt_cache, start, held)
        out = torch.empty_like(x)
        return mamba.checkpointing_ssu(*rings, x, dt, a, b, c, out, D=d, dt_bias=bias, dt_softplus=True, **names)

    def reference(state: torch.Tensor, x_cache: torch.Tensor, b_cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ref = replay_templates.checkpointing_ssu_trace.reference
        rings = (state, x_cache, b_cache, dt_cache, start, held)
        return ref(*rings, x, dt, a, b, c, D=d, dt_bias=bias, dt_softplus=True)[0]

    writes = 2 if live + tokens > 16 else 1
    rows = batch_size * (live + tokens) * (HEADS * (2 * DIM + 4) + 2 * GROUPS * DSTATE)
    return Bench(
        run=run,
        args=(state, x_cache, b_cache, x),
        reference=reference,
        bytes=writes * nbytes(state) + rows + nbytes(x, x, b, c),
        flops=6 * batch_size * (live + tokens) * HEADS * DIM * DSTATE,
    )


@case(
    "ssd_combined_fwd",
    cpu=[{"batch_size": 1, "seq_len": 64}],
    cuda=[{"batch_size": 1, "seq_len": 8192}, {"batch_size": 4, "seq_len": 2048}, {"batch_size": 1, "seq_len": 256}],
)
def ssd_combined_fwd(batch_size: int, seq_len: int) -> Bench:
    lead = (batch_size, seq_len)
    x, dt = rand(*lead, HEADS, DIM, bf16), rand(*lead, HEADS, bf16)
    b, c = (rand(*lead, GROUPS, DSTATE, bf16) for _ in range(2))
    a, d, bias = -torch.exp(rand(HEADS)), rand(HEADS, bf16), rand(HEADS, bf16)
    states = rand(batch_size, HEADS, DIM, DSTATE)
    options = {"D": d, "dt_bias": bias, "dt_softplus": True}
    reference = chunk_templates.ssd_combined_fwd_trace.reference
    return Bench(
        run=lambda x, dt, b, c, states: mamba.ssd_combined_fwd(x, dt, a, b, c, initial_states=states, **options)[0],
        args=(x, dt, b, c, states),
        reference=lambda x, dt, b, c, states: reference(x, dt, a, b, c, initial_states=states, **options)[0],
        bytes=nbytes(x, x, dt, b, c) + 2 * nbytes(states),
        flops=4 * batch_size * seq_len * HEADS * DIM * DSTATE,
        tolerance=Tolerance(rtol=2e-2, atol=0.25),  # sums of hundreds of products of 16-bit numbers
    )


if __name__ == "__main__":
    main()
