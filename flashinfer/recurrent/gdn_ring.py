# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule with a ring of tokens that are not folded into the state yet."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.recurrent import gated_delta_rule_mtp_ucache_flush_trace, gated_delta_rule_mtp_ucache_trace
from .gdn_step import _NO_SCALE, get_gdn_step_module, given, outputs_like

__all__ = ["gated_delta_rule_mtp_ucache", "gated_delta_rule_mtp_ucache_flush"]

WINDOW = 16  # live rows of a ring at most
_native_ring = NativeFunction(get_gdn_step_module, "gdn_ring")


@register_custom_op("flashinfer::gdn_ring", mutates_args=("out", "state", "k_cache", "u_cache", "g_cache"))
@called("gated_delta_rule_mtp_ucache_flush")
def _run_ring(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    initial_state_indices: torch.Tensor,
    k_cache: torch.Tensor,
    u_cache: torch.Tensor,
    g_cache: torch.Tensor,
    hist_len: torch.Tensor,
    cache_base: Optional[torch.Tensor],
    flush_min: int,
    writes_final: bool,
    scale: float,
    softplus_beta: float,
    softplus_threshold: float,
    use_qk_l2norm: bool,
) -> None:
    _native_ring[q.is_cuda](
        out, q, k, v, state, A_log, a, dt_bias, b, initial_state_indices, k_cache, u_cache, g_cache, hist_len,
        cache_base, flush_min, writes_final, scale, softplus_beta, softplus_threshold, use_qk_l2norm, True,
    )  # fmt: skip


def _refuse(op: str, **options: object) -> None:
    """Raise for options that a ring does not have."""
    for name, value in options.items():
        if isinstance(value, torch.Tensor) or value:
            raise NotImplementedError(f"{op}: {name} is not supported with a ring, got {type(value).__name__}")


