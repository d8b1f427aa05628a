# SPDX-License-Identifier: Apache-2.0
"""Selective state update: Mamba-1 and -2 token by token, for decode and for the verification of speculative tokens."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError
from .._runtime.kept import one_launch
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.recurrent.mamba import gen_ssu_module
from ..trace.templates.recurrent_mamba import selective_state_update_trace

__all__ = ["cake_selective_state_update", "get_selective_state_update_module", "selective_state_update"]

_OP = "selective_state_update"
_ALGORITHMS = ("auto", "simple", "vertical", "horizontal", "async_horizontal")
_BACKENDS = ("auto", "flashinfer", "cake")


class _Natives(dict[tuple[bool, torch.dtype, torch.dtype], Callable[..., Any]]):
    """A native function by ``(is_cuda, state.dtype, x.dtype)``; built on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __missing__(self, key: tuple[bool, torch.dtype, torch.dtype]) -> Callable[..., Any]:
        is_cuda, state, tokens = key
        module = gen_ssu_module(state, tokens, "cuda" if is_cuda else "cpu").build_and_load()
        self[key] = getattr(module, self._name)
        return self[key]


def get_selective_state_update_module(
    device: Union[torch.device, str, int],
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    stateIndex_dtype: Optional[torch.dtype],
    dim: int,
    dstate: int,
    ntokens_mtp: int,
    cu_seqlens_dtype: Optional[torch.dtype],
    num_accepted_tokens_dtype: Optional[torch.dtype],
    state_scale_dtype: Optional[torch.dtype] = None,
    philox_rounds: int = 0,
) -> Any:
    """Return the loaded module that serves calls of these kinds on a device; it is built on first use.

    A module is of a dtype of states and one of tokens; the launcher dispatches on everything else. ``philox_rounds`` is
    an argument of its function, and so is what decides about indices, lengths and scales.
    """
    for name, dtype, known in (
        ("weight_dtype", weight_dtype, (torch.float32, torch.bfloat16, torch.float16)),
        ("matrixA_dtype", matrixA_dtype, (torch.float32,)),
        ("stateIndex_dtype", stateIndex_dtype, (None, torch.int32, torch.int64)),
        ("cu_seqlens_dtype", cu_seqlens_dtype, (None, torch.int32, torch.int64)),
        ("num_accepted_tokens_dtype", num_accepted_tokens_dtype, (None, torch.int32, torch.int64)),
        ("state_scale_dtype", state_scale_dtype, (None, torch.float32)),
    ):
        if dtype not in known:
            kinds = ", ".join(str(each).removeprefix("torch.") for each in known)
            raise ArgumentError(f"get_selective_state_update_module: {name} must be one of {kinds}, got {dtype}")
    backend = "cpu" if torch.device(device).type == "cpu" else "cuda"
    return gen_ssu_module(state_dtype, input_dtype, backend).build_and_load()


_native = _Natives("selective_state_update")
_native_decode = _Natives("ssu_decode")


@register_custom_op(
    "flashinfer::selective_state_update",
    mutates_args=("out", "state", "state_scale", "intermediate_states_buffer", "intermediate_state_scales"),
)
@called(_OP)
def _selective_state_update(
    out: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    state_scale: Optional[torch.Tensor],
    state_batch_indices: Optional[torch.Tensor],
    dst_state_batch_indices: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],
    num_accepted_tokens: Optional[torch.Tensor],
    intermediate_states_buffer: Optional[torch.Tensor],
    intermediate_state_indices: Optional[torch.Tensor],
    intermediate_state_scales: Optional[torch.Tensor],
    rand_seed: Optional[torch.Tensor],
    dt_softplus: bool,
    disable_state_update: bool,
    pad_slot_id: int,
    philox_rounds: int,
    cache_steps: int,
) -> None:
    _native[state.is_cuda, state.dtype, x.dtype](
        out,
        state,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        state_scale,
        state_batch_indices,
        dst_state_batch_indices,
        cu_seqlens,
        num_accepted_tokens,
        intermediate_states_buffer,
        intermediate_state_indices,
        intermediate_state_scales,
        rand_seed,
        dt_softplus,
        disable_state_update,
        pad_slot_id,
        philox_rounds,
        cache_steps,
    )


