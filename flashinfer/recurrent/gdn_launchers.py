# SPDX-License-Identifier: Apache-2.0
"""Published launchers of the gated delta rule: sizes as numbers, states flattened or not, results allocated before."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .._runtime.errors import ArgumentError
from .gdn_prefill import chunk_gated_delta_rule
from .gdn_step import MTP, PRETRANSPOSE, check_token_slots, run_decode, run_k_major, run_verify

__all__ = [
    "chunk_gated_delta_rule_sm90",
    "get_mtp_config",
    "get_tile_v_mtp",
    "get_vec_size_mtp",
    "run_mtp_decode",
    "run_nontranspose_decode",
    "run_pretranspose_decode",
]

MANY_ROWS = 16384  #: rows of states from which a block has 64 of them: MANY_ROWS of recurrent/step.cuh
_BETA, _THRESHOLD = 1.0, 20.0  # constants of the softplus


def _check_sizes(op: str, q: torch.Tensor, v: torch.Tensor, sizes: tuple[int, int, int, int, int, int]) -> None:
    batch, tokens, heads, value_heads, key_dim, value_dim = sizes
    for name, x, shape in (
        ("q", q, (batch, tokens, heads, key_dim)),
        ("v", v, (batch, tokens, value_heads, value_dim)),
    ):
        if tuple(x.shape) != shape:
            raise ArgumentError(f"{op}: {name} must have shape {shape} (of the sizes given), got {tuple(x.shape)}")


def _states(op: str, name: str, x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return states ``(slots, *shape)``; published callers flatten slots and heads into one axis."""
    if tuple(x.shape[1:]) == shape and x.ndim == len(shape) + 1:
        return x
    rest = shape[-2:]
    if x.ndim == 3 and tuple(x.shape[1:]) == rest and x.is_contiguous():
        count = math.prod(shape[:-2])
        if count and x.shape[0] % count == 0:
            return x.view(-1, *shape)
    flat = ", ".join(map(str, rest))
    whole = ", ".join(map(str, shape))
    raise ArgumentError(
        f"{op}: {name} must have shape (slots, {whole}), or (slots * heads, {flat}) if contiguous, got "
        f"{tuple(x.shape)} with strides {x.stride()}"
    )


def run_pretranspose_decode(
    h0_source: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    scale: float,
    use_qk_l2norm: bool,
    use_pool_indexing: bool = False,
    initial_state_indices: Optional[torch.Tensor] = None,
    output_state_indices: Optional[torch.Tensor] = None,
) -> None:
    """Write ``output`` and the states of a decode step, as ``gated_delta_rule_decode_pretranspose``.

    ``h0_source`` is ``(B, HV, V, K)``, or ``(B * HV, V, K)``; with ``use_pool_indexing`` it is a pool of slots, and
    without it the indices are not read.
    """
    op = "run_pretranspose_decode"
    _check_sizes(op, q, v, (B, T, H, HV, K, V))
    state = _states(op, "h0_source", h0_source, HV, V, K)
    if use_pool_indexing and initial_state_indices is None:
        raise ArgumentError(f"{op}: initial_state_indices must be given with use_pool_indexing, got None")
    slots, targets = (initial_state_indices, output_state_indices) if use_pool_indexing else (None, None)
    run_decode(
        output, q, k, v, state, A_log, a, dt_bias, b, slots, targets, scale, _BETA, _THRESHOLD, use_qk_l2norm,
        PRETRANSPOSE,
    )  # fmt: skip


def run_nontranspose_decode(
    h0_source: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    scale: float,
    use_qk_l2norm: bool,
) -> None:
    """Write ``output`` and the K-major states ``(B, HV, K, V)``, or ``(B * HV, K, V)``, of a decode step."""
    op = "run_nontranspose_decode"
    _check_sizes(op, q, v, (B, T, H, HV, K, V))
    state = _states(op, "h0_source", h0_source, HV, K, V)
    run_k_major(output, q, k, v, state, A_log, a, dt_bias, b, scale, use_qk_l2norm)


