# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: the door of prefill, decode and verification."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.errors import ArgumentError
from .._runtime.kept import one_launch
from ..api_logging import flashinfer_api
from ..trace.templates.recurrent import recurrent_kda_trace
from .kda_step import ordinary_decode, recurrent_step

__all__ = ["recurrent_kda"]

_BACKENDS = ("auto", "cute-dsl", "cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn")
_INTERVAL = 32  # checkpoints are this many tokens apart, or a multiple


def _check_checkpoints(
    state_checkpoints: Any, checkpoint_cu_starts: Any, every: int, checkpoint_state_indices: Any
) -> None:
    op = "recurrent_kda"
    if every < 0 or every % _INTERVAL != 0:
        raise ArgumentError(f"{op}: checkpoint_every_n_tokens must be a multiple of {_INTERVAL}, got {every}")
    if every == 0 and (state_checkpoints is not None or checkpoint_state_indices is not None):
        raise ArgumentError(f"{op}: checkpoint_every_n_tokens must be positive with state_checkpoints, got 0")
    if every > 0 and (state_checkpoints is None or checkpoint_cu_starts is None):
        name = "state_checkpoints" if state_checkpoints is None else "checkpoint_cu_starts"
        raise ArgumentError(f"{op}: {name} must be given with checkpoint_every_n_tokens, got None")


@flashinfer_api(trace=recurrent_kda_trace)
@one_launch(ordinary_decode)
def recurrent_kda(
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
    seq_order: Optional[torch.Tensor] = None,
    prefill_workspace: Optional[Any] = None,
    state_checkpoints: Optional[torch.Tensor] = None,
    checkpoint_cu_starts: Optional[torch.Tensor] = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_state_indices: Optional[torch.Tensor] = None,
    *,
    disable_state_update: bool = False,
    correction_cache: Optional[torch.Tensor] = None,
    kg_cache: Optional[torch.Tensor] = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    r"""Kimi delta attention: the delta rule with one decay for each key channel. States are updated in place.

    ``S <- diag(exp(g)) S;  S <- S + beta k (v - k^T S)^T;  o = scale q^T S`` per token and value head, in float32.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(B, T, H, K)`` bfloat16, K 64 or 128; ``(1, tokens, H, K)`` with ``cu_seqlens``.
    v : torch.Tensor
        ``(B, T, HV, V)``, HV a multiple of H.
    g : torch.Tensor
        ``(B, T, HV, K)``: log decay; with ``use_gate_in_kernel`` the gate: with ``x = g + dt_bias`` the log decay is
        ``-exp(A_log) * softplus(x)``, or with ``lower_bound`` ``lower_bound * sigmoid(exp(A_log) * x)``.
    beta : torch.Tensor
        ``(B, T, HV)``; its logit with ``beta_is_logit``.
    A_log, dt_bias : Optional[torch.Tensor]
        ``(HV,)`` float32 and ``(HV * K,)``.
    scale : Optional[float]
        Factor of q; default ``K ** -0.5``.
    use_qk_l2norm_in_kernel : bool
        Whether q and k are divided by their norms.
    initial_state : Optional[torch.Tensor]
        ``(N, HV, V, K)`` bfloat16 or float32, K contiguous, updated in place; a pool with ``ssm_state_indices``.
        Zeros if not given.
    ssm_state_indices : Optional[torch.Tensor]
        ``(N,)`` slots; -1 is padding, whose output is 0. With ``num_spec_tokens`` ``(N, 1 + num_spec_tokens)``: the
        state after token t goes to slot ``[n, t]``, and the first is read from column
        ``max(num_accepted_tokens[n] - 1, 0)``.
    cu_seqlens : Optional[torch.Tensor]
        ``(N + 1,)`` int32 or int64: first tokens of packed sequences, and the end.
    initial_state_source, initial_state_indices : Optional[torch.Tensor]
        Pool and slots to begin from, in place of ``initial_state``.
    output : Optional[torch.Tensor]
        ``(B, T, HV, V)``.
    seq_order, prefill_workspace
        Accepted for callers; results do not depend on them.
    state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, checkpoint_state_indices
        States before tokens 0, n, 2 n, ... of each sequence go to rows ``checkpoint_cu_starts[i] + j``; with
        ``checkpoint_state_indices`` states after each n tokens go to the rows of a pool that it holds there.
    disable_state_update : bool
        True leaves all states as they are, for at most 16 tokens. ``correction_cache (slots, HV, T, V)`` float32 then
        receives ``beta (v - k^T S)``, and ``kg_cache (slots, HV, T, 2 K)`` bfloat16 the keys and gates as given.
    backend : str
        A published backend name; there is one implementation.

    Returns
    -------
    tuple
        Output, and final state if ``output_final_state`` else None; then ``state_checkpoints`` if given.

    Examples
    --------
    >>> q, k, v, g = (torch.randn(2, 1, 4, 64).bfloat16() for _ in range(4))
    >>> beta, state = torch.rand(2, 1, 4).bfloat16(), torch.zeros(2, 4, 64, 64)
    >>> output, _ = flashinfer.recurrent_kda(q, k, v, -g.abs(), beta, initial_state=state)
    """
    if backend not in _BACKENDS:
        raise ArgumentError(f"recurrent_kda: backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    if checkpoint_every_n_tokens or state_checkpoints is not None or checkpoint_state_indices is not None:
        _check_checkpoints(state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, checkpoint_state_indices)
    found = recurrent_step(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, lower_bound, cu_seqlens, ssm_state_indices, num_spec_tokens, num_accepted_tokens, output,
        initial_state_source, initial_state_indices, beta_is_logit, state_checkpoints, checkpoint_cu_starts,
        checkpoint_every_n_tokens, checkpoint_state_indices, disable_state_update, correction_cache, kg_cache,
    )  # fmt: skip
    return found if state_checkpoints is None else (*found, state_checkpoints)
