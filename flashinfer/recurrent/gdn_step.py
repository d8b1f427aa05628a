# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule token by token: decode, verification of drafts, replay of the accepted ones."""

from __future__ import annotations

import math
import warnings
from typing import Any, NoReturn, Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.kept import one_launch
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.recurrent.gdn_step import gen_gdn_step_module
from ..trace.templates.recurrent import (
    gated_delta_rule_decode_pretranspose_trace,
    gated_delta_rule_decode_trace,
    gated_delta_rule_mtp_trace,
    gated_delta_rule_replayssm_commit_trace,
)

__all__ = [
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "gated_delta_rule_replayssm_commit",
]

get_gdn_step_module = module_cache(gen_gdn_step_module)
_native_decode = NativeFunction(get_gdn_step_module, "gdn_decode")
_native_verify = NativeFunction(get_gdn_step_module, "gdn_verify")
_native_replay = NativeFunction(get_gdn_step_module, "gdn_replay")
_native_k_major = NativeFunction(get_gdn_step_module, "gdn_decode_k_major")

_NO_SCALE = math.nan  # the kernels' sign for K ** -0.5
PRETRANSPOSE, MTP, BF16_STATE = range(3)  # function that a launcher serves, for its errors

# Registered ops: torch.compile puts them into graphs, eager mode calls them directly.


@register_custom_op("flashinfer::gdn_decode", mutates_args=("out", "state"))
@called("gated_delta_rule_decode_pretranspose")
def run_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    initial_state_indices: Optional[torch.Tensor],
    output_state_indices: Optional[torch.Tensor],
    scale: float,
    softplus_beta: float,
    softplus_threshold: float,
    use_qk_l2norm: bool,
    function: int,
) -> None:
    _native_decode[q.is_cuda](
        out, q, k, v, state, A_log, a, dt_bias, b, initial_state_indices, output_state_indices, scale, softplus_beta,
        softplus_threshold, use_qk_l2norm, function,
    )  # fmt: skip


