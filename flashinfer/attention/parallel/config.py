# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the tokens of each rank: of sequences with padding, of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist

from ..._runtime.errors import ArgumentError

__all__ = [
    "UnevenCPConfig",
    "VarlenCPConfig",
    "get_parallel_groups",
    "ring_varlen_config",
    "split_varlen_input",
    "ulysses_varlen_config",
    "uneven_cp_config",
]


@dataclass
class UnevenCPConfig:
    """A sequence that is padded at its end, so that each rank has as many rows."""

    seq_len: Optional[int] = None  #: tokens
    seq_len_padded: Optional[int] = None  #: rows of all ranks
    seq_len_cur_ring_group: Optional[int] = None  #: tokens of the ranks of this rank's Ulysses group


@dataclass
class VarlenCPConfig:
    """Packed sequences. ``ulysses``: offsets ``(n + 1,)`` of whole sequences; ``ring``: ``(ranks, n + 1)``, of the part
    that each rank of the ring has."""

    cu_seqlens_q_cur_ulysses_group: Optional[torch.Tensor] = None
    cu_seqlens_kv_cur_ulysses_group: Optional[torch.Tensor] = None
    max_seq_len_q_cur_ulysses_group: Optional[int] = None
    max_seq_len_kv_cur_ulysses_group: Optional[int] = None
    cu_seqlens_q_cur_ring_group: Optional[torch.Tensor] = None
    cu_seqlens_kv_cur_ring_group: Optional[torch.Tensor] = None
    max_seq_len_q_cur_ring_group: Optional[int] = None
    max_seq_len_kv_cur_ring_group: Optional[int] = None


def size_of(group: Optional[Any]) -> int:
    """Return the ranks of a group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def part_of(count: int, ranks: int, rank: int) -> int:
    """Return how many of ``count`` neighbours a rank has: the first ranks have one more where they do not divide."""
    return count // ranks + (rank < count % ranks)


def get_parallel_groups(ulysses_size: int, ring_size: int, device_type: str = "cuda") -> tuple[Any, Any]:
    """Return this rank's groups: neighbouring ranks exchange heads, ranks ``ulysses_size`` apart form a ring.

    Every rank of the default process group calls it. ``device_type`` is accepted: groups have the default backend.
    """
    op, world = "get_parallel_groups", dist.get_world_size()
    if ulysses_size < 1 or ring_size < 1 or ulysses_size * ring_size != world:
        raise ArgumentError(
            f"{op}: ulysses_size * ring_size must be the {world} ranks of the default group, got {ulysses_size} * "
            f"{ring_size}"
        )
    rows = [[r * ulysses_size + u for u in range(ulysses_size)] for r in range(ring_size)]
    columns = [list(one) for one in zip(*rows, strict=True)]
    return dist.new_subgroups_by_enumeration(rows)[0], dist.new_subgroups_by_enumeration(columns)[0]


def split_varlen_input(
    tensor: torch.Tensor, seq_len_list: Sequence[int], world_size: int, rank: int, tensor_layout: str = "HND"
) -> torch.Tensor:
    """Return a rank's part of each packed sequence, one after the other.

    Parts are neighbours; where the ranks do not divide a sequence, the first ones have a token more.

    Examples
    --------
    >>> from flashinfer.parallel_attention import split_varlen_input
    >>> split_varlen_input(torch.arange(8).view(8, 1, 1), [5, 3], 2, 1, "NHD").flatten().tolist()
    [3, 4, 7]
    """
    op = "split_varlen_input"
    if tensor_layout not in ("HND", "NHD"):
        raise ArgumentError(f"{op}: tensor_layout must be 'HND' or 'NHD', got {tensor_layout!r}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"{op}: rank must be in [0, {world_size}), got {rank}")
    dim = 1 if tensor_layout == "HND" else 0
    if sum(seq_len_list) != tensor.shape[dim]:
        raise ArgumentError(f"{op}: seq_len_list must add up to {tensor.shape[dim]} tokens, got {sum(seq_len_list)}")
    parts, begin = [], 0
    for count in seq_len_list:
        first = begin + sum(part_of(count, world_size, r) for r in range(rank))
        parts.append(tensor.narrow(dim, first, part_of(count, world_size, rank)))
        begin += count
    return torch.cat(parts, dim)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Return where packed sequences begin, and the end of the last."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def ulysses_varlen_config(seq_lens_q: Sequence[int], seq_lens_kv: Sequence[int]) -> VarlenCPConfig:
    """Describe packed sequences whose tokens the ranks of a Ulysses group share (:func:`split_varlen_input`)."""
    return VarlenCPConfig(
        cu_seqlens_q_cur_ulysses_group=offsets(seq_lens_q),
        cu_seqlens_kv_cur_ulysses_group=offsets(seq_lens_kv),
        max_seq_len_q_cur_ulysses_group=max(seq_lens_q),
        max_seq_len_kv_cur_ulysses_group=max(seq_lens_kv),
    )


def ring_varlen_config(seq_lens_q: Sequence[int], seq_lens_kv: Sequence[int], ring_group: Any) -> VarlenCPConfig:
    """Describe packed sequences whose tokens the ranks of a ring share (:func:`split_varlen_input`)."""
    ranks = size_of(ring_group)
    parts = [[[part_of(n, ranks, r) for n in lens] for r in range(ranks)] for lens in (seq_lens_q, seq_lens_kv)]
    q, kv = (torch.stack([offsets(one) for one in each]) for each in parts)
    return VarlenCPConfig(
        cu_seqlens_q_cur_ring_group=q,
        cu_seqlens_kv_cur_ring_group=kv,
        max_seq_len_q_cur_ring_group=max(map(max, parts[0])),
        max_seq_len_kv_cur_ring_group=max(map(max, parts[1])),
    )


def uneven_cp_config(
    seq_len: int,
    seq_len_padded: int,
    seq_len_cur_rank: int,
    ulysses_group: Optional[Any] = None,
    ring_group: Optional[Any] = None,
) -> UnevenCPConfig:
    """Describe a sequence that is padded at its end; every rank of the Ulysses group calls it with its own tokens."""
    op, ranks = "uneven_cp_config", size_of(ulysses_group) * size_of(ring_group)
    if seq_len_padded % ranks or not 0 <= seq_len <= seq_len_padded:
        raise ArgumentError(
            f"{op}: seq_len_padded must be a multiple of {ranks} ranks and at least seq_len = {seq_len}, got "
            f"{seq_len_padded}"
        )
    if not 0 <= seq_len_cur_rank <= seq_len_padded // ranks:
        raise ArgumentError(
            f"{op}: seq_len_cur_rank must be from 0 to the {seq_len_padded // ranks} rows of a rank, got "
            f"{seq_len_cur_rank}"
        )
    counts: list[Any] = [seq_len_cur_rank]
    if ulysses_group is not None:
        counts = [None] * size_of(ulysses_group)
        dist.all_gather_object(counts, seq_len_cur_rank, group=ulysses_group)
    return UnevenCPConfig(seq_len, seq_len_padded, sum(counts))