def run_mtp_decode(
    h0_source: torch.Tensor,
    intermediate_states: Optional[torch.Tensor],
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    initial_state_indices: torch.Tensor,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    pool_size: int,
    cache_steps: int,
    tile_v: int,
    vec_size: int,
    scale: float,
    use_qk_l2norm: bool,
    disable_state_update: bool,
    cache_intermediate_states: bool,
    ssm_state_indices: Optional[torch.Tensor] = None,
    output_state_indices: Optional[torch.Tensor] = None,
    use_pool_indexing: bool = False,
) -> None:
    """Write ``output`` and the states of several tokens, as ``gated_delta_rule_mtp``.

    Parameters
    ----------
    h0_source : torch.Tensor
        ``(pool_size, HV, V, K)``, slots at any distance, or ``(pool_size * HV, V, K)``.
    intermediate_states : Optional[torch.Tensor]
        ``(.., cache_steps, HV, V, K)``, or with the axes before V flattened; read only with
        ``cache_intermediate_states``.
    tile_v, vec_size : int
        Of :func:`get_tile_v_mtp` and :func:`get_vec_size_mtp`; the kernel here chooses its own.
    use_pool_indexing : bool
        The indices are those of slots in either case.
    """
    op = "run_mtp_decode"
    _check_sizes(op, q, v, (B, T, H, HV, K, V))
    pool = _states(op, "h0_source", h0_source, HV, V, K)
    if pool.shape[0] != pool_size:
        raise ArgumentError(f"{op}: h0_source must have {pool_size} slots (pool_size), got {pool.shape[0]}")
    buffer = None
    if cache_intermediate_states:
        if intermediate_states is None:
            raise ArgumentError(f"{op}: intermediate_states must be given with cache_intermediate_states, got None")
        buffer = _states(op, "intermediate_states", intermediate_states, cache_steps, HV, V, K)
    if ssm_state_indices is not None:
        check_token_slots(op, ssm_state_indices, q, buffer, disable_state_update)
    writes_final = not disable_state_update and ssm_state_indices is None
    run_verify(
        output, q, k, v, pool, A_log, a, dt_bias, b, initial_state_indices, output_state_indices, buffer,
        ssm_state_indices, None, 0, writes_final, scale, _BETA, _THRESHOLD, use_qk_l2norm, False, None, None, None,
        None, MTP,
    )  # fmt: skip


def get_tile_v_mtp(batch_size: int, seq_len: int = 1, *, num_v_heads: int = 64, v_dim: int = 128) -> int:
    """Return the rows of a state that a block of the verification kernel has: a lane has four of them, or one."""
    return 64 if batch_size * num_v_heads * v_dim >= MANY_ROWS else 16


def get_vec_size_mtp(batch_size: int, seq_len: int = 1) -> int:
    """Return the numbers of a float32 state that a lane of the verification kernel loads at once: 16 bytes."""
    return 4


def get_mtp_config(
    batch_size: int, seq_len: int, num_v_heads: int = 64, v_dim: int = 128, disable_state_update: bool = False
) -> tuple[int, int]:
    """Return what :func:`get_tile_v_mtp` and :func:`get_vec_size_mtp` return for a call."""
    tile = get_tile_v_mtp(batch_size, seq_len, num_v_heads=num_v_heads, v_dim=v_dim)
    return tile, get_vec_size_mtp(batch_size, seq_len)


def chunk_gated_delta_rule_sm90(
    o: torch.Tensor,
    state: Optional[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    init_state: Optional[torch.Tensor],
    alpha: Optional[torch.Tensor],
    beta: Optional[torch.Tensor],
    cu_seqlens: torch.Tensor,
    scale: Optional[float],
    state_checkpoints: Optional[torch.Tensor] = None,
    checkpoint_cu_starts: Optional[torch.Tensor] = None,
    checkpoint_every_n_tokens: int = 0,
    state_indices: Optional[torch.Tensor] = None,
) -> None:
    """Write ``o`` and, if given, ``state``: ``chunk_gated_delta_rule`` whose requests are not split."""
    chunk_gated_delta_rule(
        q, k, v, alpha, beta, scale, init_state, state is not None, cu_seqlens, output=o, output_state=state,
        state_checkpoints=state_checkpoints, checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens, use_cp=False, state_indices=state_indices,
    )  # fmt: skip
