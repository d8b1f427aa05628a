# SPDX-License-Identifier: Apache-2.0
"""Templates and references of Mamba: the recurrence token by token, in float32 (float64 for float64 tokens)."""

from __future__ import annotations

import itertools
from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Var, by_rank
from .shared import normal, seeded

__all__ = ["selective_state_update_trace"]


def _philox_word(seed: int, offsets: torch.Tensor, rounds: int) -> torch.Tensor:
    """Return the first word of Philox-4x32 of key ``seed`` and counter (offset, 0, 0), as int64."""
    low = 0xFFFFFFFF
    c = [offsets & low, (offsets >> 32) & low, torch.zeros_like(offsets), torch.zeros_like(offsets)]
    k = [seed & low, (seed >> 32) & low]

    def product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the upper and the lower 32 bits of a product of 64, from products that int64 holds."""
        small, large = x * (factor & 0xFFFF), x * (factor >> 16)
        lower = small + ((large & 0xFFFF) << 16)
        return ((large >> 16) + (lower >> 32)) & low, lower & low

    for _round in range(rounds):
        (a_high, a_low), (b_high, b_low) = product(c[0], 0xD2511F53), product(c[2], 0xCD9E8D57)
        c = [b_high ^ c[1] ^ k[0], b_low, a_high ^ c[3] ^ k[1], a_low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[0]


def _half_by(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round to half: 13 random bits are added below the mantissa that stays, the rest is cut off."""
    bits = x.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = (bits & 0x7FFFFFFF) + (random & 0x1FFF)
    half = (magnitude >> 13) - (112 << 10)
    half = torch.where(magnitude < 0x38800000, 0, torch.where(magnitude >= 0x47800000, 0x7C00, half))
    half = torch.where(x.isnan(), 0x7FFF, half) | ((bits >> 16) & 0x8000)
    return torch.where(half >= 0x8000, half - 0x10000, half).to(torch.int16).view(torch.float16)


