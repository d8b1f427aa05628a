# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention token by token: decode, speculative decode, verification, and whole decode layers."""

from __future__ import annotations

import math
import warnings
from typing import Any, Optional

import torch

from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.recurrent.kda_step import gen_kda_step_module
from ..trace.templates.recurrent import (
    fused_kda_decode_trace,
    packed_fused_kda_decode_trace,
    packed_kda_decode_trace,
)
from .gdn_step import outputs_like
from .kda_prefill import LONG, run_chunks, serves

__all__ = ["fused_kda_decode", "packed_fused_kda_decode", "packed_kda_decode"]

get_kda_step_module = module_cache(gen_kda_step_module)
_native_step = NativeFunction(get_kda_step_module, "kda_step")
_native_decode = NativeFunction(get_kda_step_module, "kda_decode")
_native_convolution = NativeFunction(get_kda_step_module, "kda_convolution")
_native_norm = NativeFunction(get_kda_step_module, "kda_gated_norm")

_NO_SCALE = math.nan  # the kernels' sign for K ** -0.5
RECURRENT, PACKED, FUSED, PACKED_FUSED = range(4)  # the function that a launcher serves, for its errors
LOG_DECAY, SOFTPLUS, BOUNDED = range(3)  # KimiDeltaRule::Gate in rules.h


@register_custom_op(
    "flashinfer::kda_step", mutates_args=("out", "state", "correction_cache", "kg_cache", "state_checkpoints")
)
@called("recurrent_kda")
def run_step(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    state: Optional[torch.Tensor],
    ssm_state_indices: Optional[torch.Tensor],
    num_accepted_tokens: Optional[torch.Tensor],
    initial_state_source: Optional[torch.Tensor],
    initial_state_indices: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],
    writes_each: bool,
    writes_final: bool,
    gate: int,
    lower_bound: float,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    beta_is_logit: bool,
    correction_cache: Optional[torch.Tensor],
    kg_cache: Optional[torch.Tensor],
    state_checkpoints: Optional[torch.Tensor],
    checkpoint_cu_starts: Optional[torch.Tensor],
    checkpoint_state_indices: Optional[torch.Tensor],
    checkpoint_every_n_tokens: int,
    first_slot: int,
    function: int,
) -> None:
    if q.shape[1] >= LONG and q.is_cuda and function == RECURRENT and writes_final and not writes_each:
        by_token = (num_accepted_tokens, initial_state_source, correction_cache, kg_cache)
        if all(x is None for x in by_token) and serves(
            q, k, v, g, ssm_state_indices, cu_seqlens, checkpoint_every_n_tokens
        ):
            return run_chunks(
                out, q, k, v, g, beta, A_log, dt_bias, state, ssm_state_indices, cu_seqlens, gate, lower_bound,
                q.shape[-1] ** -0.5 if scale != scale else scale, use_qk_l2norm_in_kernel, beta_is_logit,
                state_checkpoints, checkpoint_cu_starts, checkpoint_state_indices, checkpoint_every_n_tokens,
            )  # fmt: skip
    _native_step[q.is_cuda](
        out, q, k, v, g, beta, A_log, dt_bias, state, ssm_state_indices, num_accepted_tokens, initial_state_source,
        initial_state_indices, cu_seqlens, writes_each, writes_final, gate, lower_bound, scale, use_qk_l2norm_in_kernel,
        beta_is_logit, correction_cache, kg_cache, state_checkpoints, checkpoint_cu_starts, checkpoint_state_indices,
        checkpoint_every_n_tokens, first_slot, function,
    )  # fmt: skip


@register_custom_op("flashinfer::kda_convolution", mutates_args=("out", "conv_state"))
@called("fused_kda_decode")
def _run_convolution(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: Optional[torch.Tensor],
    num_accepted_tokens: Optional[torch.Tensor],
    function: int,
) -> None:
    _native_convolution[x.is_cuda](
        out, x, weight, conv_state, state_indices, query_start_loc, num_accepted_tokens, function
    )


@register_custom_op("flashinfer::kda_gated_norm", mutates_args=("out",))
@called("fused_kda_decode")
def _run_norm(
    out: torch.Tensor, x: torch.Tensor, output_gate: torch.Tensor, norm_weight: torch.Tensor, eps: float, function: int
) -> None:
    _native_norm[x.is_cuda](out, x, output_gate, norm_weight, eps, function)


