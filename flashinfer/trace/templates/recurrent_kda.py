# SPDX-License-Identifier: Apache-2.0
"""Templates and references of Kimi delta attention."""

from __future__ import annotations

import itertools
from typing import Any, Optional

import torch

from ..check import default_check
from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Value, Var
from .recurrent_rules import delta_rule, softplus

__all__ = [
    "fused_kda_decode_trace",
    "packed_fused_kda_decode_trace",
    "packed_kda_decode_trace",
    "recurrent_kda_trace",
]


def kda_gates(
    g: torch.Tensor, A_log: Optional[torch.Tensor], dt_bias: Optional[torch.Tensor], lower_bound: Optional[float]
) -> torch.Tensor:
    """Return the log decays of a gate ``(..., HV, K)``."""
    x = g.double()
    if dt_bias is not None:
        x = x + dt_bias.double().reshape(g.shape[-2:])
    factor = torch.ones((), dtype=torch.float64, device=g.device)
    if A_log is not None:
        factor = A_log.double().reshape(-1, 1).exp()
    return -factor * softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(factor * x)


def _recurrent_kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: Optional[float] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    num_accepted_tokens: Optional[torch.Tensor] = None,
    beta_is_logit: bool = False,
    disable_state_update: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    batch, tokens = q.shape[:2]
    rows = [(n, 0, tokens) for n in range(batch)]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        rows = [(0, begin, end) for begin, end in itertools.pairwise(ends)]
    log_decay = kda_gates(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g.double()
    strength = torch.sigmoid(beta.double()) if beta_is_logit else beta.double()
    output = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    result = None if initial_state is None else initial_state.clone()
    for n, (row, begin, end) in enumerate(rows):
        slots = [n] if ssm_state_indices is None else ssm_state_indices[n].reshape(-1).tolist()
        column = 0 if num_accepted_tokens is None else min(max(int(num_accepted_tokens[n]) - 1, 0), len(slots) - 1)
        if slots[column] < 0 or begin == end:
            continue
        start = v.new_zeros(1, v.shape[2], v.shape[3], q.shape[3]).double()
        if initial_state is not None:
            start = initial_state[slots[column]][None].double()
        q_n, k_n, v_n, g_n, b_n = (x[row : row + 1, begin:end] for x in (q, k, v, log_decay, strength))
        out, states = delta_rule(q_n, k_n, v_n, g_n, b_n, start, scale, use_qk_l2norm_in_kernel)
        output[row, begin:end] = out[0]
        if result is None or disable_state_update:
            continue
        if ssm_state_indices is not None and ssm_state_indices.ndim == 2:
            for t in range(end - begin):
                if slots[t] >= 0:
                    result[slots[t]] = states[0, t].to(result.dtype)
        else:
            result[slots[0]] = states[0, -1].to(result.dtype)
    return output.to(q.dtype), result


def _packed_kda_decode_reference(
    mixed_qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    q, k, v = mixed_qkv.reshape(mixed_qkv.shape[0], 1, 3, 12, 128).unbind(2)
    return _recurrent_kda_reference(
        q, k, v, raw_gate.reshape(v.shape), raw_beta.reshape(v.shape[:3]), A_log, dt_bias, initial_state=state,
        use_gate_in_kernel=True, lower_bound=-5.0, ssm_state_indices=state_indices, beta_is_logit=True,
    )  # fmt: skip


def kda_layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: Optional[float],
    norm_eps: float,
    query_start_loc: Optional[torch.Tensor] = None,
    num_accepted_tokens: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolution, step and gated norm; the output, the windows and the states."""
    heads, dim = state.shape[1], state.shape[3]
    ends = list(range(x.shape[0] + 1)) if query_start_loc is None else query_start_loc.tolist()
    window, states = conv_state.clone(), state.clone()
    output = torch.zeros(x.shape[0], heads * dim, dtype=torch.float64, device=x.device)
    taps = weight.double().permute(1, 0, 2).reshape(4, -1)
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        slots = state_indices[n].reshape(-1).tolist()
        column = 0 if num_accepted_tokens is None else max(int(num_accepted_tokens[n]) - 1, 0)
        if slots[0] < 1 or slots[column] < 1 or begin == end:
            continue
        inputs = torch.cat([conv_state[slots[0]].T[column : column + 3], x[begin:end]])
        window[slots[0], :, : end - begin + 2] = inputs[1:].T
        mixed = torch.stack([(taps * inputs[t : t + 4].double()).sum(0) for t in range(end - begin)])
        mixed = (mixed * torch.sigmoid(mixed)).to(x.dtype)
        q, k, v = mixed.reshape(1, end - begin, 3, heads, dim).unbind(2)
        log_decay = kda_gates(raw_gate.reshape(-1, heads, dim)[begin:end], A_log, dt_bias, lower_bound)[None]
        beta = torch.sigmoid(raw_beta.double().reshape(-1, heads)[begin:end])[None]
        o, after = delta_rule(q, k, v, log_decay, beta, state[slots[column]][None])
        for t in range(end - begin):
            if slots[t] > 0:
                states[slots[t]] = after[0, t].to(state.dtype)
        o = o[0] * torch.rsqrt(o[0].square().mean(-1, keepdim=True) + norm_eps) * norm_weight.double()
        gate = torch.sigmoid(output_gate.double().reshape(-1, heads, dim)[begin:end])
        output[begin:end] = (o * gate).flatten(1)
    return output.to(x.dtype), window, states


def _fused_kda_decode_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: Optional[float] = -5.0,
    norm_eps: float = 1e-5,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return kda_layer(
        x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state, output_gate, norm_weight,
        lower_bound, norm_eps,
    )  # fmt: skip


def _packed_fused_kda_decode_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    lower_bound: Optional[float] = -5.0,
    norm_eps: float = 1e-5,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return kda_layer(
        x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state, output_gate, norm_weight,
        lower_bound, norm_eps, query_start_loc, num_accepted_tokens,
    )  # fmt: skip


def _kda_check(
    reference_outputs: Any, actual_outputs: Any, *, rtol: float = 1e-2, atol: float = 1e-2, **limits: Any
) -> bool:
    return default_check(reference_outputs, actual_outputs, rtol=rtol, atol=atol, **limits)


_AXES: dict[str, Axis] = {
    "batch_size": Var("rows of tokens; 1 where sequences are packed"),
    "seq_len": Var("tokens of each row"),
    "num_sequences": Var("sequences, as many as rows unless they are packed"),
    "num_offsets": Var("sequences and one"),
    "num_slots": Var("states"),
    "num_heads": Const("heads of q and k", abbrev="h"),
    "num_v_heads": Const("heads of v and of the state", abbrev="hv"),
    "head_dim": Const("key channels", abbrev="k"),
    "value_dim": Const("value channels", abbrev="v"),
    "gate_channels": Const(
        "channels of all value heads", abbrev="", of=lambda sizes: sizes["num_v_heads"] * sizes["head_dim"]
    ),
}
_VALUES = ("batch_size", "seq_len", "num_v_heads", "value_dim")
_KEYS = ("batch_size", "seq_len", "num_heads", "head_dim")
_STATE = ("num_slots", "num_v_heads", "value_dim", "head_dim")
_GATE: dict[str, Value] = {
    "A_log": Tensor(("num_v_heads",), dtype="float32", optional=True),
    "dt_bias": Tensor(("gate_channels",), dtype="float32", optional=True),
}

recurrent_kda_trace = TraceTemplate(
    "kda",
    axes=_AXES,
    inputs={
        "q": Tensor(_KEYS),
        "k": Tensor(_KEYS),
        "v": Tensor(_VALUES),
        "g": Tensor(("batch_size", "seq_len", "num_v_heads", "head_dim"), description="log decay or gate"),
        "beta": Tensor(("batch_size", "seq_len", "num_v_heads")),
        **_GATE,
        "scale": Scalar(optional=True, description="factor of q; head_dim ** -0.5 by default"),
        "initial_state": Tensor(_STATE, dtype="float32", optional=True),
        "use_qk_l2norm_in_kernel": Scalar("bool", optional=True),
        "use_gate_in_kernel": Scalar("bool", optional=True),
        "lower_bound": Scalar(optional=True),
        "cu_seqlens": Tensor(("num_offsets",), dtype="int32", optional=True),
        "ssm_state_indices": Tensor(("num_sequences",), dtype="int32", optional=True, unread=True),
        "num_accepted_tokens": Tensor(("num_sequences",), dtype="int32", optional=True),
        "beta_is_logit": Scalar("bool", optional=True),
        "disable_state_update": Scalar("bool", optional=True),
    },
    outputs={
        "output": Tensor(_VALUES, param="output", dtype_from="q"),
        "new_state": Tensor(_STATE, param="initial_state", dtype_from="initial_state", optional=True),
    },
    name_prefix="recurrent_kda",
    reference=_recurrent_kda_reference,
    check=_kda_check,
    description="Kimi delta attention: the delta rule with a decay for each key channel; states in place.",
)

_LAYER_AXES: dict[str, Axis] = {
    "num_tokens": Var(),
    "num_sequences": Var(),
    "num_slots": Var("states"),
    "num_heads": Const(abbrev="h"),
    "head_dim": Const(abbrev="d"),
    "channels": Const("channels of q, k and v", abbrev=""),
    "width": Const("channels of all heads", abbrev=""),
    "three": Const("q, k, v", abbrev=""),
    "taps": Const("taps of the convolution", abbrev=""),
    "window": Const("inputs kept", abbrev=""),
}
_SQUARE = ("num_slots", "num_heads", "head_dim", "head_dim")
_LAYER: dict[str, Value] = {
    "x": Tensor(("num_tokens", "channels"), description="q, k, v before the convolution"),
    "weight": Tensor(("three", "taps", "width"), dtype="float32"),
    "conv_state": Tensor(("num_slots", "channels", "window"), description="inputs before, in place"),
    "raw_gate": Tensor(("num_tokens", "width"), unread=True),
    "raw_beta": Tensor(("num_tokens", "num_heads"), unread=True),
    "A_log": Tensor(("num_heads",), dtype="float32"),
    "dt_bias": Tensor(("width",), dtype="float32", unread=True),
    "state_indices": Tensor(("num_sequences",), dtype="int32", unread=True),
    "state": Tensor(_SQUARE),
    "output_gate": Tensor(("num_tokens", "width"), unread=True),
    "norm_weight": Tensor(("head_dim",)),
    "lower_bound": Scalar(optional=True),
    "norm_eps": Scalar(optional=True),
}
_LAYER_OUTPUTS: dict[str, Value] = {
    "output": Tensor(("num_tokens", "width"), param="output", dtype_from="x", unread=True),
    "new_conv_state": Tensor(("num_slots", "channels", "window"), param="conv_state", dtype_from="conv_state"),
    "new_state": Tensor(_SQUARE, param="state", dtype_from="state"),
}
fused_kda_decode_trace = TraceTemplate(
    "kda",
    axes=_LAYER_AXES,
    inputs=_LAYER,
    outputs=_LAYER_OUTPUTS,
    name_prefix="fused_kda_decode",
    reference=_fused_kda_decode_reference,
    check=_kda_check,
    description="A decode layer: convolution of width 4 with SiLU, a step of KDA, gated norm.",
)
packed_fused_kda_decode_trace = TraceTemplate(
    "kda",
    axes={**_LAYER_AXES, "num_offsets": Var("sequences and one")},
    inputs={
        **{name: value for name, value in _LAYER.items() if name not in ("lower_bound", "norm_eps")},
        "query_start_loc": Tensor(("num_offsets",), dtype="int32"),
        "num_accepted_tokens": Tensor(("num_sequences",), dtype="int32"),
        "lower_bound": Scalar(optional=True),
        "norm_eps": Scalar(optional=True),
    },
    outputs=_LAYER_OUTPUTS,
    name_prefix="packed_fused_kda_decode",
    reference=_packed_fused_kda_decode_reference,
    check=_kda_check,
    description="A decode layer of one or more tokens of each sequence, packed.",
)
packed_kda_decode_trace = TraceTemplate(
    "kda",
    axes={
        "batch_size": Var(),
        "num_slots": Var("states"),
        "channels": Const("channels of q, k and v", abbrev=""),
        "width": Const("channels of all heads", abbrev=""),
        "num_heads": Const(abbrev="h"),
        "head_dim": Const(abbrev="d"),
        "one": Const("a token of each sequence", abbrev="", value=1),
    },
    inputs={
        "mixed_qkv": Tensor(("batch_size", "channels")),
        "raw_gate": Tensor(("batch_size", "width")),
        "raw_beta": Tensor(("batch_size", "num_heads"), unread=True),
        "A_log": Tensor(("num_heads",), dtype="float32"),
        "dt_bias": Tensor(("width",), dtype="float32", unread=True),
        "state": Tensor(_SQUARE),
        "state_indices": Tensor(("batch_size",), dtype="int32"),
    },
    outputs={
        "output": Tensor(
            ("batch_size", "one", "num_heads", "head_dim"), param="output", dtype_from="mixed_qkv", unread=True
        ),
        "new_state": Tensor(_SQUARE, param="state", dtype_from="state"),
    },
    name_prefix="packed_kda_decode",
    reference=_packed_kda_decode_reference,
    check=_kda_check,
    description="A step of KDA from one matrix of q, k and v.",
)
