# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule on pools of bfloat16 states, with the forms that advance a state by accepted drafts."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..trace.templates.recurrent import bf16_gated_delta_rule_mtp_trace, bf16_gated_delta_rule_trace
from .gdn_step import _NO_SCALE, BF16_STATE, MTP, check_token_slots, given, outputs_like, run_decode, run_verify

__all__ = ["gated_delta_rule", "gated_delta_rule_mtp", "gated_delta_rule_mtp_wide_vec", "gated_delta_rule_t1_wide_vec"]


def check_pool(op: str, pool: Any) -> torch.Tensor:
    if not isinstance(pool, torch.Tensor) or pool.dtype is not torch.bfloat16:
        kind = pool.dtype if isinstance(pool, torch.Tensor) else type(pool).__name__
        raise ArgumentError(f"{op}: initial_state_source must be a bfloat16 tensor, got {kind}")
    return pool


@flashinfer_api(trace=bf16_gated_delta_rule_trace)
def gated_delta_rule(
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
    output: Optional[torch.Tensor] = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: Optional[float] = None,
) -> torch.Tensor:
    r"""One decode step of the gated delta rule on a pool of bfloat16 states ``[P, HV, V, K]``, updated in place.

    As :func:`gated_delta_rule_decode_pretranspose <flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose>` with a
    pool; ``softplus`` is ``log(1 + exp(beta * x)) / beta`` up to the threshold and the identity above. Returns the
    output ``(B, 1, HV, V)``.
    """
    op = "gated_delta_rule"
    q, k, v, b = given(op, "q", q), given(op, "k", k), given(op, "v", v), given(op, "b", b)
    pool = check_pool(op, initial_state_source)
    if output is None:
        output = outputs_like(op, v, q)
    run_decode(
        output, q, k, v, pool, A_log, a, dt_bias, b, initial_state_indices, output_state_indices,
        _NO_SCALE if scale is None else scale, softplus_beta, softplus_threshold, use_qk_l2norm_in_kernel, BF16_STATE,
    )  # fmt: skip
    return output


@flashinfer_api(trace=bf16_gated_delta_rule_mtp_trace)
def gated_delta_rule_mtp(
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
) -> Optional[torch.Tensor]:
    r"""Several tokens of each sequence on a pool of bfloat16 states; the state is float32 between the tokens.

    Parameters
    ----------
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, scale, output
        As in :func:`gated_delta_rule`, with T tokens.
    initial_state_source, initial_state_indices, output_state_indices
        The pool ``[P, HV, 128, 128]``, the slots read, and those written if they are others.
    intermediate_states_buffer : Optional[torch.Tensor]
        ``(B, >= T, HV, V, K)`` bfloat16: the state after each token.
    accepted_steps : Optional[torch.Tensor]
        ``(B,)``: the state that is written is that after ``accepted_steps[i] + 1`` tokens. Outputs of these tokens are
        not to be used; with ``disable_output`` later tokens are not computed.
    ssm_state_indices : Optional[torch.Tensor]
        ``(B, T)`` int32: slots of the pool that the state after each token goes to, with ``accepted_steps`` up to
        that one. The slots read stay as they are; with ``output_state_indices`` the last state is written too.
    disable_state_update : bool
        True leaves the pool as it is.
    disable_output : bool
        True computes states only; the result is ``output``.
    recovery_steps : int
        As ``accepted_steps`` of all rows, counted in tokens; 0: none.
    """
    op = "gated_delta_rule_mtp"
    q, k, v, b = given(op, "q", q), given(op, "k", k), given(op, "v", v), given(op, "b", b)
    pool = check_pool(op, initial_state_source)
    if ssm_state_indices is not None:
        check_token_slots(op, ssm_state_indices, q, intermediate_states_buffer, disable_state_update, recovery_steps)
    if intermediate_states_buffer is not None and intermediate_states_buffer.shape[0] != q.shape[0]:
        raise ArgumentError(
            f"{op}: intermediate_states_buffer.shape[0] must be {q.shape[0]} (q.shape[0]), got "
            f"{intermediate_states_buffer.shape[0]}"
        )
    if recovery_steps < 0 or recovery_steps > q.shape[1]:
        raise ArgumentError(f"{op}: recovery_steps must be 0 to {q.shape[1]} (q.shape[1]), got {recovery_steps}")
    if output is None and not disable_output:
        output = outputs_like(op, v, q)
    writes_final = not disable_state_update and (ssm_state_indices is None or output_state_indices is not None)
    run_verify(
        None if disable_output else output, q, k, v, pool, A_log, a, dt_bias, b, initial_state_indices,
        output_state_indices, intermediate_states_buffer, ssm_state_indices, accepted_steps, recovery_steps,
        writes_final, _NO_SCALE if scale is None else scale, softplus_beta, softplus_threshold, use_qk_l2norm_in_kernel,
        True, None, None, None, None, MTP,
    )  # fmt: skip
    return output


_TILES = (32, 64, 128)


def gated_delta_rule_mtp_wide_vec(*args: Any, tile_v: int = 128, **kwargs: Any) -> Optional[torch.Tensor]:
    """:func:`gated_delta_rule_mtp`; ``tile_v`` (32, 64 or 128) is a hint that the kernel does not need."""
    if tile_v not in _TILES:
        raise ArgumentError(f"gated_delta_rule_mtp_wide_vec: tile_v must be 32, 64 or 128, got {tile_v}")
    return gated_delta_rule_mtp(*args, **kwargs)


def gated_delta_rule_t1_wide_vec(*args: Any, **kwargs: Any) -> torch.Tensor:
    """:func:`gated_delta_rule`, under the name of a published variant."""
    return gated_delta_rule(*args, **kwargs)
