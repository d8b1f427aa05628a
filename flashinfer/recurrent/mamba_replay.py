# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 for speculative decoding by replay: states are checkpoints, rings hold the tokens since.

A call costs one read of the states; they are written only when a ring is full. Rejected tokens need no copy of a state:
the caller advances ``prev_num_accepted_tokens`` by the accepted ones, and the rows of the others are overwritten.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .._runtime.arch import get_device_sm_count
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..autotuner import AutoTuner, OptimizationProfile, TunableRunner, TuningConfig
from ..jit.codegen import module_cache
from ..jit.recurrent.mamba import gen_ssu_replay_module
from ..trace.templates.recurrent_mamba_replay import checkpointing_ssu_trace

__all__ = [
    "CheckpointingSSURunner",
    "allocate_checkpointing_ssu_scratch",
    "checkpointing_ssu",
    "replayssm_materialize",
]

_OP = "checkpointing_ssu"
_MOST = 16  # live rows of a ring, and new tokens
_ONE_KERNEL, _TWO_KERNELS = 0, 1
_ALGORITHMS = {"auto": None, "monolith": _ONE_KERNEL, "two-kernel": _TWO_KERNELS}
_SCALED = (torch.int8, torch.float8_e4m3fn)

_module = module_cache(gen_ssu_replay_module)


def _get_module(state_dtype: torch.dtype, input_dtype: torch.dtype, *_: Any) -> Any:
    """Return the CUDA module of the published specialisation keys, of which the first two matter here."""
    return _module(state_dtype, input_dtype)


class _Natives(dict[tuple[bool, torch.dtype, torch.dtype], Callable[..., Any]]):
    """The native function by ``(is_cuda, state.dtype, x.dtype)``; built on first use."""

    def __missing__(self, key: tuple[bool, torch.dtype, torch.dtype]) -> Callable[..., Any]:
        is_cuda, state, tokens = key
        self[key] = getattr(_module(state, tokens, "cuda" if is_cuda else "cpu"), _OP)
        return self[key]


_native = _Natives()


class CheckpointingSSURunner(TunableRunner):
    """The two forms of ``checkpointing_ssu``, for the autotuner (operator "checkpointing_ssu").

    Tactic 0 is one kernel, 1 two kernels, of which the first computes products once for the heads of a group; -1 is the
    rule: two kernels if there is scratch and at least one (sequence, head) for each SM. The arguments are what results
    of tuning depend on; ``inputs`` are the tensors of the native call, ``out`` first.
    """

    def __init__(
        self,
        module_base_args: Sequence[Any],
        *,
        dt_softplus: bool,
        pad_slot_id: int,
        requested_algorithm: str = "auto",
        requested_d_split: Optional[int] = None,
        precompute_heads_per_cta: int = 0,
        heads_per_group: int = 1,
        optional_tensor_presence: Sequence[bool] = (),
    ) -> None:
        self.module_base_args = tuple(module_base_args)
        self.dt_softplus = dt_softplus
        self.pad_slot_id = pad_slot_id
        self.requested_algorithm = requested_algorithm
        self.requested_d_split = requested_d_split
        self.precompute_heads_per_cta = precompute_heads_per_cta
        self.heads_per_group = heads_per_group
        self.optional_tensor_presence = tuple(optional_tensor_presence)
        self.philox_rounds_cache = 10
        self.tokens_cache = 0
        self.trial_cache: Optional[list[Any]] = None  # copies that trials may write to

    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        requested = _ALGORITHMS[self.requested_algorithm]
        return (_ONE_KERNEL, _TWO_KERNELS) if requested is None else (requested,)

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        return tuple(str(arg) for arg in self.module_base_args)

    def get_tuning_config(self) -> TuningConfig:
        """Return that no size varies: results hold for the batch that was measured."""
        return TuningConfig(use_cold_l2_cache=True)

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        tensors = list(self.trial_cache if self.trial_cache is not None else inputs)
        out, state, x = tensors[0], tensors[1], tensors[7]
        if tactic == -1:
            requested = _ALGORITHMS[self.requested_algorithm]
            tactic = _rule(state, tensors[16], x, tensors[17], tensors[19]) if requested is None else requested
        if tactic == _ONE_KERNEL:
            tensors[19:22] = (None, None, None)
        _native[state.is_cuda, state.dtype, x.dtype](
            *tensors,
            self.dt_softplus,
            self.pad_slot_id,
            self.philox_rounds_cache,
            self.tokens_cache or x.shape[1],
            self.precompute_heads_per_cta,
        )
        return out