@register_custom_op(
    "flashinfer::gdn_verify",
    mutates_args=("out", "state", "buffer", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta"),
)
@called("gated_delta_rule_mtp")
def run_verify(
    out: Optional[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    initial_state_indices: Optional[torch.Tensor],
    output_state_indices: Optional[torch.Tensor],
    buffer: Optional[torch.Tensor],
    ssm_state_indices: Optional[torch.Tensor],
    accepted_steps: Optional[torch.Tensor],
    recovery_steps: int,
    writes_final: bool,
    scale: float,
    softplus_beta: float,
    softplus_threshold: float,
    use_qk_l2norm: bool,
    zero_skipped: bool,
    replayssm_rawv: Optional[torch.Tensor],
    replayssm_rawk: Optional[torch.Tensor],
    replayssm_g: Optional[torch.Tensor],
    replayssm_beta: Optional[torch.Tensor],
    function: int,
) -> None:
    _native_verify[q.is_cuda](
        out, q, k, v, state, A_log, a, dt_bias, b, initial_state_indices, output_state_indices, buffer,
        ssm_state_indices, accepted_steps, recovery_steps, writes_final, scale, softplus_beta, softplus_threshold,
        use_qk_l2norm, zero_skipped, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta, function,
    )  # fmt: skip


@register_custom_op("flashinfer::gdn_replay", mutates_args=("checkpoint_state",))
@called("gated_delta_rule_replayssm_commit")
def _run_replay(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    track_state_indices: Optional[torch.Tensor],
    use_qk_l2norm: bool,
) -> None:
    _native_replay[rawk_cache.is_cuda](
        checkpoint_state, rawv_cache, rawk_cache, g_cache, beta_cache, state_indices, accept_lens, track_state_indices,
        use_qk_l2norm,
    )  # fmt: skip


@register_custom_op("flashinfer::gdn_decode_k_major", mutates_args=("out", "state"))
@called("gated_delta_rule_decode")
def run_k_major(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    use_qk_l2norm: bool,
) -> None:
    _native_k_major[q.is_cuda](out, q, k, v, state, A_log, a, dt_bias, b, scale, use_qk_l2norm)


def outputs_like(op: str, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Allocate outputs: the shape of ``v``, the dtype of ``q``."""
    try:
        return new_empty(v, q.dtype, *v.shape)
    except AttributeError as error:
        bad = "v" if not isinstance(v, torch.Tensor) else "q"
        kind = type(v if bad == "v" else q).__name__
        raise TypeError(f"{op}: {bad} must be a tensor, got a {kind}") from error


def given(op: str, name: str, x: Optional[torch.Tensor]) -> torch.Tensor:
    """Return a tensor whose published parameter has a default that no call can use."""
    if x is None:
        raise TypeError(f"{op}: {name} must be a tensor, got None")
    return x


def _check_backend(op: str, backend: str) -> None:
    if backend == "rubin":
        raise ArgumentError(f"{op}: backend must be auto, flashinfer or cake_gdn on this GPU, got 'rubin'")
    if backend not in ("auto", "flashinfer", "cake_gdn"):
        raise ArgumentError(
            f"{op}: unsupported GDN backend: backend must be auto, flashinfer, cake_gdn or rubin, got {backend!r}"
        )


def ordinary_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: Optional[torch.Tensor],
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: Optional[float],
    output: Optional[torch.Tensor],
    use_qk_l2norm: bool,
    initial_state: Optional[torch.Tensor],
    initial_state_indices: Optional[torch.Tensor],
    output_state_indices: Optional[torch.Tensor],
    intermediate_states_buffer: Optional[torch.Tensor],
    disable_state_update: bool,
    backend: str,
) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """Launch of a decode step on a pool with a given output; the launcher checks the tensors."""
    if (
        initial_state is None
        or state is not None
        or initial_state_indices is None
        or output is None
        or intermediate_states_buffer is not None
        or disable_state_update
        or backend != "auto"
        or list in map(type, (q, k, v, A_log, a, dt_bias, b, output))
        or list in map(type, (initial_state, initial_state_indices, output_state_indices))
    ):
        return None
    _native_decode[q.is_cuda](
        output, q, k, v, initial_state, A_log, a, dt_bias, b, initial_state_indices, output_state_indices,
        _NO_SCALE if scale is None else scale, 1.0, 20.0, use_qk_l2norm, PRETRANSPOSE,
    )  # fmt: skip
    return output, initial_state


# The public functions.


@flashinfer_api(trace=gated_delta_rule_decode_pretranspose_trace)
@one_launch(ordinary_decode)
def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: Optional[torch.Tensor],
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: Optional[float] = None,
    output: Optional[torch.Tensor] = None,
    use_qk_l2norm: bool = True,
    initial_state: Optional[torch.Tensor] = None,
    initial_state_indices: Optional[torch.Tensor] = None,
    output_state_indices: Optional[torch.Tensor] = None,
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""One decode step of the gated delta rule; states are ``[.., V, K]`` and are updated in place.

    Per value head, in float32, with ``decay = exp(-exp(A_log) * softplus(a + dt_bias))`` and ``beta = sigmoid(b)``::

        S <- decay * S;  u = beta * (v - S k);  S <- S + u k^T;  o = S q * scale

    Parameters
    ----------
    q, k : torch.Tensor
        ``(B, T, H, K)`` float16 or bfloat16, on the CPU also float32; K contiguous, 128 (or 256 with float32 states).
    v : torch.Tensor
        ``(B, T, HV, V)``; value head ``hv`` reads head ``hv // (HV // H)`` of q and k. V is a multiple of 8.
    state : Optional[torch.Tensor]
        ``(B, HV, V, K)`` float32 or bfloat16, or None with a pool.
    A_log : torch.Tensor
        ``(HV,)`` float32.
    a, b : torch.Tensor
        ``(B, T, HV)``: projections of the decay and of beta.
    dt_bias : torch.Tensor
        ``(HV,)`` float32 or bfloat16.
    scale : Optional[float]
        Factor of q; default ``K ** -0.5``.
    output : Optional[torch.Tensor]
        ``(B, T, HV, V)``, written and returned when given; its dtype is that of the result.
    use_qk_l2norm : bool
        Divide q and k by their L2 norm, ``x * rsqrt(sum(x ** 2) + 1e-6)``.
    initial_state : Optional[torch.Tensor]
        Pool of states ``(P, HV, V, K)``, K contiguous, slots at any distance; with ``initial_state_indices (B,)``
        of int32 or int64. A negative index skips the row: its output is 0 and no state is written.
    output_state_indices : Optional[torch.Tensor]
        ``(B,)``: slots that the new states go to, in place of those read.
    intermediate_states_buffer, disable_state_update
        As in :func:`gated_delta_rule_mtp`, for T > 1.
    backend : str
        ``"auto"``, ``"flashinfer"`` or ``"cake_gdn"``; there is one kernel.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The output, and ``state`` or the pool.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 1, h, 128).bfloat16() for h in (2, 2, 4))
    >>> a, b, state = torch.randn(2, 1, 4).bfloat16(), torch.randn(2, 1, 4).bfloat16(), torch.zeros(2, 4, 128, 128)
    >>> step = flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose
    >>> output, state = step(q, k, v, state, torch.zeros(4), a, torch.zeros(4), b)
    """
    if backend != "auto":
        _check_backend("gated_delta_rule_decode_pretranspose", backend)
    pool = initial_state
    if pool is None:
        if state is None or initial_state_indices is not None or output_state_indices is not None:
            _explain_state("gated_delta_rule_decode_pretranspose", state, initial_state_indices)
        pool = state
    elif initial_state_indices is None or state is not None:
        _explain_pool("gated_delta_rule_decode_pretranspose", state)
    if output is None:
        output = outputs_like("gated_delta_rule_decode_pretranspose", v, q)
    if scale is None:
        scale = _NO_SCALE
    if intermediate_states_buffer is not None or disable_state_update:
        if q.shape[1] < 2:
            name = "disable_state_update" if disable_state_update else "intermediate_states_buffer"
            raise ArgumentError(
                f"gated_delta_rule_decode_pretranspose: {name} is supported only for T > 1, got q.shape[1] = "
                f"{q.shape[1]}"
            )
        run_verify(
            output, q, k, v, pool, A_log, a, dt_bias, b, initial_state_indices, output_state_indices,
            intermediate_states_buffer, None, None, 0, not disable_state_update, scale, 1.0, 20.0, use_qk_l2norm, True,
            None, None, None, None, PRETRANSPOSE,
        )  # fmt: skip
        return output, pool
    run_decode(
        output, q, k, v, pool, A_log, a, dt_bias, b, initial_state_indices, output_state_indices, scale, 1.0, 20.0,
        use_qk_l2norm, PRETRANSPOSE,
    )  # fmt: skip
    return output, pool


def _explain_state(op: str, state: Any, indices: Any) -> NoReturn:
    if state is None:
        raise ArgumentError(f"{op}: state must be a tensor (or initial_state with initial_state_indices), got None")
    name = "initial_state_indices" if indices is not None else "output_state_indices"
    raise ArgumentError(f"{op}: {name} must be None without initial_state, got a tensor")


def _explain_pool(op: str, state: Any) -> NoReturn:
    if state is not None:
        raise ArgumentError(f"{op}: state must be None with initial_state, got a tensor")
    raise ArgumentError(f"{op}: initial_state_indices must be given with initial_state, got None")


@flashinfer_api(trace=gated_delta_rule_decode_trace)
def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: Optional[float] = None,
    output: Optional[torch.Tensor] = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""One decode step of the gated delta rule on K-major states ``(B, HV, K, V)``, float32, updated in place.

    Arguments as in :func:`gated_delta_rule_decode_pretranspose`, with T = 1, K 64, 128 or 256, and V a multiple of 32.
    States that are not contiguous are copied and copied back.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 1, h, 128).bfloat16() for h in (2, 2, 4))
    >>> a, b, state = torch.randn(2, 1, 4).bfloat16(), torch.randn(2, 1, 4).bfloat16(), torch.zeros(2, 4, 128, 128)
    >>> step = flashinfer.gdn_decode.gated_delta_rule_decode
    >>> output, state = step(q, k, v, state, torch.zeros(4), a, torch.zeros(4), b)
    """
    if backend != "auto":
        _check_backend("gated_delta_rule_decode", backend)
    if output is None:
        output = outputs_like("gated_delta_rule_decode", v, q)
    if scale is None:
        scale = _NO_SCALE
    if isinstance(state, torch.Tensor) and not state.is_contiguous():
        dense = state.contiguous()
        run_k_major(output, q, k, v, dense, A_log, a, dt_bias, b, scale, use_qk_l2norm)
        state.copy_(dense)
    else:
        run_k_major(output, q, k, v, state, A_log, a, dt_bias, b, scale, use_qk_l2norm)
    return output, state


_warned = False


def _warn_default() -> bool:
    """Warn once that the default of ``disable_state_update`` was taken; the default is True."""
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        warnings.warn(
            "gated_delta_rule_mtp: disable_state_update was not given and is taken as True; pass True or False",
            stacklevel=4,
        )
    return True


def check_token_slots(
    op: str, slots: Any, q: torch.Tensor, buffer: Any, disable_state_update: bool, recovery_steps: int = 0
) -> None:
    """Check ``ssm_state_indices`` and what excludes it."""
    if buffer is not None:
        raise ArgumentError(f"{op}: ssm_state_indices and intermediate_states_buffer are mutually exclusive, got both")
    if disable_state_update:
        raise ArgumentError(f"{op}: ssm_state_indices needs state writes, got disable_state_update=True")
    if recovery_steps > 0:
        raise ArgumentError(
            f"{op}: ssm_state_indices with recovery_steps is not yet supported, got recovery_steps={recovery_steps}"
        )
    if q.shape[1] < 2:
        raise ArgumentError(f"{op}: ssm_state_indices needs T >= 2, got q.shape[1] = {q.shape[1]}")
    if slots.dtype is not torch.int32:
        raise ArgumentError(f"{op}: ssm_state_indices must be int32, got {slots.dtype}")
    if tuple(slots.shape) != (q.shape[0], q.shape[1]):
        raise ArgumentError(
            f"{op}: ssm_state_indices must have shape {(q.shape[0], q.shape[1])} (B, T), got {tuple(slots.shape)}"
        )


@flashinfer_api(trace=gated_delta_rule_mtp_trace)
def gated_delta_rule_mtp(
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
    output: Optional[torch.Tensor] = None,
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    ssm_state_indices: Optional[torch.Tensor] = None,
    disable_state_update: Optional[bool] = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Optional[torch.Tensor] = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Optional[torch.Tensor] = None,
    replayssm_rawk: Optional[torch.Tensor] = None,
    replayssm_g: Optional[torch.Tensor] = None,
    replayssm_beta: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Several tokens of each sequence, such as drafts to be verified, by the gated delta rule.

    Parameters
    ----------
    q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm
        As in :func:`gated_delta_rule_decode_pretranspose`.
    initial_state : torch.Tensor
        Pool ``(P, HV, V, K)``, float32 or bfloat16, slots at any distance.
    initial_state_indices : torch.Tensor
        ``(B,)`` int32 or int64. A negative one skips the row, whose output stays as it is (0 if allocated here).
    output : Optional[torch.Tensor]
        ``(B, T, HV, V)``.
    intermediate_states_buffer : Optional[torch.Tensor]
        ``(>= B, >= T, HV, V, K)``, dtype of the pool: the state after each token of each row of the batch.
    ssm_state_indices : Optional[torch.Tensor]
        ``(B, T)`` int32: slots of the pool that the state after each token goes to; no other state is written then.
    disable_state_update : Optional[bool]
        True leaves the pool as it is. None means True, with a warning.
    output_state_indices : Optional[torch.Tensor]
        ``(B,)``: slots that the last states go to; a negative one is not written.
    cache_replayssm : bool
        Store, in place of states, what :func:`gated_delta_rule_replayssm_commit` needs, in the slots read: values
        ``replayssm_rawv (P, HV, T, V)`` and keys ``replayssm_rawk (P, H, T, K)`` of bfloat16, log decays
        ``replayssm_g`` and ``replayssm_beta (P, HV, T)`` of float32. Needs T >= 3 and a pool that is not updated.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The output and the pool.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 3, h, 128).bfloat16() for h in (2, 2, 4))
    >>> a, b, pool = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3, 4).bfloat16(), torch.zeros(5, 4, 128, 128)
    >>> slots, states = torch.tensor([3, 1], dtype=torch.int32), torch.empty(2, 3, 4, 128, 128)
    >>> output, pool = flashinfer.gdn_decode.gated_delta_rule_mtp(
    ...     q, k, v, pool, slots, torch.zeros(4), a, torch.zeros(4), b,
    ...     intermediate_states_buffer=states, disable_state_update=True)
    """
    if disable_state_update is None:
        disable_state_update = _warn_default()
    is_new = output is None
    if output is None:
        output = outputs_like("gated_delta_rule_mtp", v, q)
    if scale is None:
        scale = _NO_SCALE
    if ssm_state_indices is not None:
        check_token_slots(
            "gated_delta_rule_mtp", ssm_state_indices, q, intermediate_states_buffer, disable_state_update
        )
    if cache_replayssm:
        _check_windows(q, disable_state_update, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    else:
        replayssm_rawv = replayssm_rawk = replayssm_g = replayssm_beta = None
    run_verify(
        output, q, k, v, initial_state, A_log, a, dt_bias, b, initial_state_indices, output_state_indices,
        intermediate_states_buffer, ssm_state_indices, None, 0, not disable_state_update and ssm_state_indices is None,
        scale, 1.0, 20.0, use_qk_l2norm, is_new, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta, MTP,
    )  # fmt: skip
    return output, initial_state


def _check_windows(q: torch.Tensor, disable_state_update: bool, *windows: Optional[torch.Tensor]) -> None:
    op = "gated_delta_rule_mtp"
    if q.shape[1] < 3:
        raise ArgumentError(f"{op}: cache_replayssm needs T >= 3, got q.shape[1] = {q.shape[1]}")
    if not disable_state_update:
        raise ArgumentError(f"{op}: cache_replayssm needs disable_state_update=True, got False")
    for name, window in zip(("rawv", "rawk", "g", "beta"), windows, strict=True):
        if window is None:
            raise ArgumentError(f"{op}: replayssm_{name} must be given with cache_replayssm, got None")


@flashinfer_api(trace=gated_delta_rule_replayssm_commit_trace)
def gated_delta_rule_replayssm_commit(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    track_state_indices: Optional[torch.Tensor] = None,
    track_steps: Optional[torch.Tensor] = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
    backend: str = "auto",
) -> None:
    r"""Fold the accepted prefix of each window of ``gated_delta_rule_mtp(cache_replayssm=True)`` into the states.

    Parameters
    ----------
    checkpoint_state : torch.Tensor
        ``(L, P, HV, V, K)``: the states of L layers, float32 or bfloat16, updated in place.
    rawv_cache, rawk_cache, g_cache, beta_cache : torch.Tensor
        Windows ``(L, P, HV, T, V)``, ``(L, P, H, T, K)``, ``(L, P, HV, T)`` and ``(L, P, HV, T)``.
    state_indices : torch.Tensor
        ``(N,)`` int32 or int64: slots; ``null_block_id`` and negative ones are skipped.
    accept_lens : torch.Tensor
        ``(N,)``: tokens of each window to apply.
    track_state_indices, track_steps : Optional[torch.Tensor]
        ``(N,)``: also write the state after ``track_steps`` tokens to these slots; negative slots are not written.
    use_qk_l2norm : bool
        As the windows were stored.
    backend : str
        "auto" or "flashinfer".

    Examples
    --------
    >>> state = torch.zeros(1, 4, 2, 128, 128)
    >>> v, k = torch.randn(1, 4, 2, 3, 128).bfloat16(), torch.randn(1, 4, 1, 3, 128).bfloat16()
    >>> g, beta = torch.zeros(1, 4, 2, 3), torch.ones(1, 4, 2, 3)
    >>> slots, accepted = torch.tensor([2, 1]), torch.tensor([3, 1])
    >>> flashinfer.gdn_decode.gated_delta_rule_replayssm_commit(state, v, k, g, beta, slots, accepted)
    """
    op = "gated_delta_rule_replayssm_commit"
    if backend != "auto":
        _check_backend(op, backend)
    if checkpoint_state.ndim != 5:
        raise ArgumentError(f"{op}: checkpoint_state must have 5 dimensions, got {checkpoint_state.ndim}")
    if (track_state_indices is None) != (track_steps is None):
        raise ArgumentError(f"{op}: track_state_indices and track_steps must be given together, got one of them")
    if null_block_id >= 0:
        state_indices = state_indices.masked_fill(state_indices == null_block_id, -1)
    for layer in range(checkpoint_state.shape[0]):
        windows = (rawv_cache[layer], rawk_cache[layer], g_cache[layer], beta_cache[layer])
        if track_state_indices is not None and track_steps is not None:
            _run_replay(
                checkpoint_state[layer], *windows, state_indices, track_steps, track_state_indices, use_qk_l2norm
            )
        _run_replay(checkpoint_state[layer], *windows, state_indices, accept_lens, None, use_qk_l2norm)
