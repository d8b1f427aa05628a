# SPDX-License-Identifier: Apache-2.0
"""Checks of ``chunk_gated_delta_rule``, in the published order; the launcher checks shapes and dtypes of the rest."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.errors import ArgumentError

__all__ = ["CHUNK", "check_checkpoints", "check_options", "check_requests", "check_slots"]

OP = "chunk_gated_delta_rule"
CHUNK = 64
_INTEGER_NAMES = "torch.int32 or torch.int64"
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGERS = (torch.int32, torch.int64)
_BACKENDS = ("auto", "flashinfer", "cake_gdn", "cudnn")


def check_options(
    backend: str,
    use_cp: Union[str, bool],
    interval: int,
    checkpoints: Optional[torch.Tensor],
    starts: Optional[torch.Tensor],
) -> None:
    """Validate what needs no other tensor: backend, use_cp, the interval of checkpoints, and their pairing."""
    if backend not in _BACKENDS:
        raise ArgumentError(
            f"{OP}: unsupported GDN backend: backend must be one of {', '.join(_BACKENDS)}, got {backend!r}"
        )
    if backend == "cake_gdn":
        raise RuntimeError(f"{OP}: backend 'cake_gdn' needs kernels for Blackwell, which this package does not have")
    if backend == "cudnn":
        raise NotImplementedError(f"{OP}: backend 'cudnn' is not part of this package; use 'auto'")
    if not (use_cp is True or use_cp is False or use_cp == "auto"):
        raise ArgumentError(f"{OP}: use_cp must be 'auto', True or False, got {use_cp!r}")
    if interval < 0:
        raise ArgumentError(f"{OP}: checkpoint_every_n_tokens must be non-negative, got {interval}")
    if interval % CHUNK:
        raise ArgumentError(
            f"{OP}: checkpoint_every_n_tokens must be a multiple of the chunk size {CHUNK}, got {interval}"
        )
    if interval > 0 and (checkpoints is None or starts is None):
        raise ArgumentError(
            f"{OP}: state_checkpoints and checkpoint_cu_starts must both be provided with checkpoint_every_n_tokens, "
            f"got {'no' if checkpoints is None else 'only'} state_checkpoints"
        )
    if interval == 0 and not (checkpoints is None and starts is None):
        raise ArgumentError(
            f"{OP}: state_checkpoints and checkpoint_cu_starts must be None with checkpoint_every_n_tokens = 0, "
            "got a tensor"
        )


def check_requests(
    cu_seqlens: Optional[torch.Tensor], max_seqlen: Optional[int], tokens: int
) -> tuple[torch.Tensor, int]:
    """Validate ``cu_seqlens`` and ``max_seqlen``, and return the offsets and the number of requests."""
    if cu_seqlens is None:
        raise ArgumentError(f"{OP}: cu_seqlens must be a tensor (inputs are packed), got None")
    if cu_seqlens.dtype not in _INTEGERS:
        raise ArgumentError(f"{OP}: cu_seqlens must have dtype {_INTEGER_NAMES}, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ArgumentError(
            f"{OP}: cu_seqlens must have shape (requests + 1,) with at least one request, got {tuple(cu_seqlens.shape)}"
        )
    requests = cu_seqlens.shape[0] - 1
    if max_seqlen is not None:
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int):
            raise ArgumentError(f"{OP}: max_seqlen must be an int, got {max_seqlen!r}")
        least = -(-tokens // requests)
        if not least <= max_seqlen <= tokens:
            raise ArgumentError(
                f"{OP}: max_seqlen must be in {least} .. {tokens} (for {tokens} tokens of {requests} requests), "
                f"got {max_seqlen}"
            )
    return cu_seqlens, requests


def check_checkpoints(
    checkpoints: Optional[torch.Tensor], starts: Optional[torch.Tensor], heads: int, requests: int
) -> None:
    """Validate the tensors of checkpoints, if there are any."""
    if checkpoints is None or starts is None:
        return
    if checkpoints.dtype not in STATE_DTYPES:
        names = ", ".join(str(x) for x in STATE_DTYPES)
        raise ArgumentError(f"{OP}: state_checkpoints must have dtype one of {names}, got {checkpoints.dtype}")
    if starts.dtype not in _INTEGERS:
        raise ArgumentError(f"{OP}: checkpoint_cu_starts must have dtype {_INTEGER_NAMES}, got {starts.dtype}")
    if starts.dim() != 1:
        raise ArgumentError(f"{OP}: checkpoint_cu_starts must have 1 dimension, got {starts.dim()}")
    if starts.shape[0] != requests + 1:
        raise ArgumentError(f"{OP}: checkpoint_cu_starts must have {requests + 1} elements, got {starts.shape[0]}")
    if checkpoints.dim() != 4 or checkpoints.shape[1:] != (heads, 128, 128):
        raise ArgumentError(
            f"{OP}: state_checkpoints must have shape (checkpoints, {heads}, 128, 128), got {tuple(checkpoints.shape)}"
        )


def check_slots(state_indices: torch.Tensor, requests: int) -> None:
    if state_indices.dtype not in _INTEGERS:
        raise ArgumentError(f"{OP}: state_indices must have dtype {_INTEGER_NAMES}, got {state_indices.dtype}")
    if state_indices.shape != (requests,):
        raise ArgumentError(f"{OP}: state_indices must have shape ({requests},), got {tuple(state_indices.shape)}")
