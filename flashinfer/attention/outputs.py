# SPDX-License-Identifier: Apache-2.0
"""Output buffers: allocate, or validate the caller's."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.checks import check_tensors
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import register_custom_op
from ..jit.cascade import gen_cascade_module
from ..jit.codegen import module_cache

__all__ = ["LSE_BASES", "add_sinks", "check_lse_form", "finish_lse", "lse_buffer", "output_buffer"]

#: Base of a returned LSE -> factor that converts a base-2 LSE to this base.
LSE_BASES = {"log2": 1.0, "ln": math.log(2)}
_FLOAT32 = torch.float32

_native_add_sinks = NativeFunction(module_cache(gen_cascade_module), "add_sinks")


def _check(op: str, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    check_tensors(op, **{name: x})
    if x.shape != shape:  # torch.Size is a tuple
        raise ArgumentError(f"{op}: Invalid shape of {name}: must be {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ArgumentError(f"{op}: Invalid dtype of {name}: must be {dtype}, got {x.dtype}")
    if x.device != like.device:
        raise ArgumentError(f"{op}: Invalid device of {name}: must be {like.device}, got {x.device}")


def output_buffer(
    op: str, out: Optional[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    if out is None:
        return new_empty(like, dtype, *shape)
    _check(op, "out", out, shape, dtype, like)
    return out


def lse_buffer(op: str, lse: Optional[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if lse is None:
        return new_empty(like, _FLOAT32, *shape)
    _check(op, "lse", lse, shape, _FLOAT32, like)
    return lse


def check_lse_form(op: str, lse_base: str, lse_layout: str) -> None:
    if lse_base not in LSE_BASES:
        raise ArgumentError(f"{op}: lse_base must be 'log2' or 'ln', got {lse_base!r}")
    if lse_layout not in ("NH", "HN"):
        raise ArgumentError(f"{op}: lse_layout must be 'NH' or 'HN', got {lse_layout!r}")


def finish_lse(
    op: str, lse: torch.Tensor, lse_base: str, lse_layout: str, given: Optional[torch.Tensor]
) -> torch.Tensor:
    """Convert a kernel's LSE ``(tokens, heads)`` to ``lse_base`` and ``lse_layout``, in the buffer ``given`` if any."""
    if lse_base == "ln":
        lse.mul_(LSE_BASES["ln"])
    if lse_layout == "NH":
        return lse
    if given is None:
        return lse.T.contiguous()
    _check(op, "lse", given, lse.T.shape, _FLOAT32, lse)
    if not given.is_contiguous():
        raise ArgumentError(f"{op}: lse must be contiguous (lse_layout='HN'), got strides {given.stride()}")
    return given.copy_(lse.T)


@register_custom_op("flashinfer::add_sinks", mutates_args=("out", "lse"))
def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add attention sinks to finished results, in place: one extra logit per head, without a value, in the softmax.

    This costs one launch and one pass over ``out``; ``BatchAttentionWithAttentionSinkWrapper`` avoids both.
    """
    _native_add_sinks[out.is_cuda](out, lse, sinks.to(_FLOAT32))
