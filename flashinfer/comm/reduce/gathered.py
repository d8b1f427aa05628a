# SPDX-License-Identifier: Apache-2.0
"""Collectives over ``torch.distributed`` with arithmetic around them: a product of gathered rows, a sum that travels in
8 bits. Data go through the process group, NCCL for GPUs and gloo for CPU tensors; no kernel here overlaps with it."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ..._runtime.errors import ArgumentError

__all__ = ["all_gather_matmul", "prepare_all_gather_matmul", "quantized_all_reduce"]

_LARGEST = 448.0  # the largest float8_e4m3fn


def _check_product(op: str, inp: torch.Tensor, w: torch.Tensor, backend: str) -> None:
    if backend not in ("auto", "torch"):
        raise ArgumentError(f"{op}: backend must be 'auto' or 'torch' in this release, got {backend!r}")
    if inp.dim() != 2 or w.dim() != 2 or inp.shape[1] != w.shape[0]:
        raise ArgumentError(f"{op}: inp must be (rows, K) and w (K, N), got {tuple(inp.shape)} and {tuple(w.shape)}")
    if inp.dtype != w.dtype or inp.device != w.device:
        raise ArgumentError(f"{op}: w must be {inp.dtype} on {inp.device} like inp, got {w.dtype} on {w.device}")


def all_gather_matmul(
    inp: torch.Tensor, w: torch.Tensor, group: Any, *, backend: str = "auto", verbose: bool = False
) -> torch.Tensor:
    """Return the rows of all ranks, in rank order, times ``w``: ``(W * rows, K) @ (K, N)``.

    Every rank of ``group`` passes as many rows.

    Examples
    --------
    >>> out = flashinfer.comm.all_gather_matmul(x, w, torch.distributed.group.WORLD)  # on every rank
    """
    _check_product("all_gather_matmul", inp, w, backend)
    world = torch.distributed.get_world_size(group)
    gathered = inp.new_empty(world, *inp.shape)
    torch.distributed.all_gather(list(gathered.unbind(0)), inp.contiguous(), group=group)
    return gathered.flatten(0, 1) @ w


def prepare_all_gather_matmul(
    inp: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    *,
    backend: str = "auto",
    max_rows: Optional[int] = None,
    verbose: bool = False,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Check the arguments once, and return the call for tensors like them."""
    op = "prepare_all_gather_matmul"
    _check_product(op, inp, w, backend)
    if max_rows is not None and inp.shape[0] > max_rows:
        raise ArgumentError(f"{op}: inp must have at most max_rows = {max_rows} rows, got {inp.shape[0]}")

    def run(inp: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_gather_matmul(inp, w, group, backend=backend)

    return run


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 bytes of ``(..., group)`` and the scales of the groups."""
    scale = (x.float().abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale


def quantized_all_reduce(
    inp: torch.Tensor,
    group: Any,
    *,
    scale_group: int = 256,
    block_size: Optional[int] = None,
    num_warps: Optional[int] = None,
    max_num_blocks: Optional[int] = None,
    p2p_phase3: Optional[bool] = None,
    output: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Sum a bfloat16 tensor over the ranks of a group, with float8_e4m3fn and a scale per group of elements on the way.

    Each rank sums a part in float32 and quantises the sum once more, so every rank gets the same bits. The error of an
    element is about 2^-4 of itself, twice.

    Examples
    --------
    >>> total = flashinfer.comm.quantized_all_reduce(x, torch.distributed.group.WORLD)  # on every rank
    """
    op = "quantized_all_reduce"
    if inp.dtype != torch.bfloat16 or not inp.is_contiguous():
        raise ArgumentError(f"{op}: inp must be bfloat16 and contiguous, got {inp.dtype} with strides {inp.stride()}")
    if scale_group < 1:
        raise ArgumentError(f"{op}: scale_group must be positive, got {scale_group}")
    world = torch.distributed.get_world_size(group)
    unit = world * scale_group
    padded = torch.nn.functional.pad(inp.flatten(), (0, -inp.numel() % unit)).view(world, -1, scale_group)
    codes, scales = _quantise(padded)
    theirs, their_scales = torch.empty_like(codes), torch.empty_like(scales)
    torch.distributed.all_to_all_single(theirs.flatten(), codes.flatten(), group=group)
    torch.distributed.all_to_all_single(their_scales.flatten(), scales.flatten(), group=group)
    total = (theirs.view(torch.float8_e4m3fn).float() * their_scales).sum(0)  # in rank order
    codes, scales = _quantise(total)
    all_codes, all_scales = codes.new_empty(world, *codes.shape), scales.new_empty(world, *scales.shape)
    torch.distributed.all_gather(list(all_codes.unbind(0)), codes.contiguous(), group=group)
    torch.distributed.all_gather(list(all_scales.unbind(0)), scales.contiguous(), group=group)
    result = (all_codes.view(torch.float8_e4m3fn).float() * all_scales).flatten()[: inp.numel()].view(inp.shape)
    result = result.to(torch.bfloat16)
    return result if output is None else output.copy_(result)
