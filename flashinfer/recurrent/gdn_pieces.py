# SPDX-License-Identifier: Apache-2.0
"""Steps of the split form of the gated delta rule, one by one, under their published names.

``chunk_gated_delta_rule`` does all of them in its kernels; these are for programs that call a step alone. They are
torch's batched products in float32 and the prefill itself, on any device, and never wait for it. States are stored
with V before K, so that a chunk changes them by ``S <- S M + N``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, NamedTuple, Optional, TypeVar, cast

import torch

from .._runtime.errors import ArgumentError
from .gdn_prefill import choose_cp_chunk_len, chunk_gated_delta_rule, split_sms

__all__ = [
    "BLK",
    "chunk_bound",
    "cp_delta_rule_dsl_sm90",
    "cp_delta_rule_fixup_dsl_sm90",
    "cp_delta_rule_mn_precompute_dsl_sm90",
    "cp_delta_rule_prefill_dsl_sm90",
    "cp_delta_rule_t_precompute_dsl_sm90",
]

F = TypeVar("F", bound=Callable[..., Any])

BLK = 64  #: tokens of a block
_LEAST_LOG2_DECAY = -64.0  # as in the kernels: smaller decays count as 2^-64


def chunk_bound(num_items: int, total: int, chunk_size: int) -> int:
    """Return the slot of the first chunk of sequence ``num_items`` if it begins at token ``total``."""
    whole = min(num_items, total)
    return whole + (total - whole) // chunk_size


def _placed(function: F) -> F:
    """Add the published keywords that say where a step runs. Checks read no values, so there is none to skip."""

    @functools.wraps(function)
    def call(*args: Any, _skip_check: bool = False, _device: Any = None, _stream: Any = None, **kwargs: Any) -> Any:
        if _device is None and _stream is None:
            return function(*args, **kwargs)
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if _device is not None and torch.empty(0, device=_device).device != x.device:
            raise ArgumentError(f"{function.__name__}: _device must be {x.device}, that of the tensors, got {_device}")
        if _stream is None or not x.is_cuda:
            return function(*args, **kwargs)
        stream = torch.cuda.ExternalStream(_stream, device=x.device) if isinstance(_stream, int) else _stream
        with torch.cuda.stream(stream):
            return function(*args, **kwargs)

    known = inspect.signature(function)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (("_skip_check", False), ("_device", None), ("_stream", None))
    ]
    call.__signature__ = known.replace(parameters=[*known.parameters.values(), *more])  # type: ignore[attr-defined]
    return cast("F", call)


class _Chunks(NamedTuple):
    """Chunks of all sequences by slot: sequence, number in it, first token, end. An unused slot has no tokens."""

    sequence: torch.Tensor
    number: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    first: torch.Tensor  #: slot of the first chunk of each sequence


def _chunks(cu_seqlens: torch.Tensor, total: int, chunk: int) -> _Chunks:
    starts = cu_seqlens.long()
    count = starts.shape[0] - 1
    order = torch.arange(count, device=starts.device)
    whole = torch.minimum(order, starts[:-1])
    first = whole + (starts[:-1] - whole).div(chunk, rounding_mode="floor")
    slots = torch.arange(chunk_bound(count, total, chunk), device=starts.device)
    sequence = torch.searchsorted(first, slots, right=True) - 1
    number = slots - first[sequence]
    stop = starts[sequence + 1]
    begin = torch.minimum(starts[sequence] + number * chunk, stop)
    return _Chunks(sequence, number, begin, torch.minimum(begin + chunk, stop), first)


def _gather(x: torch.Tensor, chunks: _Chunks) -> torch.Tensor:
    """Return the rows of blocks of 64 tokens, ``(slots, heads, 64, ...)``, zeros after their ends."""
    tokens = chunks.begin[:, None] + torch.arange(BLK, device=x.device)
    exists = tokens < chunks.end[:, None]
    rows = x[tokens.clamp(max=max(x.shape[0] - 1, 0))].float()
    rows = rows * exists.view(*exists.shape, *(1,) * (rows.ndim - 2))
    return rows.transpose(1, 2)


def _check_chunk(op: str, chunk: int, least: int = BLK) -> None:
    if chunk < 1 or chunk % least:
        raise ArgumentError(f"{op}: cp_chunk_len must be a positive multiple of {least}, got {chunk}")


@_placed
def cp_delta_rule_t_precompute_dsl_sm90(
    k: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_seqlen: int,
    max_seqlen: Optional[int] = None,
) -> torch.Tensor:
    """Return ``-((I + A)^-1 diag(beta))^T`` of each block, ``A[i, j] = beta_i k_i.k_j`` below the diagonal.

    ``k (tokens, Hk, 128)``, ``beta (tokens, H)``, H a multiple of Hk: ``(slots, H, 64, 64)`` in the dtype of ``k``.
    """
    blocks = _chunks(cu_seqlens, total_seqlen, BLK)
    heads = beta.shape[1]
    keys = _gather(k, blocks).repeat_interleave(heads // k.shape[1], dim=1)
    strength = _gather(beta, blocks)
    lower = torch.tril(strength[..., None] * (keys @ keys.mT), -1)
    solved = torch.linalg.solve_triangular(lower, torch.diag_embed(strength), upper=False, unitriangular=True)
    return -solved.mT.to(k.dtype)


@_placed
def cp_delta_rule_mn_precompute_dsl_sm90(
    k: torch.Tensor,
    v: torch.Tensor,
    t: torch.Tensor,
    alpha: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_seqlen: int,
    cp_chunk_len: int = 4096,
    max_seqlen: Optional[int] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return M and N of each chunk of ``cp_chunk_len`` tokens, ``(slots, H, 128, 128)`` float32.

    With g the decay from the start of a block to each token, L its last one: ``M = g_L (I + k^T T k)`` and
    ``N = -(v g_L / g)^T T k`` of a block, and those of a chunk follow from its blocks in their order.
    """
    _check_chunk("cp_delta_rule_mn_precompute_dsl_sm90", cp_chunk_len)
    heads, dim = t.shape[1], k.shape[-1]
    blocks, chunks = _chunks(cu_seqlens, total_seqlen, BLK), _chunks(cu_seqlens, total_seqlen, cp_chunk_len)
    keys = _gather(k, blocks).repeat_interleave(heads // k.shape[1], dim=1)
    values = _gather(v, blocks).repeat_interleave(heads // v.shape[1], dim=1)
    tokens = blocks.begin[:, None] + torch.arange(BLK, device=k.device)
    exists = (tokens < blocks.end[:, None])[:, None]
    logs = torch.log2(alpha.float()).clamp(min=_LEAST_LOG2_DECAY)[tokens.clamp(max=max(total_seqlen - 1, 0))]
    sums = torch.where(exists, logs.transpose(1, 2), 0.0).cumsum(-1)
    last = sums[..., -1:]
    added = t.float() @ keys
    identity = torch.eye(dim, device=k.device)
    transfer = torch.exp2(last)[..., None] * (identity + keys.mT @ added)
    state = -(values * torch.exp2(last - sums)[..., None]).mT @ added
    whole = identity.expand(chunks.begin.shape[0], heads, dim, dim).contiguous()
    sum_of = torch.zeros_like(whole)
    for j in range(cp_chunk_len // BLK):
        begin = chunks.begin + j * BLK
        slot = (blocks.first[chunks.sequence] + chunks.number * (cp_chunk_len // BLK) + j).clamp(
            max=max(blocks.begin.shape[0] - 1, 0)
        )
        takes = (begin < chunks.end).view(-1, 1, 1, 1)
        m, n = transfer[slot], state[slot]
        whole, sum_of = torch.where(takes, whole @ m, whole), torch.where(takes, sum_of @ m + n, sum_of)
    return whole, sum_of


@_placed
def cp_delta_rule_fixup_dsl_sm90(
    local_transfer: torch.Tensor,
    local_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_seqlen: int,
    cp_chunk_len: int = 4096,
    initial_state: Optional[torch.Tensor] = None,
    state_indices: Optional[torch.Tensor] = None,
    *,
    _kernel_kind: Optional[str] = None,
) -> torch.Tensor:
    """Return the states after each chunk, ``S_i = S_(i-1) M_i + N_i`` from ``initial_state`` or zeros, float32."""
    op = "cp_delta_rule_fixup_dsl_sm90"
    _check_chunk(op, cp_chunk_len, 1)
    if _kernel_kind not in (None, "simt_row4", "simt_row8", "hmma"):
        raise ArgumentError(f"{op}: _kernel_kind must be simt_row4, simt_row8 or hmma, got {_kernel_kind!r}")
    chunks = _chunks(cu_seqlens, total_seqlen, cp_chunk_len)
    count = cu_seqlens.shape[0] - 1
    s = _starts(initial_state, state_indices, count, local_state)
    starts = cu_seqlens.long()
    lengths = starts[1:] - starts[:-1]
    result = torch.zeros(
        local_state.shape[0] + 1, *local_state.shape[1:], device=local_state.device
    )  # the last is for what is not used
    for j in range(-(-total_seqlen // cp_chunk_len)):
        takes = lengths > j * cp_chunk_len
        slot = torch.where(takes, chunks.first + j, local_state.shape[0])
        read = slot.clamp(max=max(local_state.shape[0] - 1, 0))
        s = torch.where(takes.view(-1, 1, 1, 1), s @ local_transfer[read] + local_state[read], s)
        result[slot] = s
    return result[:-1]


def _starts(
    initial_state: Optional[torch.Tensor], state_indices: Optional[torch.Tensor], count: int, like: torch.Tensor
) -> torch.Tensor:
    """Return the state before the first token of each sequence in float32."""
    if initial_state is None:
        return torch.zeros(count, *like.shape[1:], device=like.device)
    return (initial_state if state_indices is None else initial_state[state_indices.long()]).float()


@_placed
def cp_delta_rule_prefill_dsl_sm90(
    o: torch.Tensor,
    state: Optional[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: torch.Tensor,
    fixed_state: torch.Tensor,
    alpha: torch.Tensor,
    scale: Optional[float],
    cu_seqlens: torch.Tensor,
    total_seqlen: int,
    cp_chunk_len: int = 4096,
    max_seqlen: Optional[int] = None,
    initial_state: Optional[torch.Tensor] = None,
    state_indices: Optional[torch.Tensor] = None,
    state_checkpoints: Optional[torch.Tensor] = None,
    checkpoint_cu_starts: Optional[torch.Tensor] = None,
    checkpoint_every_n_tokens: int = 0,
) -> None:
    """Write outputs, final states and checkpoints: each chunk is a request that begins from the state before it.

    ``fixed_state`` is what :func:`cp_delta_rule_fixup_dsl_sm90` returned; beta is the diagonal of ``-t``.
    """
    op = "cp_delta_rule_prefill_dsl_sm90"
    _check_chunk(op, cp_chunk_len)
    every = checkpoint_every_n_tokens
    if every and cp_chunk_len % every and every % cp_chunk_len:
        raise ArgumentError(
            f"{op}: checkpoint_every_n_tokens must divide cp_chunk_len ({cp_chunk_len}) or be a multiple, got {every}"
        )
    blocks, chunks = _chunks(cu_seqlens, total_seqlen, BLK), _chunks(cu_seqlens, total_seqlen, cp_chunk_len)
    slots, last = fixed_state.shape[0], max(blocks.begin.shape[0] - 1, 0)
    tokens = torch.arange(total_seqlen, device=q.device)
    sequence = torch.searchsorted(cu_seqlens.long()[1:].contiguous(), tokens, right=True)
    passed = tokens - cu_seqlens.long()[sequence]
    block = (blocks.first[sequence] + passed // BLK).clamp(max=last)
    beta = -torch.diagonal(t, dim1=-2, dim2=-1).transpose(1, 2)[block, passed % BLK].float()
    own = _starts(initial_state, state_indices, cu_seqlens.shape[0] - 1, fixed_state)[chunks.sequence]
    before = torch.roll(fixed_state, 1, 0)
    starts = torch.where((chunks.number == 0).view(-1, 1, 1, 1), own, before)
    ends = torch.cat([chunks.begin, cu_seqlens[-1:].long()])
    kept, rows = None, None
    if every and every < cp_chunk_len and state_checkpoints is not None and checkpoint_cu_starts is not None:
        kept, each = state_checkpoints, cp_chunk_len // every
        rows = checkpoint_cu_starts.long()[chunks.sequence] + chunks.number * each
        rows = torch.cat([rows, checkpoint_cu_starts[-1:].long()])
    _, after = chunk_gated_delta_rule(
        q, k, v, alpha, beta.contiguous(), scale, starts, True, ends, output=o, use_cp=False, state_checkpoints=kept,
        checkpoint_cu_starts=rows, checkpoint_every_n_tokens=every if kept is not None else 0,
    )  # fmt: skip
    if every >= cp_chunk_len and state_checkpoints is not None and checkpoint_cu_starts is not None:
        done = (chunks.number + 1) * cp_chunk_len
        is_kept = (done % every == 0) & (chunks.end - chunks.begin == cp_chunk_len)
        row = checkpoint_cu_starts.long()[chunks.sequence] + done // every - 1
        _scatter(state_checkpoints, row, is_kept, after)
    if state is not None:
        is_last = (chunks.end == cu_seqlens.long()[chunks.sequence + 1]) & (chunks.end > chunks.begin)
        row = chunks.sequence if state_indices is None else state_indices.long()[chunks.sequence]
        _scatter(state, row, is_last, after[:slots])


def _scatter(to: torch.Tensor, row: torch.Tensor, takes: torch.Tensor, x: torch.Tensor) -> None:
    """Write ``x[i]`` to ``to[row[i]]`` where ``takes[i]``, without asking the device how many there are."""
    number = torch.arange(row.shape[0], device=row.device)
    source = torch.full((to.shape[0] + 1,), -1, device=row.device)
    source[torch.where(takes, row, to.shape[0])] = torch.where(takes, number, -1)
    source = source[:-1]
    chosen = x[source.clamp(min=0)].to(to.dtype)
    to.copy_(torch.where((source >= 0).view(-1, 1, 1, 1), chosen, to))


def cp_delta_rule_dsl_sm90(
    o: torch.Tensor,
    state: Optional[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: Optional[float],
    *,
    initial_state: Optional[torch.Tensor] = None,
    state_indices: Optional[torch.Tensor] = None,
    state_checkpoints: Optional[torch.Tensor] = None,
    checkpoint_cu_starts: Optional[torch.Tensor] = None,
    checkpoint_every_n_tokens: int = 0,
    max_seqlen: Optional[int] = None,
    cp_chunk_len: Optional[int] = None,
    cp_chunk_len_granularity: int = 512,
) -> None:
    """All steps: ``chunk_gated_delta_rule`` in its split form, with parts of ``cp_chunk_len`` tokens if given.

    Otherwise their size is chosen by the number of heads, a multiple of ``cp_chunk_len_granularity``.
    """
    _check_chunk("cp_delta_rule_dsl_sm90", cp_chunk_len_granularity)
    if cp_chunk_len is None:
        requests, heads = cu_seqlens.shape[0] - 1, max(q.shape[1], v.shape[1])
        cp_chunk_len = choose_cp_chunk_len(requests, q.shape[0], heads, split_sms(q), cp_chunk_len_granularity)
    chunk_gated_delta_rule(
        q, k, v, alpha, beta, scale, initial_state, state is not None, cu_seqlens, output=o, output_state=state,
        state_checkpoints=state_checkpoints, checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens, use_cp=True, state_indices=state_indices,
        _cp_chunk_len=cp_chunk_len, max_seqlen=max_seqlen,
    )  # fmt: skip
