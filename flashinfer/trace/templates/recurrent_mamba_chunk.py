# SPDX-License-Identifier: Apache-2.0
"""Template and reference of Mamba-2 over whole sequences: token by token, in float32 (float64 for float64 tokens)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import torch

from ..template import Const, Scalar, Tensor, TraceTemplate, Var
from .shared import normal, seeded

__all__ = ["ssd_combined_fwd_trace", "ssd_combined_layer_trace"]


def _ssd_combined_fwd_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional[torch.Tensor] = None,
    z: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Optional[torch.Tensor] = None,
    seq_idx: Optional[torch.Tensor] = None,
    checkpoint_token_indices: Optional[torch.Tensor] = None,
    checkpoint_state_slots: Optional[torch.Tensor] = None,
    checkpoint_states: Optional[torch.Tensor] = None,
    num_seqs: Optional[int] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, tokens, heads, dim = x.shape
    groups, dstate = B.shape[2:]
    sequences = batch if seq_idx is None else num_seqs
    if initial_states is not None:
        sequences = initial_states.shape[0]
    assert sequences is not None
    kept_dtype = torch.bfloat16 if checkpoint_states is None else checkpoint_states.dtype
    state_dtype = kept_dtype if initial_states is None else initial_states.dtype
    states = torch.zeros(sequences, heads, dim, dstate, dtype=wide, device=x.device)
    if initial_states is not None:
        states += initial_states.to(wide)
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    if dt_softplus:
        step = torch.where(step <= 20, torch.log1p(torch.exp(step.clamp(max=20))), step)
    step = step.clamp(*dt_limit)
    out = torch.empty_like(x)
    skip = None if D is None else D.to(wide).reshape(heads, -1)
    for entry in range(batch):
        for t in range(tokens):
            n = entry if seq_idx is None else int(seq_idx[0, t])
            b, c = (m[entry, t].to(wide).repeat_interleave(heads // groups, 0).unsqueeze(1) for m in (B, C))
            token, size = x[entry, t].to(wide), step[entry, t]
            added = (size.unsqueeze(-1) * token).unsqueeze(-1) * b
            states[n] = states[n] * torch.exp(A.to(wide) * size).view(-1, 1, 1) + added
            y = (states[n] * c).sum(-1)
            if skip is not None:
                y = y + skip * token
            if z is not None:
                y = y * z[entry, t].to(wide) * torch.sigmoid(z[entry, t].to(wide))
            out[entry, t] = y.to(x.dtype)
            if checkpoint_states is not None:
                assert checkpoint_token_indices is not None and checkpoint_state_slots is not None
                slot = int(checkpoint_state_slots[n])
                if slot >= 0 and int(checkpoint_token_indices[n]) == t + 1:
                    checkpoint_states[slot] = states[n].to(checkpoint_states.dtype)
    return out, states.to(state_dtype)


def _ssd_combined_fwd_init(
    *,
    batch_size: int,
    seq_len: int,
    num_heads: int = 128,
    head_dim: int = 64,
    num_groups: int = 8,
    state_dim: int = 128,
    num_seqs: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, lead = seeded(seed, device), (batch_size, seq_len)
    heads = {name: normal(g, num_heads, dtype=torch.float32) for name in ("A", "D", "dt_bias")}
    return {
        "x": normal(g, *lead, num_heads, head_dim),
        "dt": normal(g, *lead, num_heads),
        "A": -torch.exp(heads["A"]),
        "B": normal(g, *lead, num_groups, state_dim),
        "C": normal(g, *lead, num_groups, state_dim),
        "D": heads["D"].bfloat16(),
        "dt_bias": heads["dt_bias"].bfloat16(),
        "dt_softplus": True,
    }


_TOKEN = ("batch_size", "seq_len", "num_heads", "head_dim")
_GROUP = ("batch_size", "seq_len", "num_groups", "state_dim")
_STATE = ("num_seqs", "num_heads", "head_dim", "state_dim")

ssd_combined_fwd_trace = TraceTemplate(
    "mamba",
    axes={
        "batch_size": Var("1 for packed sequences"),
        "seq_len": Var(),
        "num_seqs": Var("sequences: the batch, or those of a packed one"),
        "num_heads": Const(abbrev="h"),
        "head_dim": Const(abbrev="d"),
        "num_groups": Const(abbrev="g"),
        "state_dim": Const(abbrev="n"),
    },
    inputs={
        "x": Tensor(_TOKEN),
        "dt": Tensor(_TOKEN[:3]),
        "A": Tensor(("num_heads",), dtype="float32"),
        "B": Tensor(_GROUP),
        "C": Tensor(_GROUP),
        "D": Tensor(("num_heads",), optional=True),
        "z": Tensor(_TOKEN, optional=True, description="gate"),
        "dt_bias": Tensor(("num_heads",), optional=True),
        "dt_softplus": Scalar("bool", optional=True),
        "initial_states": Tensor(_STATE, optional=True),
        "seq_idx": Tensor(("batch_size", "seq_len"), dtype="int32", optional=True),
    },
    outputs={
        "out": Tensor(_TOKEN, param="out", dtype_from="x"),
        "final_states": Tensor(_STATE, dtype="bfloat16", dtype_from="initial_states"),
    },
    name_prefix="ssd_combined_fwd",
    reference=_ssd_combined_fwd_reference,
    init=_ssd_combined_fwd_init,
    description="Mamba-2 over whole sequences: outputs, and the states after the last tokens.",
)

ssd_combined_layer_trace = replace(
    ssd_combined_fwd_trace,
    name_prefix="ssd_combined_layer",
    description="Mamba-2 over whole sequences as a layer calls it, with outputs by token.",
)