def _stored(
    s: torch.Tensor, dtype: torch.dtype, seed: Optional[int], rounds: int, offsets: Optional[torch.Tensor]
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Return a state as it is stored, and its scale if the dtype has one."""
    if dtype == torch.int16:
        most = s.abs().amax(-1, keepdim=True)
        factor = torch.where(most == 0, 1.0, 32767 / most)
        return (s * factor).round().clamp(-32767, 32767).to(dtype), (1 / factor).squeeze(-1).float()
    if seed is not None and offsets is not None and dtype == torch.float16:
        return _half_by(s, _philox_word(seed, offsets, rounds)), None
    return s.to(dtype), None


def _selective_state_update_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    dt_softplus: bool = False,
    state_batch_indices: Optional[torch.Tensor] = None,
    pad_slot_id: int = -1,
    state_scale: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    intermediate_state_indices: Optional[torch.Tensor] = None,
    intermediate_state_scales: Optional[torch.Tensor] = None,
    rand_seed: Optional[torch.Tensor] = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    dst_state_batch_indices: Optional[torch.Tensor] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    num_accepted_tokens: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    seed = None if rand_seed is None else int(rand_seed)
    position = torch.arange(1, device=state.device)
    for size, stride in zip(state.shape[1:], state.stride()[1:], strict=True):
        position = position.unsqueeze(-1) + stride * torch.arange(size, device=state.device)
    new_state, out = state.clone(), torch.zeros_like(x)
    new_scale = None if state_scale is None else state_scale.clone()
    heads, groups = state.shape[1], B.shape[-2]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
    else:
        bounds = [n * max(cache_steps, 1) for n in range(x.shape[0] + 1)]
    flat = (lambda t: t.flatten(0, 1)) if x.ndim == 4 else (lambda t: t)
    xs, dts, bs, cs, outs = (flat(t) for t in (x, dt, B, C, out))
    zs = None if z is None else flat(z)

    def columns(indices: torch.Tensor) -> list[list[int]]:
        return indices.reshape(indices.shape[0], -1).tolist()

    sources = None if state_batch_indices is None else columns(state_batch_indices)
    targets = sources if dst_state_batch_indices is None else columns(dst_state_batch_indices)
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        column = 0 if num_accepted_tokens is None else max(int(num_accepted_tokens[n]) - 1, 0)
        source = n if sources is None else sources[n][column]
        exists = source != pad_slot_id
        s = state[source].to(wide) if exists else torch.zeros(state.shape[1:], dtype=wide, device=x.device)
        if exists and state_scale is not None:
            s = s * state_scale[source].reshape(*s.shape[:2], 1)
        for t in range(begin, end):
            step = dts[t].to(wide)
            if dt_bias is not None:
                step = step + dt_bias.to(wide)
            if dt_softplus:
                step = torch.where(step <= 20, torch.log1p(torch.exp(step.clamp(max=20))), step)
            b, c = (m[t].to(wide).repeat_interleave(heads // groups, 0).unsqueeze(1) for m in (bs, cs))
            token = xs[t].to(wide)
            s = s * torch.exp(A.to(wide) * step.unsqueeze(-1)) + (step * token).unsqueeze(-1) * b
            y = (s * c).sum(-1) + D.to(wide) * token
            if zs is not None:
                y = y * zs[t].to(wide) * torch.sigmoid(zs[t].to(wide))
            outs[t] = y.to(x.dtype)
            if intermediate_states_buffer is not None and exists:
                row = source if intermediate_state_indices is None else int(intermediate_state_indices[n])
                kept, scale = _stored(s, state.dtype, None, 0, None)
                intermediate_states_buffer[row, t - begin] = kept
                if scale is not None and intermediate_state_scales is not None:
                    intermediate_state_scales[row, t - begin] = scale
            target = source if targets is None else targets[n][0]
            stores = t == end - 1
            if num_accepted_tokens is not None and targets is not None:
                stores = t - begin < len(targets[n])
                target = targets[n][t - begin] if stores else target
            if stores and exists and not disable_state_update and target != pad_slot_id:
                offsets = position[0] + target * state.stride(0)
                kept, scale = _stored(s, state.dtype, seed, philox_rounds, offsets)
                new_state[target] = kept
                if scale is not None and new_scale is not None:
                    new_scale[target] = scale.reshape(new_scale[target].shape)
    if new_scale is not None and state_scale is not None:
        state_scale.copy_(new_scale)
    return out, new_state


def _selective_state_update_init(
    *,
    batch_size: int,
    num_slots: int = 0,
    num_heads: int = 64,
    head_dim: int = 64,
    num_groups: int = 8,
    state_dim: int = 128,
    cache_steps: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    lead = (batch_size, cache_steps) if cache_steps else (batch_size,)
    heads = {name: normal(g, num_heads, dtype=torch.float32) for name in ("A", "D", "dt_bias")}
    return {
        "state": normal(g, num_slots or batch_size, num_heads, head_dim, state_dim),
        "x": normal(g, *lead, num_heads, head_dim),
        "dt": normal(g, *lead, num_heads, 1).expand(*lead, num_heads, head_dim),
        "A": -torch.exp(heads["A"]).view(-1, 1, 1).expand(num_heads, head_dim, state_dim),
        "B": normal(g, *lead, num_groups, state_dim),
        "C": normal(g, *lead, num_groups, state_dim),
        "D": heads["D"].bfloat16().view(-1, 1).expand(num_heads, head_dim),
        "dt_bias": heads["dt_bias"].bfloat16().view(-1, 1).expand(num_heads, head_dim),
        "dt_softplus": True,
        "cache_steps": cache_steps,
    }


def _selective_state_update_template(rank: int) -> TraceTemplate:
    steps = ("cache_steps",) if rank == 4 else ()
    axes: dict[str, Axis] = {
        "batch_size": Var("sequences, or tokens of a packed batch"),
        **{name: Const("tokens of each sequence", abbrev="t") for name in steps},
        "num_slots": Var("states of the pool"),
        "num_heads": Const(abbrev="h"),
        "head_dim": Const(abbrev="d"),
        "num_groups": Const(abbrev="g"),
        "state_dim": Const(abbrev="n"),
    }
    token, group = (("batch_size", *steps, *tail) for tail in (("num_heads", "head_dim"), ("num_groups", "state_dim")))
    state = ("num_slots", "num_heads", "head_dim", "state_dim")
    row = ("num_heads", "head_dim")
    return TraceTemplate(
        "mamba",
        axes=axes,
        inputs={
            "state": Tensor(state),
            "x": Tensor(token),
            "dt": Tensor(token),
            "A": Tensor((*row, "state_dim"), dtype="float32"),
            "B": Tensor(group),
            "C": Tensor(group),
            "D": Tensor(row),
            "z": Tensor(token, optional=True, description="gate"),
            "dt_bias": Tensor(row, optional=True),
            "dt_softplus": Scalar("bool", optional=True),
            "state_batch_indices": Tensor(("batch_size",), dtype="int32", optional=True),
            "pad_slot_id": Scalar("int32", optional=True),
            **({"cache_steps": Scalar("int32", optional=True)} if steps else {}),
        },
        outputs={
            "out": Tensor(token, param="out", dtype_from="x"),
            "state": Tensor(state, param="state", dtype_from="state"),
        },
        name_prefix="selective_state_update" + ("_mtp" if steps else ""),
        reference=_selective_state_update_reference,
        init=_selective_state_update_init,
        description="Mamba states advanced by the tokens of a batch, and the outputs of these.",
    )


selective_state_update_trace = by_rank("x", {rank: _selective_state_update_template(rank) for rank in (3, 4)})
