# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of SSD on the CPU: roles, rings, swizzles and products, against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.trace.templates.recurrent_mamba_chunk import ssd_combined_fwd_trace

from ..emulation.build import compile_emulated

HEADS, GROUPS, DIM, DSTATE = 2, 1, 64, 128


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_emulated("emulated_ssd.cpp", tmp_path_factory)


def address(x):
    return 0 if x is None else x.data_ptr()


@pytest.mark.parametrize("lengths, keep", [([150], None), ([70, 0, 65], [33, 0, 135])], ids=["one", "packed"])
def test_kernel(library, lengths, keep):
    tokens, n = sum(lengths), len(lengths)
    x = torch.randn(1, tokens, HEADS, DIM).bfloat16()
    b, c = (torch.randn(1, tokens, GROUPS, DSTATE).bfloat16() for _ in range(2))
    dt, a, d = torch.rand(1, tokens, HEADS), -torch.rand(HEADS), torch.randn(HEADS)
    states = torch.randn(n, HEADS, DIM, DSTATE)
    final, out = torch.full_like(states, 7.0), torch.empty_like(x)
    ids = torch.tensor([[i for i, length in enumerate(lengths) for _ in range(length)]])
    starts = [sum(lengths[:i]) for i in range(n)]
    bounds = torch.tensor([[s, s + k] if k else [0, 0] for s, k in zip(starts, lengths, strict=True)]).int()
    kept = slots = at = None
    options = {}
    if keep is not None:
        at, slots = torch.tensor(keep).int(), torch.tensor([2, -1, 0]).int()
        kept, expected_kept = torch.zeros_like(states), torch.zeros_like(states).double()
        options = {"checkpoint_token_indices": at, "checkpoint_state_slots": slots, "checkpoint_states": expected_kept}
    arguments = (x, b, c, dt, a, d, states, final, kept, at, slots, bounds if n > 1 else None, out)
    library.call("run", *map(address, arguments), n, tokens, HEADS, GROUPS)
    wide = (t.double() for t in (x, dt, a, b, c, d))
    exact, last = ssd_combined_fwd_trace.reference(
        *wide, initial_states=states.double(), seq_idx=ids if n > 1 else None, **options
    )
    pairs = [(out, exact), (final, last)]
    if kept is not None:
        pairs += [(kept[[0, 2]], expected_kept[[0, 2]])]
    for actual, expected in pairs:
        assert float((actual.double() - expected).norm() / expected.norm()) < 2**-7
