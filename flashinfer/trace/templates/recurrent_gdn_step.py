# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the gated delta rule token by token."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..check import default_check
from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Value, Var
from .recurrent_rules import delta_rule, gdn_gates, l2_normalized
from .shared import normal, seeded

__all__ = [
    "bf16_gated_delta_rule_mtp_trace",
    "bf16_gated_delta_rule_trace",
    "gated_delta_rule_decode_pretranspose_trace",
    "gated_delta_rule_decode_trace",
    "gated_delta_rule_mtp_trace",
    "gated_delta_rule_mtp_ucache_flush_trace",
    "gated_delta_rule_mtp_ucache_trace",
    "gated_delta_rule_replayssm_commit_trace",
]


def _gated_delta_rule_decode_pretranspose_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: Optional[torch.Tensor],
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: Optional[float] = None,
    use_qk_l2norm: bool = True,
    initial_state: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    output_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    pool = state if initial_state is None else initial_state
    assert pool is not None
    slots = torch.arange(q.shape[0], device=q.device) if initial_state_indices is None else initial_state_indices
    targets = slots if output_state_indices is None else output_state_indices
    log_decay, beta = gdn_gates(A_log, a, dt_bias, b)
    output, states = delta_rule(q, k, v, log_decay, beta, pool[slots.long().clamp(min=0)], scale, use_qk_l2norm)
    output[slots < 0] = 0
    result = pool.clone()
    if not disable_state_update:
        written = (slots >= 0) & (targets >= 0)
        result[targets[written].long()] = states[:, -1][written].to(pool.dtype)
    return output.to(q.dtype), result


def _gated_delta_rule_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: Optional[float] = None,
    use_qk_l2norm: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    log_decay, beta = gdn_gates(A_log, a, dt_bias, b)
    output, states = delta_rule(q, k, v, log_decay, beta, state.transpose(2, 3), scale, use_qk_l2norm)
    return output.to(q.dtype), states[:, -1].transpose(2, 3).to(state.dtype)


def _gated_delta_rule_mtp_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: Optional[float] = None,
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: Optional[bool] = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
    slots = initial_state_indices
    log_decay, beta = gdn_gates(A_log, a, dt_bias, b)
    start = initial_state[slots.long().clamp(min=0)]
    output, states = delta_rule(q, k, v, log_decay, beta, start, scale, use_qk_l2norm)
    output[slots < 0] = 0
    pool, used = initial_state.clone(), slots >= 0
    if ssm_state_indices is not None:
        for t in range(q.shape[1]):
            written = used & (ssm_state_indices[:, t] >= 0)
            pool[ssm_state_indices[written, t].long()] = states[written, t].to(pool.dtype)
    elif disable_state_update is False:
        targets = slots if output_state_indices is None else output_state_indices
        written = used & (targets >= 0)
        pool[targets[written].long()] = states[written, -1].to(pool.dtype)
    buffer = None
    if intermediate_states_buffer is not None:
        buffer = intermediate_states_buffer.clone()
        rows = torch.arange(q.shape[0], device=q.device)[used]
        buffer[rows, : q.shape[1]] = states[used].to(buffer.dtype)
    return output.to(q.dtype), pool, buffer


def _gated_delta_rule_replayssm_commit_reference(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    track_state_indices: Optional[torch.Tensor] = None,
    track_steps: Optional[torch.Tensor] = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
    **_: Any,
) -> torch.Tensor:
    result = checkpoint_state.clone()
    for layer, n in [(layer, n) for layer in range(result.shape[0]) for n in range(state_indices.shape[0])]:
        slot = int(state_indices[n])
        if slot < 0 or slot == null_block_id:
            continue
        k, v = (x[layer, slot].transpose(0, 1)[None] for x in (rawk_cache, rawv_cache))
        g, beta = (x[layer, slot].transpose(0, 1)[None] for x in (g_cache, beta_cache))
        start = checkpoint_state[layer, slot][None]
        _output, states = delta_rule(k, k, v, g, beta, start, None, use_qk_l2norm)
        states = torch.cat([start[:, None].double(), states], 1)[0].to(result.dtype)
        if track_state_indices is not None and track_steps is not None and int(track_state_indices[n]) >= 0:
            result[layer, int(track_state_indices[n])] = states[int(track_steps[n])]
        result[layer, slot] = states[int(accept_lens[n])]
    return result


