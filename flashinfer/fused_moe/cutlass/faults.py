# SPDX-License-Identifier: Apache-2.0
"""Refusals of ``cutlass_fused_moe`` that need no tensor values; shapes and dtypes are compared in csrc/fused_moe.cu."""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from ..._runtime.errors import ArgumentError

__all__ = ["refuse_modes", "refuse_output", "refuse_profiles", "refuse_ranks"]

_OP = "cutlass_fused_moe"


def refuse_modes(
    min_latency_mode: bool, use_mxfp8_act_scaling: bool, cluster_size: int, cluster_rank: int, has_input_sf: bool
) -> None:
    """Raise for modes that only other GPUs or other versions have."""
    if min_latency_mode:
        raise NotImplementedError(f"{_OP}: min_latency_mode is not implemented: it must be False, got True")
    if use_mxfp8_act_scaling or has_input_sf:
        raise NotImplementedError(
            f"{_OP}: use_mxfp8_act_scaling must be False and input_sf None (MXFP8 and NVFP4 activations need "
            "Blackwell), got a value"
        )
    if cluster_size != 1 or cluster_rank != 0:
        raise ArgumentError(
            f"{_OP}: smart_router is not supported: cluster_size must be 1 and cluster_rank 0, got {cluster_size} and "
            f"{cluster_rank}"
        )


def refuse_ranks(op: str, tp_size: int, tp_rank: int, ep_size: int, ep_rank: int) -> None:
    """Raise unless both ranks are in their groups."""
    for name, size, rank in (("tp", tp_size, tp_rank), ("ep", ep_size, ep_rank)):
        if size < 1:
            raise ArgumentError(f"{op}: {name}_size must be at least 1, got {size}")
        if not 0 <= rank < size:
            raise ArgumentError(f"{op}: {name}_rank must be from 0 to {name}_size - 1 = {size - 1}, got {rank}")


def refuse_profiles(profile_ids: Sequence[int]) -> None:
    """Raise unless there is a profile for each of the two products."""
    if len(profile_ids) != 2:
        raise ArgumentError(f"{_OP}: profile_ids must contain 2 numbers, got {len(profile_ids)}")


def refuse_output(
    output: Optional[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise for the result's dtype, or for the first property of a given output that differs."""
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise NotImplementedError(
            f"{_OP}: output_dtype must be float16 or bfloat16, got {dtype}: FP8 output is not implemented"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ArgumentError(f"{_OP}: output_dtype must be float16 or bfloat16, got {dtype}")
    if output is None:
        return
    if tuple(output.shape) != shape:
        raise ArgumentError(f"{_OP}: output must have shape {shape}, got {tuple(output.shape)}")
    if output.dtype is not dtype:
        raise ArgumentError(f"{_OP}: output must have dtype {dtype} (output_dtype), got {output.dtype}")
    if output.device != device:
        raise ArgumentError(f"{_OP}: output must be on {device}, the device of input, got {output.device}")