def _check_cursors(op: str, hist_len: torch.Tensor, cache_base: torch.Tensor, rows: int) -> None:
    """Check cursors that the caller owns. Values on a GPU are read, except while a graph is captured."""
    for name, cursor in (("hist_len", hist_len), ("cache_base", cache_base)):
        if not cursor.is_contiguous():
            raise ArgumentError(f"{op}: {name} must be contiguous, got strides {cursor.stride()}")
    if torch.compiler.is_compiling() or (hist_len.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    for name, cursor, last in (("hist_len", hist_len, WINDOW), ("cache_base", cache_base, rows - 1)):
        if cursor.numel() and not bool(((cursor >= 0) & (cursor <= last)).all()):
            raise ArgumentError(f"{op}: {name} out of legal range 0 to {last}, got {cursor.tolist()!r:.80}")


@flashinfer_api(trace=gated_delta_rule_mtp_ucache_flush_trace)
def gated_delta_rule_mtp_ucache_flush(
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
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    accepted_steps: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
    output: Optional[torch.Tensor] = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
    k_cache: Optional[torch.Tensor] = None,
    u_cache: Optional[torch.Tensor] = None,
    g_cache: Optional[torch.Tensor] = None,
    hist_len: Optional[torch.Tensor] = None,
    cache_base: Optional[torch.Tensor] = None,
    flush_min: Optional[int] = None,
    restart_hist_on_flush: bool = True,
    pdl_trigger: bool = False,
) -> torch.Tensor:
    r"""Several tokens after a ring, which is folded into the state when it is nearly full.

    With P live rows, ``S_h = e^(G_P) S + sum_j e^(G_P - g_j) u_j k_j^T`` over rows ``(base + j) % 32`` is the state
    before the first token. Keys (normalised), corrections and cumulated log decays of the tokens are appended at
    ``(base + P + t) % 32``. Rows with ``P >= flush_min`` are flushed: ``S_h`` goes to the pool, and the log decays
    start again at 0.

    Parameters
    ----------
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, scale, output
        As in the decode functions, with T tokens.
    initial_state_source, initial_state_indices
        Pool ``[P, HV, 128, 128]`` of bfloat16 or float16, and slots ``(B,)``; a negative slot skips the row.
    k_cache, u_cache, g_cache : torch.Tensor
        Rings ``[P, H, 32, K]``, ``[P, HV, 32, V]`` of 16 bits and ``[P, HV, 32]`` float32.
    hist_len, cache_base : torch.Tensor
        ``(B,)`` integers: P (at most 16) and base of each row of the batch.
    flush_min : Optional[int]
        Default ``16 - T + 1``.
    restart_hist_on_flush : bool
        True moves the cursors of flushed rows in place: ``base = (base + P) % 32``, ``P = 0``. It needs ``cache_base``.
    pdl_trigger : bool
        Accepted for callers; the kernel decides itself.

    Returns
    -------
    torch.Tensor
        ``(B, T, HV, V)``.
    """
    op = "gated_delta_rule_mtp_ucache_flush"
    _refuse(
        op, output_state_indices=output_state_indices, intermediate_states_buffer=intermediate_states_buffer,
        accepted_steps=accepted_steps, ssm_state_indices=ssm_state_indices, disable_state_update=disable_state_update,
        disable_output=disable_output, recovery_steps=recovery_steps,
    )  # fmt: skip
    q, k, v, b = given(op, "q", q), given(op, "k", k), given(op, "v", v), given(op, "b", b)
    pool = given(op, "initial_state_source", initial_state_source)
    slots = given(op, "initial_state_indices", initial_state_indices)
    k_cache, u_cache = given(op, "k_cache", k_cache), given(op, "u_cache", u_cache)
    g_cache, hist_len = given(op, "g_cache", g_cache), given(op, "hist_len", hist_len)
    if restart_hist_on_flush:
        if cache_base is None:
            raise ArgumentError(f"{op}: restart_hist_on_flush needs a caller-owned cache_base, got None")
        _check_cursors(op, hist_len, cache_base, k_cache.shape[2])
    tokens = q.shape[1]
    if flush_min is None:
        flush_min = WINDOW - tokens + 1
    if output is None:
        output = outputs_like(op, v, q)
    _run_ring(
        output, q, k, v, pool, A_log, a, dt_bias, b, slots, k_cache, u_cache, g_cache,
        hist_len, cache_base, flush_min, True, _NO_SCALE if scale is None else scale, softplus_beta, softplus_threshold,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    if restart_hist_on_flush and cache_base is not None:
        flushed = (hist_len >= flush_min) & (slots >= 0)
        cache_base.copy_(torch.where(flushed, (cache_base + hist_len) % k_cache.shape[2], cache_base))
        hist_len.masked_fill_(flushed, 0)
    return output


@flashinfer_api(trace=gated_delta_rule_mtp_ucache_trace)
def gated_delta_rule_mtp_ucache(
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
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    accepted_steps: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
    output: Optional[torch.Tensor] = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
    k_cache: Optional[torch.Tensor] = None,
    u_cache: Optional[torch.Tensor] = None,
    g_cache: Optional[torch.Tensor] = None,
    hist_len: Optional[torch.Tensor] = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    r"""Several bfloat16 tokens after a flat ring of 16 rows, of which the first ``hist_len`` are live.

    No state is written, whatever ``disable_state_update`` is. The tokens are appended after the live rows. Arguments as
    in :func:`gated_delta_rule_mtp_ucache_flush`; ``use_pdl`` is its ``pdl_trigger``.
    """
    op = "gated_delta_rule_mtp_ucache"
    _refuse(
        op, output_state_indices=output_state_indices, intermediate_states_buffer=intermediate_states_buffer,
        accepted_steps=accepted_steps, ssm_state_indices=ssm_state_indices, disable_output=disable_output,
        recovery_steps=recovery_steps,
    )  # fmt: skip
    q, k, v, b = given(op, "q", q), given(op, "k", k), given(op, "v", v), given(op, "b", b)
    pool = given(op, "initial_state_source", initial_state_source)
    slots = given(op, "initial_state_indices", initial_state_indices)
    k_cache, u_cache = given(op, "k_cache", k_cache), given(op, "u_cache", u_cache)
    g_cache, hist_len = given(op, "g_cache", g_cache), given(op, "hist_len", hist_len)
    if q.dtype is not torch.bfloat16:
        raise ArgumentError(f"{op}: q must be bfloat16 (this form is bf16-only), got {q.dtype}")
    if output is None:
        output = outputs_like(op, v, q)
    _run_ring(
        output, q, k, v, pool, A_log, a, dt_bias, b, slots, k_cache, u_cache, g_cache,
        hist_len, None, 0, False, _NO_SCALE if scale is None else scale, softplus_beta, softplus_threshold,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return output