def _check_options(
    algorithm: str, backend: str, state: torch.Tensor, rand_seed: Optional[torch.Tensor], is_single: bool
) -> None:
    """Check the names of kernels: one serves all of them, but what the published ones refuse is refused."""
    if algorithm not in _ALGORITHMS:
        raise ArgumentError(f"{_OP}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if backend not in _BACKENDS:
        raise ArgumentError(f"{_OP}: backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    if algorithm in ("auto", "simple"):
        return
    is_scaled = state.dtype == torch.int16
    if is_scaled and not is_single:
        raise ArgumentError(f"{_OP}: algorithm {algorithm!r} does not support scaled (int16) states of several tokens")
    if is_single and "horizontal" in algorithm and (is_scaled or rand_seed is not None):
        raise ArgumentError(
            f"{_OP}: algorithm must be auto, simple or vertical for int16 states and for stochastic rounding, "
            f"got {algorithm!r}"
        )


def _with_heads(tensors: dict[str, Any]) -> dict[str, Any]:
    """Insert the axis of heads, or of groups, where a model without heads leaves it out."""
    made = dict(tensors)
    lacks_heads = made["state"].ndim == 3
    if lacks_heads:
        for name, axis in (("state", 1), ("A", 0), ("D", 0), ("dt_bias", 0), ("state_scale", 1)):
            if made[name] is not None:
                made[name] = made[name].unsqueeze(axis)
        buffer, scales = made["intermediate_states_buffer"], made["intermediate_state_scales"]
        made["intermediate_states_buffer"] = buffer if buffer is None or buffer.ndim == 5 else buffer.unsqueeze(2)
        made["intermediate_state_scales"] = scales if scales is None or scales.ndim >= 4 else scales.unsqueeze(2)
    if lacks_heads or made["x"].ndim == 2:
        for name in ("x", "dt", "z", "out"):
            if made[name] is not None:
                made[name] = made[name].unsqueeze(-2)
    for name in ("B", "C"):
        if made[name].ndim == made["x"].ndim - 1:
            made[name] = made[name].unsqueeze(-2)
    return made


def ordinary_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    dt_softplus: bool,
    state_batch_indices: Optional[torch.Tensor],
    pad_slot_id: int,
    state_scale: Optional[torch.Tensor],
    out: Optional[torch.Tensor],
    disable_state_update: bool,
    intermediate_states_buffer: Optional[torch.Tensor],
    rand_seed: Optional[torch.Tensor],
    cache_steps: int,
    algorithm: str,
    dst_state_batch_indices: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],
    num_accepted_tokens: Optional[torch.Tensor],
    backend: str,
) -> Optional[torch.Tensor]:
    """Launch for one token of each sequence with a given output; the launcher checks the tensors."""
    if (
        out is None
        or state_scale is not None
        or disable_state_update
        or intermediate_states_buffer is not None
        or rand_seed is not None
        or cache_steps
        or cu_seqlens is not None
        or num_accepted_tokens is not None
        or algorithm != "auto"
        or backend != "auto"
        or list in map(type, (x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out, dst_state_batch_indices))
    ):
        return None
    _native_decode[state.is_cuda, state.dtype, x.dtype](
        out, state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, dst_state_batch_indices, dt_softplus,
        pad_slot_id,
    )  # fmt: skip
    return out