def ordinary_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    scale: Optional[float],
    initial_state: Optional[torch.Tensor],
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    lower_bound: Optional[float],
    cu_seqlens: Optional[torch.Tensor],
    ssm_state_indices: Optional[torch.Tensor],
    num_spec_tokens: Optional[int],
    num_accepted_tokens: Optional[torch.Tensor],
    output: Optional[torch.Tensor],
    initial_state_source: Optional[torch.Tensor],
    initial_state_indices: Optional[torch.Tensor],
    beta_is_logit: bool,
    state_checkpoints: Optional[torch.Tensor],
    checkpoint_every_n_tokens: int,
    checkpoint_state_indices: Optional[torch.Tensor],
    disable_state_update: bool,
    correction_cache: Optional[torch.Tensor],
    kg_cache: Optional[torch.Tensor],
    backend: str,
) -> Optional[tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """Shortcut of a decode step of ``recurrent_kda`` on a pool with a given output; the launcher checks the tensors."""
    if (
        initial_state is None
        or ssm_state_indices is None
        or output is None
        or cu_seqlens is not None
        or num_spec_tokens is not None
        or num_accepted_tokens is not None
        or initial_state_source is not None
        or initial_state_indices is not None
        or state_checkpoints is not None
        or checkpoint_every_n_tokens
        or checkpoint_state_indices is not None
        or disable_state_update
        or correction_cache is not None
        or kg_cache is not None
        or backend != "auto"
        or list in map(type, (q, k, v, g, beta, A_log, dt_bias, initial_state, ssm_state_indices, output))
    ):
        return None
    gate = LOG_DECAY if not use_gate_in_kernel else SOFTPLUS if lower_bound is None else BOUNDED
    _native_decode[q.is_cuda](
        output, q, k, v, g, beta, A_log, dt_bias, initial_state, ssm_state_indices, gate,
        0.0 if lower_bound is None else lower_bound, _NO_SCALE if scale is None else scale, use_qk_l2norm_in_kernel,
        beta_is_logit,
    )  # fmt: skip
    return output, initial_state if output_final_state else None


def recurrent_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: Optional[float] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    num_spec_tokens: Optional[int] = None,
    num_accepted_tokens: Optional[torch.Tensor] = None,
    output: Optional[torch.Tensor] = None,
    initial_state_source: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    beta_is_logit: bool = False,
    state_checkpoints: Optional[torch.Tensor] = None,
    checkpoint_cu_starts: Optional[torch.Tensor] = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    correction_cache: Optional[torch.Tensor] = None,
    kg_cache: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Serve ``recurrent_kda`` token by token, for any number of tokens; return output and final state."""
    writes_each = False
    if num_spec_tokens is not None or num_accepted_tokens is not None:
        writes_each = _check_speculation(q, cu_seqlens, ssm_state_indices, num_spec_tokens)
    if disable_state_update or correction_cache is not None or kg_cache is not None:
        _check_frozen(q, disable_state_update, output_final_state, num_accepted_tokens, correction_cache, kg_cache)
        writes_each = False
    if output is None:
        output = outputs_like("recurrent_kda", v, q)
    final = initial_state
    if output_final_state and initial_state is None:
        rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = torch.zeros(rows, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32, device=q.device)
    gate = LOG_DECAY if not use_gate_in_kernel else SOFTPLUS if lower_bound is None else BOUNDED
    run_step(
        output, q, k, v, g, beta, A_log, dt_bias, final, ssm_state_indices, num_accepted_tokens, initial_state_source,
        initial_state_indices, cu_seqlens, writes_each, not disable_state_update, gate,
        0.0 if lower_bound is None else lower_bound, _NO_SCALE if scale is None else scale, use_qk_l2norm_in_kernel,
        beta_is_logit, correction_cache, kg_cache, state_checkpoints, checkpoint_cu_starts, checkpoint_state_indices,
        checkpoint_every_n_tokens, 0, RECURRENT,
    )  # fmt: skip
    return output, final if output_final_state else None


def _check_speculation(
    q: torch.Tensor,
    cu_seqlens: Optional[torch.Tensor],
    ssm_state_indices: Optional[torch.Tensor],
    num_spec_tokens: Optional[int],
) -> bool:
    op = "recurrent_kda"
    if num_spec_tokens is not None and num_spec_tokens < 1:
        raise ArgumentError(f"{op}: num_spec_tokens must be >= 1, got {num_spec_tokens}")
    if ssm_state_indices is None:
        raise ArgumentError(f"{op}: ssm_state_indices is required with num_spec_tokens, got None")
    if ssm_state_indices.ndim != 2:
        raise ArgumentError(f"{op}: ssm_state_indices must be 2D (N, 1+num_spec_tokens), got {ssm_state_indices.ndim}D")
    columns, rows = ssm_state_indices.shape[1], q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if num_spec_tokens is not None and columns != 1 + num_spec_tokens:
        raise ArgumentError(
            f"{op}: ssm_state_indices.shape[1] must equal 1+num_spec_tokens = {1 + num_spec_tokens}, got {columns}"
        )
    if ssm_state_indices.shape[0] != rows:
        raise ArgumentError(
            f"{op}: ssm_state_indices.shape[0] must be {rows} sequences, got {ssm_state_indices.shape[0]}"
        )
    if cu_seqlens is None and q.shape[1] > columns:
        raise ArgumentError(f"{op}: q.shape[1] must be at most {columns} (1+num_spec_tokens), got {q.shape[1]}")
    return True


MOST_FROZEN = 16  # tokens of a frozen verification


def _check_frozen(
    q: torch.Tensor,
    disable_state_update: bool,
    output_final_state: bool,
    num_accepted_tokens: Any,
    correction_cache: Any,
    kg_cache: Any,
) -> None:
    op = "recurrent_kda"
    if not disable_state_update:
        name = "correction_cache" if correction_cache is not None else "kg_cache"
        raise ArgumentError(f"{op}: {name} needs disable_state_update=True, got False")
    if output_final_state:
        raise ArgumentError(f"{op}: output_final_state must be False with disable_state_update, got True")
    if num_accepted_tokens is not None:
        raise ArgumentError(f"{op}: num_accepted_tokens must be None with disable_state_update, got a tensor")
    if q.shape[1] > MOST_FROZEN and q.shape[0] > 1:
        raise ArgumentError(
            f"{op}: q.shape[1] must be at most {MOST_FROZEN} with disable_state_update, got {q.shape[1]}"
        )


def _gate_arguments(
    raw_gate: torch.Tensor, raw_beta: torch.Tensor, shape: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return raw_gate.reshape(shape), raw_beta.reshape(shape[:3])


_PACKED_HEADS, _HEAD_DIM = 12, 128  # sizes of the model that packed_kda_decode serves
_PACKED_LOWER_BOUND = -5.0


@flashinfer_api(trace=packed_kda_decode_trace)
def packed_kda_decode(
    mixed_qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    output: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    r"""One decode step of KDA from one matrix of q, k and v: 12 heads of 128 channels.

    Parameters
    ----------
    mixed_qkv : torch.Tensor
        ``(B, 3 * 12 * 128)`` bfloat16: q, k, v side by side.
    raw_gate, raw_beta : torch.Tensor
        ``(B, 12 * 128)`` and ``(B, 12)``: gate before ``-5 * sigmoid(exp(A_log) * (gate + dt_bias))``, logit of beta.
    A_log, dt_bias : torch.Tensor
        ``(12,)`` and ``(12 * 128,)`` float32.
    state : torch.Tensor
        Pool ``(P, 12, 128, 128)`` bfloat16 or float32, updated in place.
    state_indices : torch.Tensor
        ``(B,)``; -1 is padding, whose output is 0.
    output : Optional[torch.Tensor]
        ``(B, 1, 12, 128)`` bfloat16.

    Examples
    --------
    >>> mixed, gate, beta = (torch.randn(2, width).bfloat16() for width in (4608, 1536, 12))
    >>> pool, slots = torch.zeros(4, 12, 128, 128).bfloat16(), torch.tensor([2, 0], dtype=torch.int32)
    >>> flashinfer.packed_kda_decode(mixed, gate, beta, torch.zeros(12), torch.zeros(1536), pool, slots).shape
    torch.Size([2, 1, 12, 128])
    """
    op = "packed_kda_decode"
    heads, dim = _PACKED_HEADS, _HEAD_DIM
    if mixed_qkv.ndim != 2 or mixed_qkv.shape[1] != 3 * heads * dim:
        raise ArgumentError(f"{op}: mixed_qkv must have shape (B, {3 * heads * dim}), got {tuple(mixed_qkv.shape)}")
    batch = mixed_qkv.shape[0]
    q, k, v = (part.unflatten(1, (heads, dim))[:, None] for part in mixed_qkv.split(heads * dim, 1))
    g, beta = _gate_arguments(raw_gate, raw_beta, (batch, 1, heads, dim))
    if output is None:
        output = q.new_empty(batch, 1, heads, dim)
    run_step(
        output.view(batch, 1, heads, dim), q, k, v, g, beta, A_log, dt_bias, state, state_indices, None, None, None,
        None, False, True, BOUNDED, _PACKED_LOWER_BOUND, _NO_SCALE, True, True, None, None, None, None, None, 0, 0,
        PACKED,
    )  # fmt: skip
    return output


def _check_layer(op: str, x: torch.Tensor, state: torch.Tensor, backend: str) -> tuple[int, int]:
    if backend not in ("cute-dsl", "auto", "cake", "ptx"):
        raise ArgumentError(f"{op}: backend must be cute-dsl, cake, ptx or auto, got {backend!r}")
    if state.ndim != 4 or x.ndim != 2 or x.shape[1] != 3 * state.shape[1] * state.shape[3]:
        raise ArgumentError(
            f"{op}: x must have shape (tokens, 3 * heads * dim) for state (slots, heads, dim, dim), got "
            f"{tuple(x.shape)} and {tuple(state.shape)}"
        )
    return state.shape[1], state.shape[3]


def _layer(
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
    output: Optional[torch.Tensor],
    heads: int,
    dim: int,
    query_start_loc: Optional[torch.Tensor],
    num_accepted_tokens: Optional[torch.Tensor],
    function: int,
) -> torch.Tensor:
    """Convolution, step, gated norm."""
    tokens = x.shape[0]
    mixed = torch.empty_like(x, memory_format=torch.contiguous_format)
    _run_convolution(mixed, x, weight, conv_state, state_indices, query_start_loc, num_accepted_tokens, function)
    is_packed = query_start_loc is not None
    shape = (1, tokens, heads, dim) if is_packed else (tokens, 1, heads, dim)
    q, k, v = (part.unflatten(1, (heads, dim)) for part in mixed.split(heads * dim, 1))
    q, k, v = (part[None] if is_packed else part[:, None] for part in (q, k, v))
    g, beta = _gate_arguments(raw_gate, raw_beta, shape)
    o = torch.empty(shape, dtype=torch.float32, device=x.device)
    run_step(
        o, q, k, v, g, beta, A_log, dt_bias, state, state_indices, num_accepted_tokens, None, None, query_start_loc,
        is_packed and state_indices.ndim == 2, True, SOFTPLUS if lower_bound is None else BOUNDED,
        0.0 if lower_bound is None else lower_bound, _NO_SCALE, True, True, None, None, None, None, None, 0, 1,
        function,
    )  # fmt: skip
    if output is None:
        output = x.new_empty(tokens, heads * dim)
    _run_norm(output, o.view(tokens, heads, dim), output_gate, norm_weight, norm_eps, function)
    return output


@flashinfer_api(trace=fused_kda_decode_trace)
def fused_kda_decode(
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
    output: Optional[torch.Tensor] = None,
    *,
    backend: str = "cute-dsl",
    state_indices_mode: Optional[str] = None,
) -> torch.Tensor:
    r"""A decode layer of KDA: causal convolution of width 4 with SiLU, one step, gated norm.

    Parameters
    ----------
    x : torch.Tensor
        ``(B, 3 * H * 128)`` bfloat16: q, k, v side by side, before the convolution.
    weight : torch.Tensor
        ``(3, 4, H * 128)`` float32: taps of q, k and v; the last is that of the token itself.
    conv_state : torch.Tensor
        ``(slots, 3 * H * 128, 3)`` bfloat16: the inputs before, updated in place.
    raw_gate, raw_beta, A_log, dt_bias, lower_bound
        As in :func:`packed_kda_decode`; ``lower_bound=None`` is the gate ``-exp(A_log) * softplus(gate + dt_bias)``.
    state_indices : torch.Tensor
        ``(B,)``; slots below 1 are null: the output is 0, nothing is written.
    state : torch.Tensor
        Pool ``(slots, H, 128, 128)``, updated in place.
    output_gate, norm_weight : torch.Tensor
        ``(B, H * 128)`` and ``(128,)``: the result is ``rmsnorm(o) * norm_weight * sigmoid(output_gate)``.
    norm_eps : float
        Added to the mean square of ``o``.
    backend, state_indices_mode : str
        Published names; there is one implementation.

    Returns
    -------
    torch.Tensor
        ``output``, ``(B, H * 128)`` bfloat16 if allocated here.

    Examples
    --------
    One head; slot 0 is null.

    >>> x, gate, beta, out_gate = (torch.randn(2, width).bfloat16() for width in (384, 128, 1, 128))
    >>> window, pool = torch.zeros(4, 384, 3).bfloat16(), torch.zeros(4, 1, 128, 128).bfloat16()
    >>> taps, slots, norm = torch.randn(3, 4, 128), torch.tensor([2, 0], dtype=torch.int32), torch.ones(128).bfloat16()
    >>> decays = (torch.zeros(1), torch.zeros(128))
    >>> flashinfer.fused_kda_decode(x, taps, window, gate, beta, *decays, slots, pool, out_gate, norm).shape
    torch.Size([2, 128])
    """
    op = "fused_kda_decode"
    heads, dim = _check_layer(op, x, state, backend)
    return _layer(
        x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state, output_gate, norm_weight,
        lower_bound, norm_eps, output, heads, dim, None, None, FUSED,
    )  # fmt: skip


@flashinfer_api(trace=packed_fused_kda_decode_trace)
def packed_fused_kda_decode(
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
    output: Optional[torch.Tensor] = None,
    *,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    t1_state_indices: Optional[torch.Tensor] = None,
    backend: str = "cute-dsl",
    state_indices_mode: Optional[str] = None,
) -> torch.Tensor:
    r""":func:`fused_kda_decode` of one or more tokens of each sequence, packed.

    Sequence n has tokens ``query_start_loc[n]`` to ``query_start_loc[n + 1]``. It begins from the state in slot
    ``state_indices[n, max(num_accepted_tokens[n], 1) - 1]``, and the state after its token t goes to slot
    ``state_indices[n, t]``. Its window of the convolution is in slot ``state_indices[n, 0]``, ``T + 2`` inputs long.
    ``t1_state_indices (N,)`` replaces ``state_indices`` where every sequence has one token.

    Examples
    --------
    One sequence of two tokens, one head.

    >>> x, gate, beta, out_gate = (torch.randn(2, width).bfloat16() for width in (384, 128, 1, 128))
    >>> window, pool = torch.zeros(4, 384, 4).bfloat16(), torch.zeros(4, 1, 128, 128).bfloat16()
    >>> taps, norm, decays = torch.randn(3, 4, 128), torch.ones(128).bfloat16(), (torch.zeros(1), torch.zeros(128))
    >>> slots, starts, accepted = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 3]], [0, 2], [1]))
    >>> arguments = (x, taps, window, gate, beta, *decays, slots, pool, out_gate, norm)
    >>> y = flashinfer.packed_fused_kda_decode(*arguments, query_start_loc=starts, num_accepted_tokens=accepted)
    """
    op = "packed_fused_kda_decode"
    heads, dim = _check_layer(op, x, state, backend)
    if t1_state_indices is not None and x.shape[0] == query_start_loc.shape[0] - 1:
        state_indices = t1_state_indices[:, None]
    if state_indices.ndim != 2:
        raise ArgumentError(f"{op}: state_indices must have 2 dimensions (N, T), got {state_indices.ndim}")
    return _layer(
        x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state, output_gate, norm_weight,
        lower_bound, norm_eps, output, heads, dim, query_start_loc, num_accepted_tokens, PACKED_FUSED,
    )  # fmt: skip


def recurrent_kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: Optional[float] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    num_spec_tokens: Optional[int] = None,
    num_accepted_tokens: Optional[torch.Tensor] = None,
    output: Optional[torch.Tensor] = None,
    initial_state_source: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    beta_is_logit: bool = False,
    *,
    disable_state_update: bool = False,
    correction_cache: Optional[torch.Tensor] = None,
    kg_cache: Optional[torch.Tensor] = None,
    backend: Optional[str] = None,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """The published ``kda_decode.recurrent_kda``: :func:`flashinfer.recurrent_kda` without arguments of prefill."""
    warnings.warn(
        "flashinfer.kda_decode.recurrent_kda is deprecated, call flashinfer.recurrent_kda", DeprecationWarning,
        stacklevel=2,
    )  # fmt: skip
    return recurrent_step(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, lower_bound, cu_seqlens, ssm_state_indices, num_spec_tokens, num_accepted_tokens, output,
        initial_state_source, initial_state_indices, beta_is_logit, disable_state_update=disable_state_update,
        correction_cache=correction_cache, kg_cache=kg_cache,
    )  # fmt: skip