def _rule(
    state: torch.Tensor,
    indices: Optional[torch.Tensor],
    x: torch.Tensor,
    cu_seqlens: Optional[torch.Tensor],
    scratch: Optional[torch.Tensor],
) -> int:
    """Choose a form where nothing was tuned."""
    if scratch is None or not state.is_cuda:
        return _ONE_KERNEL
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _TWO_KERNELS if batch * state.shape[1] >= get_device_sm_count(state.get_device()) else _ONE_KERNEL


def _copies(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors of a call with copies of what it writes: the slots of the call, numbered from 0."""
    made = list(tensors)
    state, indices, x, bounds = made[1], made[16], made[7], made[17]
    batch = x.shape[0] if bounds is None else bounds.shape[0] - 1
    chosen = torch.arange(batch, device=state.device) if indices is None else indices.long()
    chosen = chosen.clamp(0, state.shape[0] - 1)
    for i in (1, 2, 3, 4, 5, 6, 15):  # state, rings, their numbers, scales
        made[i] = None if made[i] is None else made[i].index_select(0, chosen)
    made[16] = None
    made[0] = torch.empty_like(made[0])
    for i in (19, 20, 21):
        made[i] = None if made[i] is None else torch.empty_like(made[i])
    return made


def _tuned(tensors: list[Any], tokens: int, dt_softplus: bool, pad_slot_id: int, philox_rounds: int) -> Any:
    """Return the tactic that the tuner knows, -1 if it knows none; while it tunes, measure on copies."""
    tuner = AutoTuner.get()
    state, x_cache, x, B = tensors[1], tensors[2], tensors[7], tensors[10]
    facts = (_OP, x.shape, B.shape, x_cache.shape[2], tokens, state.dtype, x.dtype, state.get_device())
    choice = tuner.kept.get(facts)
    if choice is not None and not tuner.is_tuning_mode:
        if not choice.is_known:
            tuner.stats.cache_misses += 1
        return choice.tactic
    key = (state.dtype, x.dtype, x_cache.shape[1], *state.shape[2:], tokens, x_cache.shape[2] - tokens)
    runner = CheckpointingSSURunner(key, dt_softplus=dt_softplus, pad_slot_id=pad_slot_id)
    runner.philox_rounds_cache, runner.tokens_cache = philox_rounds, tokens
    if tuner.is_tuning_mode:
        runner.trial_cache = _copies(tensors)
    try:  # the sizes of a call are those of its tokens
        return tuner.choose_and_keep(facts, _OP, lambda: [runner], runner.get_tuning_config(), [x, B])[1]
    finally:
        runner.trial_cache = None


@register_custom_op(
    "flashinfer::checkpointing_ssu",
    mutates_args=(
        "out",
        "state",
        "x_cache",
        "B_cache",
        "dt_cache",
        "state_scale",
        "cb_scaled",
        "cumAdt_vec",
        "cb_old",
    ),
)
@called(_OP)
def _checkpointing_ssu(
    out: torch.Tensor,
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional[torch.Tensor],
    z: Optional[torch.Tensor],
    dt_bias: Optional[torch.Tensor],
    state_scale: Optional[torch.Tensor],
    state_batch_indices: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],
    rand_seed: Optional[torch.Tensor],
    cb_scaled: Optional[torch.Tensor],
    cumAdt_vec: Optional[torch.Tensor],
    cb_old: Optional[torch.Tensor],
    dt_softplus: bool,
    pad_slot_id: int,
    philox_rounds: int,
    tokens: int,
    algorithm: str,
    d_split: int,
    precompute_heads_per_cta: int,
) -> None:
    tensors = [out, state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, D, z]
    tensors += [dt_bias, state_scale, state_batch_indices, cu_seqlens, rand_seed, cb_scaled, cumAdt_vec, cb_old]
    tactic = _ALGORITHMS[algorithm]
    if tactic is None:
        has_knob = d_split != 0 or precompute_heads_per_cta != 0
        if cb_scaled is not None and cu_seqlens is None and not has_knob and state.is_cuda:
            tactic = _tuned(tensors, tokens, dt_softplus, pad_slot_id, philox_rounds)
        if tactic is None or tactic == -1:
            tactic = _rule(state, state_batch_indices, x, cu_seqlens, cb_scaled)
    if tactic == _ONE_KERNEL:
        tensors[19:22] = (None, None, None)
    _native[state.is_cuda, state.dtype, x.dtype](
        *tensors, dt_softplus, pad_slot_id, philox_rounds, tokens, precompute_heads_per_cta
    )


def _check(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    tokens: int,
    state_scale: Optional[torch.Tensor],
    d_split: Optional[int],
    cu_seqlens: Optional[torch.Tensor],
    max_seqlen: Optional[int],
    scratch: tuple[Optional[torch.Tensor], ...],
    algorithm: str,
    precompute_heads_per_cta: int,
) -> None:
    if cu_seqlens is None and max_seqlen is not None:
        raise ArgumentError(f"{_OP}: max_seqlen must be None without cu_seqlens, got {max_seqlen}")
    if cu_seqlens is not None and max_seqlen is None:
        raise ArgumentError(f"{_OP}: max_seqlen must be given with cu_seqlens, got None")
    if x_cache.ndim != 4:
        raise ArgumentError(f"{_OP}: x_cache must have 4 dimensions, got {x_cache.ndim}")
    window = x_cache.shape[2] - tokens
    if window > _MOST:
        raise ArgumentError(
            f"{_OP}: x_cache.shape[2] - npredicted must be at most 16 cache tokens, got {x_cache.shape[2]} - {tokens}"
        )
    if not 1 <= tokens <= window:
        raise ArgumentError(
            f"{_OP}: npredicted (tokens of a sequence) must be at least 1 and at most the window, x_cache.shape[2] - "
            f"npredicted, got {tokens} for a ring of {x_cache.shape[2]} rows"
        )
    is_scaled = state.dtype in _SCALED
    if is_scaled != (state_scale is not None):
        must = "given for int8 and float8_e4m3fn states" if is_scaled else f"None for {state.dtype} states"
        raise ArgumentError(f"{_OP}: state_scale must be {must}, got {'None' if is_scaled else 'a tensor'}")
    if d_split not in (None, 1, 2) or (is_scaled and d_split == 2):
        raise ArgumentError(f"{_OP}: d_split must be None, 1 or 2 (not 2 for 8-bit states), got {d_split}")
    if algorithm not in _ALGORITHMS:
        raise ArgumentError(f"{_OP}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if precompute_heads_per_cta < 0:
        raise ArgumentError(f"{_OP}: precompute_heads_per_cta must not be negative, got {precompute_heads_per_cta}")
    given = [tensor is not None for tensor in scratch]
    if any(given) and not all(given):
        raise ArgumentError(f"{_OP}: cb_scaled, cumAdt_vec and cb_old must be given together, got {sum(given)} of 3")
    if algorithm == "two-kernel" and not all(given):
        raise ArgumentError(f"{_OP}: cb_scaled, cumAdt_vec and cb_old must be given together for two-kernel, got none")


@flashinfer_api(trace=checkpointing_ssu_trace)
def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: Optional[torch.Tensor] = None,
    z: Optional[torch.Tensor] = None,
    dt_bias: Optional[torch.Tensor] = None,
    dt_softplus: bool = False,
    state_batch_indices: Optional[torch.Tensor] = None,
    pad_slot_id: int = -1,
    state_scale: Optional[torch.Tensor] = None,
    rand_seed: Optional[torch.Tensor] = None,
    philox_rounds: int = 10,
    d_split: Optional[int] = None,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    enable_pdl: bool = False,
    cb_scaled: Optional[torch.Tensor] = None,
    cumAdt_vec: Optional[torch.Tensor] = None,
    cb_old: Optional[torch.Tensor] = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    r"""Replay the live rows of each ring onto its state, run new tokens from there, and append them to the ring.

    The recurrence is that of :func:`selective_state_update`. With p = ``prev_num_accepted_tokens[slot]`` live rows, T
    new tokens and a window of L - T rows, the replayed state, without the new tokens, is written to ``state[slot]`` if
    p + T exceeds the window; otherwise the state keeps its bits. The new tokens go to rows
    ``(ring_start + p + i) % L``. The numbers of a slot are the caller's: they are never written.

    Parameters
    ----------
    state : torch.Tensor
        ``(slots, heads, dim, dstate)`` float32, bfloat16, float16, or int8 and float8_e4m3fn with ``state_scale``.
        Written.
    x_cache, B_cache : torch.Tensor
        Rings ``(slots, heads, L, dim)`` and ``(slots, groups, L, dstate)``, dtype of ``x``. Written.
    dt_cache : torch.Tensor
        ``(slots, heads, L)`` float32, with bias and softplus. Written.
    ring_start, prev_num_accepted_tokens : torch.Tensor
        ``(slots,)`` int32: the oldest live row, and the number of live rows.
    x, dt, out : torch.Tensor
        ``(batch, T, heads, dim)``; packed ``(1, tokens, heads, dim)``. dt has one number for each head: that
        of row 0 is read. ``x`` is bfloat16 or float16.
    A : torch.Tensor
        ``(heads, dim, dstate)`` float32, expanded from one number for each head, which is read at row and column 0.
    B, C : torch.Tensor
        ``(batch, T, groups, dstate)``.
    D, dt_bias : Optional[torch.Tensor]
        ``(heads, dim)``, of one dtype; dt_bias expanded.
    z : Optional[torch.Tensor]
        Gate, as ``x``.
    dt_softplus : bool
        Apply softplus to ``dt + dt_bias``.
    state_batch_indices : Optional[torch.Tensor]
        ``(batch,)`` int32 or int64.
    pad_slot_id : int
        Sequences with this slot are skipped.
    state_scale : Optional[torch.Tensor]
        ``(slots, heads, dim)`` float32, for 8-bit states. Written with the state.
    rand_seed : Optional[torch.Tensor]
        One int64: float16 and 8-bit states are rounded by random bits.
    philox_rounds : int
        Rounds of the random generator.
    d_split : Optional[int]
        None, 1 or 2: a setting of other kernels; results are the same.
    cu_seqlens : Optional[torch.Tensor]
        ``(batch + 1,)`` int32, for a packed batch.
    max_seqlen : Optional[int]
        Largest number of tokens of a packed sequence: the T of the rings.
    enable_pdl : bool
        Accepted; results are the same.
    cb_scaled, cumAdt_vec, cb_old : Optional[torch.Tensor]
        Scratch of :func:`allocate_checkpointing_ssu_scratch`.
    precompute_heads_per_cta : int
        Heads of a block of the first of two kernels; 0: all of a group.
    algorithm : str
        auto, monolith (one kernel) or two-kernel, which needs the scratch.

    Returns
    -------
    torch.Tensor
        ``out``.

    Examples
    --------
    A slot of three live rows in a ring of ten, whose window is eight, and two new tokens:

    >>> state, rings = torch.zeros(1, 4, 64, 128), (torch.zeros(1, 4, 10, 64), torch.zeros(1, 1, 10, 128))
    >>> x_cache, B_cache = (ring.bfloat16() for ring in rings)
    >>> start, live = torch.tensor([7]).int(), torch.tensor([3]).int()
    >>> x, B = torch.randn(1, 2, 4, 64).bfloat16(), torch.randn(1, 2, 1, 128).bfloat16()
    >>> dt, A = torch.rand(1, 2, 4, 1).expand(x.shape), -torch.rand(4, 1, 1).expand(4, 64, 128)
    >>> slots = (state, x_cache, B_cache, torch.rand(1, 4, 10), start, live)
    >>> y = flashinfer.mamba.checkpointing_ssu(*slots, x, dt, A, B, B, torch.empty_like(x))
    >>> bool((x_cache[0, :, 0] == x[0, 0]).all()), bool(state.any())
    (True, False)
    """
    tokens = x.shape[1] if max_seqlen is None else max_seqlen
    scratch = (cb_scaled, cumAdt_vec, cb_old)
    _check(
        *(state, x_cache, tokens, state_scale, d_split, cu_seqlens, max_seqlen, scratch, algorithm),
        precompute_heads_per_cta,
    )
    _checkpointing_ssu(
        out,
        state,
        x_cache,
        B_cache,
        dt_cache,
        ring_start,
        prev_num_accepted_tokens,
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
        cu_seqlens,
        rand_seed,
        cb_scaled,
        cumAdt_vec,
        cb_old,
        dt_softplus,
        pad_slot_id,
        philox_rounds,
        tokens,
        algorithm,
        d_split or 0,
        precompute_heads_per_cta,
    )
    return out


def allocate_checkpointing_ssu_scratch(
    batch_size: int, num_heads: int, num_predicted_tokens: int, max_window: int, dtype: torch.dtype, device: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate ``cb_scaled``, ``cumAdt_vec`` and ``cb_old`` for batches of up to ``batch_size`` sequences.

    Parameters
    ----------
    batch_size, num_heads : int
        Positive.
    num_predicted_tokens, max_window : int
        New tokens of a sequence and rows of a ring that may be live, 1 to 16.
    dtype : torch.dtype
        That of ``x``.
    device : torch.device
        Where the states are.
    """
    op = "allocate_checkpointing_ssu_scratch"
    for name, value in (("batch_size", batch_size), ("num_heads", num_heads)):
        if value <= 0:
            raise ArgumentError(f"{op}: {name} must be positive, got {value}")
    for name, value in (("num_predicted_tokens", num_predicted_tokens), ("max_window", max_window)):
        if not 1 <= value <= _MOST:
            raise ArgumentError(f"{op}: {name} must be in [1, 16], got {value}")
    tokens, window = -(-num_predicted_tokens // 16) * 16, -(-max_window // 8) * 8
    return (
        torch.empty(batch_size, num_heads, 32, tokens // 2, dtype=dtype, device=device),
        torch.empty(batch_size, num_heads, tokens, dtype=torch.float32, device=device),
        torch.empty(batch_size, num_heads, 32, window // 2, dtype=dtype, device=device),
    )


@register_custom_op("flashinfer::replayssm_materialize", mutates_args=("dependency_outputs",))
@called("replayssm_materialize")
def _replayssm_materialize(
    state_ptrs: torch.Tensor,
    state_slot_strides: torch.Tensor,
    x_cache_ptrs: torch.Tensor,
    x_cache_slot_strides: torch.Tensor,
    B_cache_ptrs: torch.Tensor,
    B_cache_slot_strides: torch.Tensor,
    dt_cache_ptrs: torch.Tensor,
    dt_cache_slot_strides: torch.Tensor,
    A_ptrs: torch.Tensor,
    state_scale_ptrs: Optional[torch.Tensor],
    state_scale_slot_strides: Optional[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    rand_seed: Optional[torch.Tensor],
    dependency_inputs: list[torch.Tensor],
    dependency_outputs: list[torch.Tensor],
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    ring_buffer_len: int,
    pad_slot_id: int,
    philox_rounds: int,
) -> None:
    _module(state_dtype, input_dtype, "cuda" if state_ptrs.is_cuda else "cpu").replayssm_materialize(
        state_ptrs,
        state_slot_strides,
        x_cache_ptrs,
        x_cache_slot_strides,
        B_cache_ptrs,
        B_cache_slot_strides,
        dt_cache_ptrs,
        dt_cache_slot_strides,
        A_ptrs,
        state_scale_ptrs,
        state_scale_slot_strides,
        src_slots,
        dst_slots,
        ring_start,
        replay_prefix_len,
        active_request_indices,
        rand_seed,
        pad_slot_id,
        num_heads,
        heads_per_group,
        dim,
        dstate,
        ring_buffer_len,
        philox_rounds,
    )


def replayssm_materialize(  # not traced: a definition describes tensors, and this function gets addresses
    state_ptrs: torch.Tensor,
    state_slot_strides: torch.Tensor,
    x_cache_ptrs: torch.Tensor,
    x_cache_slot_strides: torch.Tensor,
    B_cache_ptrs: torch.Tensor,
    B_cache_slot_strides: torch.Tensor,
    dt_cache_ptrs: torch.Tensor,
    dt_cache_slot_strides: torch.Tensor,
    A_ptrs: torch.Tensor,
    state_scale_ptrs: Optional[torch.Tensor],
    state_scale_slot_strides: Optional[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: Optional[torch.Tensor] = None,
    philox_rounds: int = 0,
    dependency_inputs: Optional[Sequence[torch.Tensor]] = None,
    dependency_outputs: Optional[Sequence[torch.Tensor]] = None,
) -> None:
    r"""Replay rows of rings onto states, for all layers of a model in one call.

    For each layer l and request b: the first ``replay_prefix_len[b]`` live rows of the rings of slot
    ``src_slots[l, b]`` are replayed onto the state of that slot, and the result goes to slot ``dst_slots[l, b]``. No
    rows: an exact copy. Source and rings keep their bits.

    Parameters
    ----------
    state_ptrs, x_cache_ptrs, B_cache_ptrs, dt_cache_ptrs, A_ptrs, state_scale_ptrs : torch.Tensor
        ``(layers,)`` int64: addresses, of pools as :func:`checkpointing_ssu` has them, dense inside a slot; A one
        float32 for each head. Scales for 8-bit states, else None.
    state_slot_strides, x_cache_slot_strides, B_cache_slot_strides, dt_cache_slot_strides, state_scale_slot_strides
        ``(layers,)`` int64: distances of slots, in elements.
    src_slots, dst_slots : torch.Tensor
        ``(layers, requests)`` int32.
    ring_start, replay_prefix_len : torch.Tensor
        ``(requests,)`` int32.
    active_request_indices : torch.Tensor
        int32: the requests to do, up to the first -1.
    state_dtype, input_dtype, matrixA_dtype : torch.dtype
        What the addresses point to; tokens are bfloat16, A is float32.
    dim, dstate, num_heads, heads_per_group, ring_buffer_len : int
        Sizes of the pools.
    max_window : int
        Rows that may be live, 1 to 16.
    pad_slot_id : int
        Slots that are skipped.
    rand_seed, philox_rounds
        As for :func:`checkpointing_ssu`.
    dependency_inputs, dependency_outputs
        The pools behind the addresses, so that a compiler keeps the order of calls; not looked at.
    """
    op = "replayssm_materialize"
    if input_dtype != torch.bfloat16:
        raise ArgumentError(f"{op}: input_dtype must be torch.bfloat16, got {input_dtype}")
    if matrixA_dtype != torch.float32:
        raise ArgumentError(f"{op}: matrixA_dtype must be torch.float32, got {matrixA_dtype}")
    if not 1 <= max_window <= _MOST:
        raise ArgumentError(f"{op}: max_window must be in [1, 16], got {max_window}")
    if (state_dtype in _SCALED) != (state_scale_ptrs is not None and state_scale_slot_strides is not None):
        raise ArgumentError(
            f"{op}: state_scale_ptrs must be given for 8-bit states and only for them, got another call"
        )
    if rand_seed is not None and philox_rounds <= 0:
        raise ArgumentError(f"{op}: philox_rounds must be positive with rand_seed, got {philox_rounds}")
    if heads_per_group <= 0 or num_heads % heads_per_group:
        raise ArgumentError(f"{op}: heads_per_group must divide {num_heads} (num_heads), got {heads_per_group}")
    if min(dim, dstate, ring_buffer_len) <= 0 or dstate > 256 or dstate % 8:
        raise ArgumentError(f"{op}: dim, dstate and ring_buffer_len must be positive, dstate a multiple of 8 up to 256")
    _replayssm_materialize(
        state_ptrs,
        state_slot_strides,
        x_cache_ptrs,
        x_cache_slot_strides,
        B_cache_ptrs,
        B_cache_slot_strides,
        dt_cache_ptrs,
        dt_cache_slot_strides,
        A_ptrs,
        state_scale_ptrs,
        state_scale_slot_strides,
        src_slots,
        dst_slots,
        ring_start,
        replay_prefix_len,
        active_request_indices,
        rand_seed,
        list(dependency_inputs or ()),
        list(dependency_outputs or ()),
        state_dtype,
        input_dtype,
        dim,
        dstate,
        num_heads,
        heads_per_group,
        ring_buffer_len,
        pad_slot_id,
        philox_rounds,
    )