@flashinfer_api(trace=selective_state_update_trace)
@one_launch(ordinary_update)
def selective_state_update(
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
    out: Optional[torch.Tensor] = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Optional[torch.Tensor] = None,
    intermediate_state_indices: Optional[torch.Tensor] = None,
    intermediate_state_scales: Optional[torch.Tensor] = None,
    rand_seed: Optional[torch.Tensor] = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: Optional[torch.Tensor] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    num_accepted_tokens: Optional[torch.Tensor] = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Advance Mamba states by one token of each sequence, or by several, and return the outputs.

    For each head and row of its state ``s``, in float32, token by token::

        dt' = softplus(dt + dt_bias);  s = s * exp(A * dt') + dt' * x * B;  y = sum(s * C) + D * x;  y *= silu(z)

    Between the tokens of a sequence the state is not rounded.

    Parameters
    ----------
    state : torch.Tensor
        ``(slots, heads, dim, dstate)`` float32, bfloat16, float16 or int16 (then with ``state_scale``); the distance of
        slots and heads is free. Written. Without heads ``(slots, dim, dstate)``. On CUDA ``dstate`` is a multiple of 8
        up to 256.
    x : torch.Tensor
        One token of each sequence ``(batch, heads, dim)``; several ``(batch, cache_steps, heads, dim)``; packed, with
        ``cu_seqlens``, ``(total_tokens, heads, dim)``. bfloat16, float16 or float32.
    dt : torch.Tensor
        Shape of ``x``; any of the three dtypes, its own strides: usually expanded from one number for each head.
    A : torch.Tensor
        ``(heads, dim, dstate)`` float32, usually expanded likewise.
    B, C : torch.Tensor
        As ``x`` with ``(groups, dstate)`` at the end; head h reads group ``h // (heads // groups)``.
    D : torch.Tensor
        ``(heads, dim)``.
    z : Optional[torch.Tensor]
        Gate, shape and dtype of ``x``.
    dt_bias : Optional[torch.Tensor]
        ``(heads, dim)``.
    dt_softplus : bool
        Apply softplus to ``dt + dt_bias``.
    state_batch_indices : Optional[torch.Tensor]
        ``(batch,)`` or ``(batch, columns)`` int32 or int64: the slot of each sequence (column 0). None: the first.
    pad_slot_id : int
        Slot that stands for no state: the sequence begins with zeros, its output is computed, nothing is stored.
    state_scale : Optional[torch.Tensor]
        ``(slots, heads, dim)`` float32, for int16. Written.
    out : Optional[torch.Tensor]
        Shape and dtype of ``x``; written and returned when given.
    disable_state_update : bool
        Leave ``state`` as it is.
    intermediate_states_buffer : Optional[torch.Tensor]
        ``(rows, steps, heads, dim, dstate)``, dtype of ``state``: the state after token t goes to ``[row, t]``.
    intermediate_state_indices : Optional[torch.Tensor]
        ``(batch,)``: the row of each sequence; None: its slot.
    intermediate_state_scales : Optional[torch.Tensor]
        ``(rows, steps, heads, dim)`` float32, for int16.
    rand_seed : Optional[torch.Tensor]
        One int64 on the device: float16 states are rounded by random bits. Other states ignore it.
    philox_rounds : int
        Rounds of the random generator.
    cache_steps : int
        Tokens of each sequence; 0: one, without an axis; packed: the largest number.
    algorithm : str
        auto, simple, vertical, horizontal or async_horizontal: one kernel serves all.
    dst_state_batch_indices : Optional[torch.Tensor]
        Where the new state goes; None: the slot it came from.
    cu_seqlens : Optional[torch.Tensor]
        ``(batch + 1,)`` int32 or int64: tokens of sequence n are ``cu_seqlens[n]:cu_seqlens[n + 1]``.
    num_accepted_tokens : Optional[torch.Tensor]
        ``(batch,)``: the state is that of column ``num_accepted_tokens - 1`` of ``state_batch_indices``, and the state
        after token t goes to column t of ``dst_state_batch_indices``.
    backend : str
        auto, flashinfer or cake: the same.

    Returns
    -------
    torch.Tensor
        ``out``.

    Examples
    --------
    >>> state, x = torch.zeros(4, 8, 64, 128), torch.randn(2, 8, 64)
    >>> B, C = torch.randn(2, 1, 128), torch.randn(2, 1, 128)
    >>> dt, A = torch.rand(2, 8, 1).expand(2, 8, 64), -torch.rand(8, 1, 1).expand(8, 64, 128)
    >>> D, slots = torch.rand(8, 1).expand(8, 64), torch.tensor([3, 1])
    >>> flashinfer.mamba.selective_state_update(state, x, dt, A, B, C, D, state_batch_indices=slots).shape
    torch.Size([2, 8, 64])
    """
    if rand_seed is not None and not isinstance(rand_seed, torch.Tensor):
        raise TypeError(f"{_OP}: rand_seed must be a tensor of one int64, got a {type(rand_seed).__name__}")
    try:
        if algorithm != "auto" or backend != "auto":
            _check_options(algorithm, backend, state, rand_seed, cache_steps == 0 and cu_seqlens is None)
        is_plain = state.ndim == 4 and x.ndim > 2 and B.ndim == x.ndim == C.ndim
        if out is None:
            out = new_empty(x, x.dtype, *x.shape)
    except AttributeError:
        check_tensors(_OP, state=state, x=x, B=B, C=C)
        raise
    if is_plain:
        _selective_state_update(
            out,
            state,
            x,
            dt,
            A,
            B,
            C,
            D,
            z,
            dt_bias,
            state_scale,
            state_batch_indices,
            dst_state_batch_indices,
            cu_seqlens,
            num_accepted_tokens,
            intermediate_states_buffer,
            intermediate_state_indices,
            intermediate_state_scales,
            rand_seed,
            dt_softplus,
            disable_state_update,
            pad_slot_id,
            philox_rounds,
            cache_steps,
        )
        return out
    tensors = {"out": out, "state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    tensors |= {"state_scale": state_scale, "intermediate_states_buffer": intermediate_states_buffer}
    tensors |= {"intermediate_state_scales": intermediate_state_scales}
    _selective_state_update(
        **_with_heads(tensors),
        state_batch_indices=state_batch_indices,
        dst_state_batch_indices=dst_state_batch_indices,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
        intermediate_state_indices=intermediate_state_indices,
        rand_seed=rand_seed,
        dt_softplus=dt_softplus,
        disable_state_update=disable_state_update,
        pad_slot_id=pad_slot_id,
        philox_rounds=philox_rounds,
        cache_steps=cache_steps,
    )
    return out


def cake_selective_state_update(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Call :func:`selective_state_update` with ``backend="cake"``, a published name of other kernels: the same here."""
    return selective_state_update(*args, **{**kwargs, "backend": "cake"})
