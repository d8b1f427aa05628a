# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the delta rules token by token: bound by the states in memory.

python benchmarks/bench_recurrent_delta.py [-k gated_delta] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Bench, bf16, case, fp32, grid, main, nbytes, rand

from flashinfer import recurrent
from flashinfer.testing import Tolerance
from flashinfer.trace.templates import recurrent as templates

# Heads of Qwen3-Next on one GPU; one request and batches of a server.
HEADS, VALUE_HEADS, DIM = 16, 32, 128
CUDA = grid(batch_size=[1, 64, 256], dtype=[fp32, bf16])
CPU = grid(batch_size=[4], dtype=[fp32, bf16])
#: A state is read once and written once; its dtype rounds what is written.
TOLERANCE = Tolerance(1e-2, 1e-2)


def _tokens(batch_size: int, tokens: int) -> dict[str, torch.Tensor]:
    return {
        "q": rand(batch_size, tokens, HEADS, DIM, bf16),
        "k": rand(batch_size, tokens, HEADS, DIM, bf16),
        "v": rand(batch_size, tokens, VALUE_HEADS, DIM, bf16),
        "A_log": rand(VALUE_HEADS),
        "a": rand(batch_size, tokens, VALUE_HEADS, bf16),
        "dt_bias": rand(VALUE_HEADS),
        "b": rand(batch_size, tokens, VALUE_HEADS, bf16),
    }


def _pool(batch_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    pool = rand(batch_size + 1, VALUE_HEADS, DIM, DIM, dtype)
    return pool, torch.randperm(batch_size).int() + 1


@case("gated_delta_rule_decode_pretranspose", cpu=CPU, cuda=CUDA)
def decode_pretranspose(batch_size: int, dtype: torch.dtype) -> Bench:
    kw, (pool, slots) = _tokens(batch_size, 1), _pool(batch_size, dtype)
    out = torch.empty_like(kw["v"])

    def arguments(pool: torch.Tensor) -> dict[str, Any]:
        return {**kw, "state": None, "initial_state": pool, "initial_state_indices": slots}

    return Bench(
        run=lambda pool, out: recurrent.gated_delta_rule_decode_pretranspose(**arguments(pool), output=out)[0],
        args=(pool, out),
        reference=lambda pool, _: templates.gated_delta_rule_decode_pretranspose_trace.reference(**arguments(pool))[0],
        bytes=2 * nbytes(pool) * batch_size // (batch_size + 1) + nbytes(kw["q"], kw["k"], kw["v"], out),
        tolerance=TOLERANCE,
    )


@case("gated_delta_rule_decode", cpu=grid(batch_size=[4]), cuda=grid(batch_size=[64]))
def decode(batch_size: int) -> Bench:
    """States with V fastest."""
    kw, state = _tokens(batch_size, 1), rand(batch_size, VALUE_HEADS, DIM, DIM)
    return Bench(
        run=lambda state: recurrent.gated_delta_rule_decode(**kw, state=state)[0],
        args=(state,),
        reference=lambda state: templates.gated_delta_rule_decode_trace.reference(**kw, state=state)[0],
        bytes=2 * nbytes(state) + nbytes(kw["q"], kw["k"], kw["v"], kw["v"]),
        tolerance=TOLERANCE,
    )


@case("gated_delta_rule_mtp", cpu=grid(batch_size=[4], tokens=[4], dtype=[fp32]),
      cuda=grid(batch_size=[64], tokens=[4], dtype=[fp32, bf16]))  # fmt: skip
def mtp(batch_size: int, tokens: int, dtype: torch.dtype) -> Bench:
    """Verification of drafts: the pool is read, the state after each token goes to a buffer."""
    kw, (pool, slots) = _tokens(batch_size, tokens), _pool(batch_size, dtype)
    buffer = torch.empty(batch_size, tokens, VALUE_HEADS, DIM, DIM, dtype=dtype)
    more = {"initial_state_indices": slots, "disable_state_update": True}

    def run(pool: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        call = {**kw, **more, "initial_state": pool, "intermediate_states_buffer": buffer}
        return recurrent.gated_delta_rule_mtp(**call)[0]

    def reference(pool: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return templates.gated_delta_rule_mtp_trace.reference(**kw, **more, initial_state=pool)[0]

    return Bench(
        run=run,
        args=(pool, buffer),
        reference=reference,
        bytes=nbytes(pool) * batch_size // (batch_size + 1) + nbytes(buffer, kw["q"], kw["k"], kw["v"], kw["v"]),
        tolerance=TOLERANCE,
    )


@case("recurrent_kda", cpu=CPU, cuda=CUDA)
def kda(batch_size: int, dtype: torch.dtype) -> Bench:
    """A decode step with the bounded gate."""
    q, k, v, g = (rand(batch_size, 1, VALUE_HEADS, DIM, bf16) for _ in range(4))
    pool, slots = _pool(batch_size, dtype)
    kw: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": rand(batch_size, 1, VALUE_HEADS, bf16)}
    kw |= {"A_log": rand(VALUE_HEADS), "dt_bias": rand(VALUE_HEADS * DIM), "ssm_state_indices": slots}
    kw |= {"use_gate_in_kernel": True, "lower_bound": -5.0, "beta_is_logit": True}
    return Bench(
        run=lambda pool: recurrent.recurrent_kda(**kw, initial_state=pool)[0],
        args=(pool,),
        reference=lambda pool: templates.recurrent_kda_trace.reference(**kw, initial_state=pool)[0],
        bytes=2 * nbytes(pool) * batch_size // (batch_size + 1) + nbytes(q, k, v, v, g),
        tolerance=TOLERANCE,
    )


if __name__ == "__main__":
    main()