def _bf16_gated_delta_rule_mtp_reference(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Optional[torch.Tensor] = None,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    b: Optional[torch.Tensor] = None,
    initial_state_source: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    output_state_indices: Optional[torch.Tensor] = None,
    accepted_steps: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
    recovery_steps: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert q is not None and k is not None and v is not None and b is not None and initial_state_source is not None
    pool, tokens = initial_state_source.clone(), q.shape[1]
    slots = torch.arange(q.shape[0], device=q.device) if initial_state_indices is None else initial_state_indices
    log_decay, beta = gdn_gates(A_log, a, dt_bias, b, softplus_beta, softplus_threshold)
    start = initial_state_source[slots.long().clamp(min=0)]
    output, states = delta_rule(q, k, v, log_decay, beta, start, scale, use_qk_l2norm_in_kernel)
    output[slots < 0] = 0
    last = torch.full((q.shape[0],), recovery_steps if recovery_steps > 0 else tokens, device=q.device) - 1
    last = last if accepted_steps is None else accepted_steps.long()
    targets = slots if output_state_indices is None else output_state_indices
    for n in range(q.shape[0]):
        if int(slots[n]) < 0 or disable_state_update:
            continue
        if ssm_state_indices is not None:
            for t in range(int(last[n]) + 1):
                if int(ssm_state_indices[n, t]) >= 0:
                    pool[int(ssm_state_indices[n, t])] = states[n, t].to(pool.dtype)
        if (ssm_state_indices is None or output_state_indices is not None) and int(targets[n]) >= 0:
            after = states[n, int(last[n])] if int(last[n]) >= 0 else start[n]
            pool[int(targets[n])] = after.to(pool.dtype)
    return output.to(q.dtype), pool


def _bf16_gated_delta_rule_reference(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Optional[torch.Tensor] = None,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    b: Optional[torch.Tensor] = None,
    initial_state_source: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    output_state_indices: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _bf16_gated_delta_rule_mtp_reference(
        A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices,
        output_state_indices, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, scale=scale,
    )  # fmt: skip


def _gated_delta_rule_mtp_ucache_flush_reference(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Optional[torch.Tensor] = None,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    b: Optional[torch.Tensor] = None,
    initial_state_source: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
    k_cache: Optional[torch.Tensor] = None,
    u_cache: Optional[torch.Tensor] = None,
    g_cache: Optional[torch.Tensor] = None,
    hist_len: Optional[torch.Tensor] = None,
    cache_base: Optional[torch.Tensor] = None,
    flush_min: Optional[int] = None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    assert q is not None and k is not None and v is not None and b is not None and initial_state_source is not None
    assert initial_state_indices is not None and k_cache is not None and u_cache is not None and g_cache is not None
    assert hist_len is not None
    pool, keys, values, decays = initial_state_source.clone(), k_cache.clone(), u_cache.clone(), g_cache.clone()
    ring, tokens = k_cache.shape[2], q.shape[1]
    writes = ring == 32  # flat rings of 16 rows are those of the form that only verifies
    flush_at = 16 - tokens + 1 if flush_min is None else flush_min
    log_decay, beta = gdn_gates(A_log, a, dt_bias, b, softplus_beta, softplus_threshold)
    output = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    repeats = v.shape[2] // q.shape[2]
    for n in range(q.shape[0]):
        slot, length = int(initial_state_indices[n]), int(hist_len[n])
        if slot < 0:
            continue
        base = 0 if cache_base is None else int(cache_base[n])
        live = [(base + j) % ring for j in range(length)]
        s, g = initial_state_source[slot].double(), g_cache[slot].double()
        last = g[:, live[-1]] if length else torch.zeros_like(g[:, 0])
        s = s * last.exp()[:, None, None]
        for j in live:
            k_j = k_cache[slot, :, j].double().repeat_interleave(repeats, dim=0)
            weighted = (last - g[:, j]).exp()[:, None] * u_cache[slot, :, j].double()
            s = s + weighted[:, :, None] * k_j[:, None, :]
        is_flushed = writes and length >= flush_at
        if is_flushed:
            pool[slot] = s.to(pool.dtype)
        total = torch.zeros_like(last) if is_flushed else last
        for t in range(tokens):
            q_t, k_n, v_t, g_t, b_t = (x[n : n + 1, t : t + 1] for x in (q, k, v, log_decay, beta))
            out, after = delta_rule(q_t, k_n, v_t, g_t, b_t, s[None], scale, use_qk_l2norm_in_kernel)
            row = (base + length + t) % ring
            k_t = l2_normalized(k[n, t].double()) if use_qk_l2norm_in_kernel else k[n, t].double()
            decayed = s * log_decay[n, t].exp()[:, None, None]
            k_of = k_t.repeat_interleave(repeats, dim=0)
            u = beta[n, t, :, None] * (v[n, t].double() - (decayed @ k_of[:, :, None])[..., 0])
            total = total + log_decay[n, t]
            keys[slot, :, row], values[slot, :, row] = k_t.to(keys.dtype), u.to(values.dtype)
            decays[slot, :, row] = total.float()
            output[n, t], s = out[0, 0], after[0, 0]
    return output.to(q.dtype), pool, keys, values, decays


def _gated_delta_rule_mtp_ucache_reference(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Optional[torch.Tensor] = None,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    b: Optional[torch.Tensor] = None,
    initial_state_source: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
    k_cache: Optional[torch.Tensor] = None,
    u_cache: Optional[torch.Tensor] = None,
    g_cache: Optional[torch.Tensor] = None,
    hist_len: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    return _gated_delta_rule_mtp_ucache_flush_reference(
        A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices,
        use_qk_l2norm_in_kernel, scale, k_cache, u_cache, g_cache, hist_len,
    )  # fmt: skip


def _gdn_check(
    reference_outputs: Any, actual_outputs: Any, *, rtol: float = 1e-2, atol: float = 5e-3, **limits: Any
) -> bool:
    # bf16 outputs of about 1: a unit in the last place is 2^-8 of them.
    return default_check(reference_outputs, actual_outputs, rtol=rtol, atol=atol, **limits)


def _gdn_arguments(g: torch.Generator, batch: int, tokens: int, heads: int, value_heads: int) -> dict[str, Any]:
    return {
        "q": normal(g, batch, tokens, heads, 128),
        "k": normal(g, batch, tokens, heads, 128),
        "v": normal(g, batch, tokens, value_heads, 128),
        "A_log": normal(g, value_heads, dtype=torch.float32),
        "a": normal(g, batch, tokens, value_heads),
        "dt_bias": normal(g, value_heads, dtype=torch.float32),
        "b": normal(g, batch, tokens, value_heads),
    }


def _gated_delta_rule_decode_pretranspose_init(
    *,
    batch_size: int,
    num_q_heads: int = 16,
    num_v_heads: int = 32,
    seq_len: int = 0,
    pool_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    g = seeded(seed, device)
    state = normal(g, batch_size, num_v_heads, 128, 128, dtype=torch.float32)
    return {**_gdn_arguments(g, batch_size, 1, num_q_heads, num_v_heads), "state": state}


def _gated_delta_rule_decode_init(
    *,
    batch_size: int,
    num_q_heads: int = 16,
    num_v_heads: int = 32,
    seq_len: int = 0,
    device: Any = "cuda",
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    g = seeded(seed, device)
    state = normal(g, batch_size, num_v_heads, 128, 128, dtype=torch.float32)
    return {**_gdn_arguments(g, batch_size, 1, num_q_heads, num_v_heads), "state": state}


def _gated_delta_rule_mtp_init(
    *,
    batch_size: int,
    seq_len: int = 4,
    num_q_heads: int = 16,
    num_v_heads: int = 32,
    pool_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    g = seeded(seed, device)
    pool = normal(g, batch_size + 1, num_v_heads, 128, 128, dtype=torch.float32)
    slots = torch.arange(1, batch_size + 1, dtype=torch.int32, device=device)
    arguments = _gdn_arguments(g, batch_size, seq_len, num_q_heads, num_v_heads)
    return {**arguments, "initial_state": pool, "initial_state_indices": slots, "disable_state_update": False}


_AXES: dict[str, Axis] = {
    "batch_size": Var("sequences"),
    "seq_len": Var("tokens of each sequence"),
    "num_q_heads": Const("heads of q and k", abbrev="h"),
    "num_v_heads": Const("heads of v and of the state", abbrev="hv"),
    "head_dim": Const("key channels", abbrev="k"),
    "value_dim": Const("value channels", abbrev="v"),
}
_POOL_AXES: dict[str, Axis] = {**_AXES, "pool_size": Var("slots of the pool")}
_KEYS = ("batch_size", "seq_len", "num_q_heads", "head_dim")
_VALUES = ("batch_size", "seq_len", "num_v_heads", "value_dim")
_GATES = ("batch_size", "seq_len", "num_v_heads")
_STATE = ("batch_size", "num_v_heads", "value_dim", "head_dim")
_POOL = ("pool_size", "num_v_heads", "value_dim", "head_dim")
_TOKENS: dict[str, Value] = {"q": Tensor(_KEYS), "k": Tensor(_KEYS), "v": Tensor(_VALUES)}
_PARAMETERS: dict[str, Value] = {
    "A_log": Tensor(("num_v_heads",), dtype="float32"),
    "a": Tensor(_GATES, description="projection of the decay"),
    "dt_bias": Tensor(("num_v_heads",)),
    "b": Tensor(_GATES, description="logit of beta"),
}
_OPTIONS: dict[str, Value] = {
    "scale": Scalar(optional=True, description="factor of q; head_dim ** -0.5 by default"),
    "use_qk_l2norm": Scalar("bool", optional=True, description="divide q and k by their L2 norm"),
}
_SLOTS = Tensor(("batch_size",), dtype="int32", optional=True)
_OUTPUT = Tensor(_VALUES, param="output", dtype_from="q")

gated_delta_rule_decode_pretranspose_trace = TraceTemplate(
    "gdn",
    axes=_POOL_AXES,
    inputs={
        **_TOKENS,
        "state": Tensor(_STATE, dtype="float32", optional=True),
        **_PARAMETERS,
        **_OPTIONS,
        "initial_state": Tensor(_POOL, dtype="float32", optional=True, description="pool, in place of state"),
        "initial_state_indices": _SLOTS,
        "output_state_indices": _SLOTS,
        "disable_state_update": Scalar("bool", optional=True),
    },
    outputs={
        "output": _OUTPUT,
        "new_state": Tensor(_STATE, param="state", dtype_from="state", description="the state or the pool"),
    },
    name_prefix="gdn_decode_pretranspose",
    reference=_gated_delta_rule_decode_pretranspose_reference,
    check=_gdn_check,
    init=_gated_delta_rule_decode_pretranspose_init,
    description="A step of the gated delta rule; states [.., V, K] are updated in place.",
)

gated_delta_rule_decode_trace = TraceTemplate(
    "gdn",
    axes=_AXES,
    inputs={
        **_TOKENS,
        "state": Tensor(("batch_size", "num_v_heads", "head_dim", "value_dim"), dtype="float32"),
        **_PARAMETERS,
        **_OPTIONS,
    },
    outputs={
        "output": _OUTPUT,
        "new_state": Tensor(("batch_size", "num_v_heads", "head_dim", "value_dim"), param="state", dtype_from="state"),
    },
    name_prefix="gdn_decode",
    reference=_gated_delta_rule_decode_reference,
    check=_gdn_check,
    init=_gated_delta_rule_decode_init,
    description="A step of the gated delta rule; states [.., K, V] are updated in place.",
)

_BUFFER = ("batch_size", "seq_len", "num_v_heads", "value_dim", "head_dim")
gated_delta_rule_mtp_trace = TraceTemplate(
    "gdn",
    axes=_POOL_AXES,
    inputs={
        **_TOKENS,
        "initial_state": Tensor(_POOL, dtype="float32"),
        "initial_state_indices": Tensor(("batch_size",), dtype="int32"),
        **_PARAMETERS,
        **_OPTIONS,
        "intermediate_states_buffer": Tensor(_BUFFER, dtype="float32", optional=True, unread=True),
        "ssm_state_indices": Tensor(("batch_size", "seq_len"), dtype="int32", optional=True),
        "disable_state_update": Scalar("bool", optional=True),
        "output_state_indices": _SLOTS,
    },
    outputs={
        "output": _OUTPUT,
        "new_state": Tensor(_POOL, param="initial_state", dtype_from="initial_state"),
        "states": Tensor(
            _BUFFER, param="intermediate_states_buffer", dtype_from="initial_state", optional=True, unread=True
        ),
    },
    name_prefix="gdn_mtp",
    reference=_gated_delta_rule_mtp_reference,
    check=_gdn_check,
    init=_gated_delta_rule_mtp_init,
    description="Several tokens of each sequence by the gated delta rule, from a pool of states [.., V, K].",
)

gated_delta_rule_replayssm_commit_trace = TraceTemplate(
    "gdn",
    axes={**_POOL_AXES, "num_layers": Var("layers, each with a pool of its own")},
    inputs={
        "checkpoint_state": Tensor(("num_layers", *_POOL), dtype="float32"),
        "rawv_cache": Tensor(("num_layers", "pool_size", "num_v_heads", "seq_len", "value_dim"), dtype="bfloat16"),
        "rawk_cache": Tensor(("num_layers", "pool_size", "num_q_heads", "seq_len", "head_dim"), dtype="bfloat16"),
        "g_cache": Tensor(("num_layers", "pool_size", "num_v_heads", "seq_len"), dtype="float32"),
        "beta_cache": Tensor(("num_layers", "pool_size", "num_v_heads", "seq_len"), dtype="float32"),
        "state_indices": Tensor(("batch_size",), dtype="int32"),
        "accept_lens": Tensor(("batch_size",), dtype="int32"),
        "track_state_indices": _SLOTS,
        "track_steps": _SLOTS,
        "use_qk_l2norm": Scalar("bool", optional=True),
        "null_block_id": Scalar("int32", optional=True),
    },
    outputs={
        "new_state": Tensor(("num_layers", *_POOL), param="checkpoint_state", dtype_from="checkpoint_state"),
    },
    name_prefix="gdn_replayssm_commit",
    reference=_gated_delta_rule_replayssm_commit_reference,
    check=_gdn_check,
    description="Apply the accepted tokens of stored windows to the states of all layers.",
)

_BF16_INPUTS: dict[str, Value] = {
    "A_log": Tensor(("num_v_heads",), dtype="float32"),
    "a": Tensor(_GATES, description="projection of the decay"),
    "dt_bias": Tensor(("num_v_heads",)),
    "softplus_beta": Scalar(optional=True),
    "softplus_threshold": Scalar(optional=True),
    "q": Tensor(_KEYS),
    "k": Tensor(_KEYS),
    "v": Tensor(_VALUES),
    "b": Tensor(_GATES, description="logit of beta"),
    "initial_state_source": Tensor(_POOL, dtype="bfloat16"),
    "initial_state_indices": Tensor(("batch_size",), dtype="int32"),
}
_BF16_OPTIONS: dict[str, Value] = {
    "use_qk_l2norm_in_kernel": Scalar("bool", optional=True),
    "scale": Scalar(optional=True, description="factor of q; head_dim ** -0.5 by default"),
}
_BF16_OUTPUTS: dict[str, Value] = {
    "output": _OUTPUT,
    "new_state": Tensor(_POOL, param="initial_state_source", dtype_from="initial_state_source"),
}

bf16_gated_delta_rule_trace = TraceTemplate(
    "gdn",
    axes=_POOL_AXES,
    inputs={**_BF16_INPUTS, "output_state_indices": _SLOTS, **_BF16_OPTIONS},
    outputs=_BF16_OUTPUTS,
    name_prefix="gdn_bf16_state",
    reference=_bf16_gated_delta_rule_reference,
    check=_gdn_check,
    description="A step of the gated delta rule on a pool of bfloat16 states.",
)
bf16_gated_delta_rule_mtp_trace = TraceTemplate(
    "gdn",
    axes=_POOL_AXES,
    inputs={
        **_BF16_INPUTS,
        "output_state_indices": _SLOTS,
        "accepted_steps": _SLOTS,
        "ssm_state_indices": Tensor(("batch_size", "seq_len"), dtype="int32", optional=True),
        "disable_state_update": Scalar("bool", optional=True),
        **_BF16_OPTIONS,
        "recovery_steps": Scalar("int32", optional=True),
    },
    outputs=_BF16_OUTPUTS,
    name_prefix="gdn_bf16_state_mtp",
    reference=_bf16_gated_delta_rule_mtp_reference,
    check=_gdn_check,
    description="Several tokens of each sequence on a pool of bfloat16 states.",
)

_RING_AXES: dict[str, Axis] = {**_POOL_AXES, "ring": Const("rows of a ring", abbrev="r")}
_RINGS: dict[str, Value] = {
    "k_cache": Tensor(("pool_size", "num_q_heads", "ring", "head_dim")),
    "u_cache": Tensor(("pool_size", "num_v_heads", "ring", "value_dim")),
    "g_cache": Tensor(("pool_size", "num_v_heads", "ring"), dtype="float32"),
    "hist_len": Tensor(("batch_size",), dtype="int32"),
}
_RING_OUTPUTS: dict[str, Value] = {
    **_BF16_OUTPUTS,
    "new_k": Tensor(("pool_size", "num_q_heads", "ring", "head_dim"), param="k_cache", dtype_from="k_cache"),
    "new_u": Tensor(("pool_size", "num_v_heads", "ring", "value_dim"), param="u_cache", dtype_from="u_cache"),
    "new_g": Tensor(("pool_size", "num_v_heads", "ring"), param="g_cache", dtype="float32"),
}
gated_delta_rule_mtp_ucache_flush_trace = TraceTemplate(
    "gdn",
    axes=_RING_AXES,
    inputs={
        **_BF16_INPUTS,
        **_BF16_OPTIONS,
        **_RINGS,
        "cache_base": Tensor(("batch_size",), dtype="int32", optional=True),
        "flush_min": Scalar("int32", optional=True),
    },
    outputs=_RING_OUTPUTS,
    name_prefix="gdn_ucache_flush",
    reference=_gated_delta_rule_mtp_ucache_flush_reference,
    check=_gdn_check,
    description="Tokens after a ring of corrections, which is folded into the state when it is nearly full.",
)
gated_delta_rule_mtp_ucache_trace = TraceTemplate(
    "gdn",
    axes=_RING_AXES,
    inputs={**_BF16_INPUTS, **_BF16_OPTIONS, **_RINGS},
    outputs=_RING_OUTPUTS,
    name_prefix="gdn_ucache",
    reference=_gated_delta_rule_mtp_ucache_reference,
    check=_gdn_check,
    description="Tokens after a flat ring of corrections; the state is only read.",
)
