# SPDX-License-Identifier: Apache-2.0
"""Template and reference of the Mamba-2 update by replay: token by token, in float32 (float64 for float64 tokens)."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Const, Scalar, Tensor, TraceTemplate, Var
from .recurrent_mamba import _half_by, _philox_word
from .shared import normal, seeded

__all__ = ["checkpointing_ssu_trace"]


def _checkpointing_ssu_reference(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional[torch.Tensor] = None,
    z: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    dt_softplus: bool = False,
    state_batch_indices: Optional[torch.Tensor] = None,
    pad_slot_id: int = -1,
    state_scale: Optional[torch.Tensor] = None,
    rand_seed: Optional[torch.Tensor] = None,
    philox_rounds: int = 10,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    state, x_cache, B_cache, dt_cache = (t.clone() for t in (state, x_cache, B_cache, dt_cache))
    out = torch.zeros_like(x)
    length, heads, groups = x_cache.shape[2], state.shape[1], B.shape[2]
    most = x.shape[1] if max_seqlen is None else max_seqlen
    flat = [None if t is None else t.flatten(0, 1) for t in (x, dt, B, C, z)]
    outs = out.view(-1, *out.shape[2:])
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    bounds = [n * most for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    rates = A[:, 0, 0].to(wide)
    for n in range(batch):
        slot = n if state_batch_indices is None else int(state_batch_indices[n])
        begin, end = bounds[n], bounds[n + 1]
        if slot == pad_slot_id or end == begin:
            continue
        start, live = int(ring_start[slot]), int(prev_num_accepted_tokens[slot])
        s = state[slot].float().to(wide) if state.dtype == torch.float8_e4m3fn else state[slot].to(wide)
        if state_scale is not None:
            s = s * state_scale[slot].reshape(*s.shape[:2], 1)

        def step(s: torch.Tensor, x_t: torch.Tensor, b_t: torch.Tensor, dt_t: torch.Tensor) -> torch.Tensor:
            b = b_t.to(wide).repeat_interleave(heads // groups, 0).unsqueeze(1)
            added = (dt_t.unsqueeze(-1) * x_t.to(wide)).unsqueeze(-1) * b
            return s * torch.exp(rates * dt_t).view(-1, 1, 1) + added

        for i in range(live):
            row = (start + i) % length
            s = step(s, x_cache[slot, :, row], B_cache[slot, :, row], dt_cache[slot, :, row].to(wide))
        if live + end - begin > length - most:
            if state_scale is not None:
                limit = 127.0 if state.dtype == torch.int8 else 448.0
                largest = s.abs().amax(-1, keepdim=True)
                factor = torch.where(largest == 0, 1.0, limit / largest)
                codes = (s * factor).clamp(-limit, limit)
                state[slot] = (codes.round() if state.dtype == torch.int8 else codes.float()).to(state.dtype)
                state_scale[slot] = (1 / factor).reshape(state_scale[slot].shape).float()
            elif rand_seed is not None and state.dtype == torch.float16:
                at = torch.tensor([slot * state.stride(0)], device=state.device)
                for size, stride in zip(state.shape[1:], state.stride()[1:], strict=True):
                    at = at.unsqueeze(-1) + stride * torch.arange(size, device=state.device)
                state[slot] = _half_by(s, _philox_word(int(rand_seed), at[0], philox_rounds))
            else:
                state[slot] = s.to(state.dtype)
        xs, dts, bs, cs, zs = flat
        assert xs is not None and dts is not None and bs is not None and cs is not None
        for t in range(begin, end):
            processed = dts[t, :, 0].to(wide)
            if dt_bias is not None:
                processed = processed + dt_bias[:, 0].to(wide)
            if dt_softplus:
                processed = torch.where(processed <= 20, torch.log1p(torch.exp(processed.clamp(max=20))), processed)
            s = step(s, xs[t], bs[t], processed)
            y = (s * cs[t].to(wide).repeat_interleave(heads // groups, 0).unsqueeze(1)).sum(-1)
            if D is not None:
                y = y + D.to(wide) * xs[t].to(wide)
            if zs is not None:
                y = y * zs[t].to(wide) * torch.sigmoid(zs[t].to(wide))
            outs[t] = y.to(out.dtype)
            row = (start + live + t - begin) % length
            x_cache[slot, :, row], B_cache[slot, :, row] = xs[t], bs[t]
            dt_cache[slot, :, row] = processed.to(dt_cache.dtype)
    return out, state, x_cache, B_cache, dt_cache


def _checkpointing_ssu_init(
    *,
    batch_size: int,
    num_tokens: int = 4,
    ring_len: int = 20,
    num_heads: int = 64,
    head_dim: int = 64,
    num_groups: int = 8,
    state_dim: int = 128,
    num_slots: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    tokens, row = (batch_size, num_tokens, num_heads), (num_heads, head_dim)
    heads = {name: normal(g, num_heads, dtype=torch.float32) for name in ("A", "D", "dt_bias")}
    # One slot in four is so full that its state is written.
    live = torch.arange(batch_size, device=device, dtype=torch.int32) % 4 * ((ring_len - num_tokens) // 3)
    return {
        "state": normal(g, batch_size, *row, state_dim),
        "x_cache": normal(g, batch_size, num_heads, ring_len, head_dim),
        "B_cache": normal(g, batch_size, num_groups, ring_len, state_dim),
        "dt_cache": normal(g, batch_size, num_heads, ring_len, dtype=torch.float32).abs(),
        "ring_start": torch.arange(batch_size, device=device, dtype=torch.int32) % ring_len,
        "prev_num_accepted_tokens": live,
        "x": normal(g, *tokens, head_dim),
        "dt": normal(g, *tokens, 1).expand(*tokens, head_dim),
        "A": -torch.exp(heads["A"]).view(-1, 1, 1).expand(*row, state_dim),
        "B": normal(g, batch_size, num_tokens, num_groups, state_dim),
        "C": normal(g, batch_size, num_tokens, num_groups, state_dim),
        "out": torch.empty(*tokens, head_dim, dtype=torch.bfloat16, device=device),
        "D": heads["D"].bfloat16().view(-1, 1).expand(*row),
        "dt_bias": heads["dt_bias"].bfloat16().view(-1, 1).expand(*row),
        "dt_softplus": True,
    }


_STATE = ("num_slots", "num_heads", "head_dim", "state_dim")
_TOKEN, _GROUP = (("batch_size", "num_tokens", *t) for t in (("num_heads", "head_dim"), ("num_groups", "state_dim")))
_RINGS = {
    "x_cache": Tensor(("num_slots", "num_heads", "ring_len", "head_dim"), param="x_cache"),
    "B_cache": Tensor(("num_slots", "num_groups", "ring_len", "state_dim"), param="B_cache"),
    "dt_cache": Tensor(("num_slots", "num_heads", "ring_len"), param="dt_cache", dtype="float32"),
}

checkpointing_ssu_trace = TraceTemplate(
    "mamba",
    axes={
        "batch_size": Var(),
        "num_slots": Var("states of the pool"),
        "num_tokens": Const("new tokens of each sequence", abbrev="t"),
        "ring_len": Const("rows of a ring", abbrev="l"),
        "num_heads": Const(abbrev="h"),
        "head_dim": Const(abbrev="d"),
        "num_groups": Const(abbrev="g"),
        "state_dim": Const(abbrev="n"),
    },
    inputs={
        "state": Tensor(_STATE),
        **_RINGS,
        "ring_start": Tensor(("num_slots",), dtype="int32"),
        "prev_num_accepted_tokens": Tensor(("num_slots",), dtype="int32"),
        "x": Tensor(_TOKEN),
        "dt": Tensor(_TOKEN),
        "A": Tensor(("num_heads", "head_dim", "state_dim"), dtype="float32"),
        "B": Tensor(_GROUP),
        "C": Tensor(_GROUP),
        "D": Tensor(("num_heads", "head_dim"), optional=True),
        "z": Tensor(_TOKEN, optional=True, description="gate"),
        "dt_bias": Tensor(("num_heads", "head_dim"), optional=True),
        "dt_softplus": Scalar("bool", optional=True),
        "state_batch_indices": Tensor(("batch_size",), dtype="int32", optional=True),
        "pad_slot_id": Scalar("int32", optional=True),
    },
    outputs={
        "out": Tensor(_TOKEN, param="out", dtype_from="x"),
        "state": Tensor(_STATE, param="state", dtype_from="state"),
        "x_cache": Tensor(("num_slots", "num_heads", "ring_len", "head_dim"), param="x_cache", dtype_from="x_cache"),
        "B_cache": Tensor(("num_slots", "num_groups", "ring_len", "state_dim"), param="B_cache", dtype_from="B_cache"),
        "dt_cache": Tensor(("num_slots", "num_heads", "ring_len"), param="dt_cache", dtype="float32"),
    },
    name_prefix="checkpointing_ssu",
    reference=_checkpointing_ssu_reference,
    init=_checkpointing_ssu_init,
    description="Live rows of rings replayed onto Mamba states, new tokens from there, appended to the rings.",
)
