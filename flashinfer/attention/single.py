# SPDX-License-Identifier: Apache-2.0
"""Attention of one request: the ops behind ``single_decode_with_kv_cache`` and ``single_prefill_with_kv_cache``."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import register_custom_op
from ..jit.load import loaded_modules
from .call_records import aligned, is_launch_error
from .modules import get_single_decode_module, get_single_prefill_module
from .options import ALIBI, FP8, alibi_slopes

__all__ = ["SINGLE_KERNEL_TMP_SIZE", "run_module", "scratch", "single_decode", "single_prefill"]

SINGLE_KERNEL_TMP_SIZE = 32 << 20


def scratch(q: torch.Tensor) -> torch.Tensor:
    """Allocate scratch for partial results, at each call because torch.compile forbids tensors kept between graphs."""
    return q.new_empty(SINGLE_KERNEL_TMP_SIZE, dtype=torch.uint8)


class _Entries(dict[tuple[Any, ...], Any]):
    """Cache of module ``run`` functions, keyed by the getter's arguments and is_cuda; 0.6 us faster than the getter."""

    def __init__(self, get_module: Callable[..., Any]) -> None:
        self._get_module = get_module

    def __missing__(self, key: tuple[Any, ...]) -> Any:
        *args, is_cuda = key
        entry = self._get_module(*args, device="cuda" if is_cuda else "cpu").run
        self[key] = entry
        return entry


_decode_entries = _Entries(get_single_decode_module)
_prefill_entries = _Entries(get_single_prefill_module)


def _launch_on_copies(error: RuntimeError, entry: Any, args: tuple[Any, ...]) -> None:
    """Retry a failed launch on copies of tensors with misaligned rows; raise the error if all rows are aligned."""
    q, k, v, scratch, out, *rest = args
    copies = [aligned(x) for x in (q, k, v, out)]
    if not is_launch_error(error) or all(copy is x for copy, x in zip(copies, (q, k, v, out), strict=True)):
        raise error
    *tensors, result = copies
    entry(*tensors, scratch, result, *rest)
    if result is not out:
        out.copy_(result)


@register_custom_op("flashinfer::single_decode", mutates_args=("out", "lse"))
def single_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    head_dim_qk: int,
    head_dim_vo: int,
    layout: int,
    pos_encoding: int,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    rope_scale: float,
    rope_theta: float,
) -> None:
    entry = _decode_entries[
        q.dtype, k.dtype, out.dtype, head_dim_qk, head_dim_vo, pos_encoding, window_left >= 0, logits_soft_cap > 0,
        q.is_cuda,
    ]  # fmt: skip
    slopes = alibi_slopes(q.shape[-2], q.device) if pos_encoding == ALIBI else None
    args = (
        q, k, v, None, out, lse, layout, window_left,
        slopes, logits_soft_cap, sm_scale, 1.0 / rope_scale, 1.0 / rope_theta,
    )  # fmt: skip
    try:
        entry(*args)
    except RuntimeError as error:
        _launch_on_copies(error, entry, args)


@register_custom_op("flashinfer::single_prefill", mutates_args=("out", "lse"))
def single_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    packed_custom_mask: Optional[torch.Tensor],
    k_sf: Optional[torch.Tensor],
    v_sf: Optional[torch.Tensor],
    head_dim_qk: int,
    head_dim_vo: int,
    mask_mode: int,
    layout: int,
    pos_encoding: int,
    use_fp16_qk_reduction: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    rope_scale: float,
    rope_theta: float,
    backend: str = "fa2",
    scale_q: Optional[torch.Tensor] = None,
    scale_k: Optional[torch.Tensor] = None,
    scale_v: Optional[torch.Tensor] = None,
) -> None:
    factors: tuple[Any, ...] = () if k_sf is None else (k_sf, v_sf)
    if q.dtype in FP8:
        factors = (scale_q, scale_k, scale_v)
    entry = _prefill_entries[
        backend, q.dtype, k.dtype, out.dtype, head_dim_qk, head_dim_vo, pos_encoding, window_left >= 0,
        logits_soft_cap > 0, use_fp16_qk_reduction, q.is_cuda,
    ]  # fmt: skip
    slopes = alibi_slopes(q.shape[-2], q.device) if pos_encoding == ALIBI else None
    args = (
        q, k, v, None, out, lse, mask_mode, layout, window_left,
        packed_custom_mask, None, slopes, None, None, None, *factors,
        logits_soft_cap, sm_scale, 1.0 / rope_scale, 1.0 / rope_theta, 0,
    )  # fmt: skip
    try:
        entry(*args)
    except RuntimeError as error:
        _launch_on_copies(error, entry, args)


def run_module(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    codes: Sequence[int],
    args: Sequence[Any],
) -> None:
    """Launch the module of a variant. ``args`` are the declared tensors and numbers, ``codes`` precede them."""
    if not (is_traced() or compiler._is_compiling_flag):
        _launch_module(module, q, k, v, out, lse, *codes, *args)
        return
    tensors = [x for x in args if x is None or isinstance(x, torch.Tensor)]
    numbers = args[len(tensors) :]
    integers = [isinstance(x, int) for x in numbers]
    _run_jit_module(id(module), q, k, v, out, lse, list(codes), tensors, [float(x) for x in numbers], integers)


@register_custom_op("flashinfer::run_jit_module", mutates_args=("out", "lse"))
def _run_jit_module(
    handle: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    codes: list[int],
    tensors: list[Optional[torch.Tensor]],
    numbers: list[float],
    integers: list[bool],
) -> None:
    if handle not in loaded_modules:
        raise ArgumentError(
            "run_jit_module: jit_module must be what build_and_load() returned, got one unknown to the graph"
        )
    scalars = [int(x) if is_integer else x for x, is_integer in zip(numbers, integers, strict=True)]
    _launch_module(loaded_modules[handle], q, k, v, out, lse, *codes, *tensors, *scalars)


def _launch_module(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    args = (q, k, v, scratch(q), *rest)
    try:
        module.run(*args)
    except RuntimeError as error:
        _launch_on_copies(error, module.run, args)
