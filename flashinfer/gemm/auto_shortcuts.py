# SPDX-License-Identifier: Apache-2.0
"""Shortcuts of ``backend="auto"``: the runner and the tactic that the tuner has chosen for the same facts before.

The first call of each size asks the tuner (``tuning.py``), which keeps the choice until results may have changed. A
choice by the rule counts as a miss each time, as a look-up would.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from .._runtime.allocation import allocate
from .._runtime.probes import probes
from .._runtime.requirements import SuitableBackends
from .._runtime.shortcut import capability_of
from ..autotuner import AutoTuner
from .launch import BATCHED, Sm90Functions, dense_product
from .tiles import tile_of
from .torch_product import torch_product, torch_scaled_mm

__all__ = ["auto_bmm_fp8", "auto_mm_bf16", "bf16_facts", "fp8_facts"]

_with_tile = Sm90Functions("gemm_sm90_with_tile")


OptionalTensor = Optional[torch.Tensor]


def bf16_facts(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    pdl: bool,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    sizes: tuple[int, int, int],
    index: int,
) -> tuple[Any, ...]:
    """Return all that the choice for a bf16 product, and the names of backends that serve it, depend on.

    ``sizes`` are m, n and k, ``index`` is that of the device. The rule asks the probe of capabilities, which serving
    engines replace.
    """
    # fmt: off
    return (
        "bf16_gemm", sizes, b.stride(), out_dtype, index, bias is None, not pdl, a.is_contiguous(),
        out is None or out.is_contiguous(), probes.get_compute_capability,
    )
    # fmt: on


def fp8_facts(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    dtype: torch.dtype,
    out_strides: Sequence[int],
    out_address: int,
) -> tuple[Any, ...]:
    """Return all that the choice for an fp8 product depends on. A scale has one element in any number of dimensions."""
    # fmt: off
    return (
        "fp8_gemm", a_shape, b_shape, A.stride(), B.stride(), out_strides,
        (A.data_ptr() | B.data_ptr() | out_address) % 16 == 0, A.dtype, B.dtype, dtype, A_scale.ndim, B_scale.ndim,
        A.get_device(), probes.get_compute_capability,
    )
    # fmt: on


def _own_product(
    kind: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: OptionalTensor,
    b_scale: OptionalTensor,
    bias: OptionalTensor,
    tactic: Any,
) -> OptionalTensor:
    """Multiply with the tile of a tactic, or by the rule where it has none or the tile does not take the operands."""
    tile = tile_of(tactic)
    if tile is not None and _with_tile[kind](
        out, a, b.mT, a_scale, b_scale, bias, None, None, BATCHED, 1, *tile, 0, 0, True, False
    ):
        return out
    return out if dense_product[kind](out, a, b, a_scale, b_scale, bias, True) else None


def auto_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    pdl: bool,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    suitable: SuitableBackends,
) -> OptionalTensor:
    index = a.get_device()
    capability = capability_of[index]
    if capability == 0:  # the CPU
        return None
    (m, k), n = a.shape, b.shape[1]
    tuner = AutoTuner.get()
    choice = tuner.kept.get(bf16_facts(a, b, bias, pdl, out, out_dtype, (m, n, k), index))
    if choice is None or (out is not None and out.dtype is not out_dtype):
        return None
    runner, tactic, is_known, names = choice
    if runner.with_torch:
        if bias is not None:
            return None
        out = torch_product(torch.mm, a, b, out, out_dtype, (m, n), capability)
    elif capability != 90:
        return None
    else:
        if out is None:
            out = allocate((m, n), (n or 1, 1), out_dtype, index)
        out = _own_product("bf16", out, a, b, None, None, bias, tactic)
    if out is not None:
        suitable.note(names)
        tuner.stats.cache_misses += not is_known
    return out


def auto_bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: OptionalTensor,
    suitable: SuitableBackends,
) -> OptionalTensor:
    index = A.get_device()
    capability = capability_of[index]
    if capability == 0:
        return None
    a_shape, b_shape = A.shape, B.shape
    (batch, m, _), n = a_shape, b_shape[2]
    strides: tuple[int, ...] = ((m or 1) * (n or 1), n or 1, 1)
    address = 0  # what torch allocates is aligned
    if out is not None:
        if out.dtype is not dtype:
            return None
        strides, address = out.stride(), out.data_ptr()
    tuner = AutoTuner.get()
    choice = tuner.kept.get(fp8_facts(A, B, A_scale, B_scale, a_shape, b_shape, dtype, strides, address))
    if choice is None:
        return None
    runner, tactic, is_known, names = choice
    if runner.with_torch:
        out = torch_scaled_mm(A, B, A_scale, B_scale, dtype, out, a_shape, b_shape, capability)
    elif capability != 90:
        return None
    else:
        if out is None:
            out = allocate((batch, m, n), strides, dtype, index)
        out = _own_product("fp8", out, A, B, A_scale, B_scale, None, tactic)
    if out is not None:
        suitable.note(names)
        tuner.stats.cache_misses += not is_known
    return out
