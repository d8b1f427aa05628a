# SPDX-License-Identifier: Apache-2.0
"""Tuning in several processes that must choose alike, such as the ranks of tensor parallelism."""

from __future__ import annotations

from typing import Any, Optional

import torch

__all__ = ["get_autotune_process_group", "mean_over_ranks", "set_autotune_process_group"]

_group: Optional[Any] = None


def set_autotune_process_group(group: Optional[Any]) -> None:
    """Average the time of each tactic over the ranks of a ``torch.distributed`` group; None: no averaging.

    All ranks of the group then tune the same operators and sizes in the same order.

    Examples
    --------
    >>> flashinfer.autotuner.set_autotune_process_group(None)  # or torch.distributed.new_group(ranks)
    >>> flashinfer.autotuner.get_autotune_process_group() is None
    True
    """
    global _group
    _group = group


def get_autotune_process_group() -> Optional[Any]:
    """Return the group that :func:`set_autotune_process_group` was given.

    Examples
    --------
    >>> flashinfer.autotuner.get_autotune_process_group() is None  # one rank
    True
    """
    return _group


def mean_over_ranks(time_ms: float) -> float:
    """Average over the ranks of the group, in a reduction that every rank joins; unchanged without a group."""
    if _group is None:
        return time_ms
    distributed = torch.distributed
    device = "cuda" if "nccl" in str(distributed.get_backend(_group)) else "cpu"
    total = torch.tensor([time_ms], dtype=torch.float64, device=device)
    distributed.all_reduce(total, group=_group)
    return total.item() / distributed.get_world_size(_group)
