# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of ``chunk_gated_delta_rule``: the texts, and the order in which arguments are checked."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gdn_prefill import chunk_gated_delta_rule

from .delta import BF16, F32, Case

ROWS = torch.zeros(2, 1, 128, 128)
STARTS = torch.tensor([0, 1, 2])


def wrong(match: str, kind=ValueError, **changes) -> None:
    case = Case([64, 6], (1, 1, 2), BF16)
    arguments = {**case.arguments, "output_final_state": True, **changes}
    with pytest.raises(kind, match=match):
        chunk_gated_delta_rule(**arguments)


@pytest.mark.parametrize(
    "kind, match, changes",
    [
        (ValueError, "unsupported GDN backend", {"backend": "triton", "use_cp": 3}),
        (RuntimeError, "cake_gdn", {"backend": "cake_gdn"}),
        (NotImplementedError, "cudnn", {"backend": "cudnn"}),
        (ValueError, "use_cp must be", {"use_cp": "yes", "checkpoint_every_n_tokens": -1}),
        (ValueError, "non-negative", {"checkpoint_every_n_tokens": -64}),
        (ValueError, "multiple of the chunk size", {"checkpoint_every_n_tokens": 65}),
        (ValueError, "must both be provided", {"checkpoint_every_n_tokens": 64}),
        (ValueError, "must both be provided", {"checkpoint_every_n_tokens": 64, "state_checkpoints": ROWS}),
        (ValueError, "must be None", {"state_checkpoints": ROWS}),
    ],
)
def test_options_come_first(kind, match, changes):
    """Refused before any tensor of the rows is checked."""
    with pytest.raises(kind, match=match):
        chunk_gated_delta_rule(q="q", k="k", v="v", **changes)


@pytest.mark.parametrize(
    "match, changes",
    [
        ("cu_seqlens must be a tensor", {"cu_seqlens": None, "max_seqlen": -1}),
        ("cu_seqlens must have dtype", {"cu_seqlens": torch.tensor([0.0, 70.0])}),
        ("cu_seqlens must have shape", {"cu_seqlens": torch.tensor([70])}),
        ("cu_seqlens must not fall", {"cu_seqlens": torch.tensor([0, 64, 60])}),
        ("end within the 70 tokens", {"cu_seqlens": torch.tensor([0, 64, 71])}),
        ("max_seqlen must be an int", {"max_seqlen": 64.0}),
        ("max_seqlen must be in 35 .. 70", {"max_seqlen": -1}),
        ("max_seqlen must be in 35 .. 70", {"max_seqlen": 34}),
        ("max_seqlen must be in 35 .. 70", {"max_seqlen": 71}),
        ("state_indices must have dtype", {"state_indices": torch.zeros(2)}),
        ("state_indices must have shape", {"state_indices": torch.zeros(3, dtype=torch.int32)}),
        ("explicit output_state pool", {"state_indices": torch.tensor([0, 1])}),
        ("heads of q, k and v", {"q": torch.zeros(70, 3, 128, dtype=BF16)}),
        ("_cp_chunk_len must be a multiple of 64", {"_cp_chunk_len": 65}),
        ("q must have head dimension 128", {"q": torch.zeros(70, 1, 64, dtype=BF16)}),
        ("k must be bfloat16", {"k": torch.zeros(70, 1, 128)}),
        (r"v.shape\[0\] must be 70", {"v": torch.zeros(60, 2, 128, dtype=BF16)}),
        (r"g.shape\[1\] must be 2", {"g": torch.zeros(70, 1)}),
        (r"initial_state.shape\[1\] must be 2", {"initial_state": torch.zeros(2, 1, 128, 128)}),
        ("initial_state must be float32", {"initial_state": torch.zeros(2, 2, 128, 128, dtype=torch.float64)}),
        (r"output.shape\[1\] must be 2", {"output": torch.zeros(70, 1, 128, dtype=BF16)}),
        ("initial_state must be contiguous", {"initial_state": torch.zeros(2, 2, 128, 256)[..., ::2], "use_cp": True}),
        ("g must be torch.float32", {"g": torch.zeros(70, 2, dtype=BF16), "use_cp": True}),
    ],
)
def test_arguments(match, changes):
    wrong(match, **changes)


@pytest.mark.parametrize(
    "match, rows, starts",
    [
        ("state_checkpoints must have dtype", torch.zeros(2, 2, 128, 128, dtype=torch.int32), STARTS),
        ("checkpoint_cu_starts must have dtype", torch.zeros(2, 2, 128, 128), STARTS.float()),
        ("checkpoint_cu_starts must have 1 dimension", torch.zeros(2, 2, 128, 128), STARTS[None]),
        ("must have 3 elements", torch.zeros(2, 2, 128, 128), STARTS[:2]),
        ("state_checkpoints must have shape", ROWS, STARTS),
    ],
)
def test_checkpoints(match, rows, starts):
    wrong(match, state_checkpoints=rows, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=64)


def test_slots_outside_of_the_pool():
    pool = torch.zeros(3, 2, 128, 128)
    changes = {"initial_state": pool, "output_state": pool, "state_indices": torch.tensor([0, 3])}
    wrong("state_indices must be slots of the 3 states, got 3", **changes)


def test_tensors_the_split_form_does_not_take_are_copied():
    """With "auto" a warning says so, and results are those of contiguous float32 tensors."""
    case = Case([70], (1, 1, 1), BF16)
    expected = chunk_gated_delta_rule(**case.arguments)
    wide = torch.zeros(70, 2, dtype=F32)
    wide[:, :1] = case.g
    with pytest.warns(RuntimeWarning, match="g must be contiguous"):
        out = chunk_gated_delta_rule(**{**case.arguments, "g": wide[:, :1].expand(70, 1).as_strided((70, 1), (2, 1))})
    assert torch.equal(out, expected)
