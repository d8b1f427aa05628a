# SPDX-License-Identifier: Apache-2.0
"""Decisions of the rule of gemm/sm90/choose.h for a product, in words; ``FLASHINFER_LOGLEVEL=3`` prints it:

gemm_sm90 m=16 n=4096 k=14336 -> swap_ab 16x64, split_k 2, raster 8 (few rows, and few tiles: blocks split K)
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Mapping, NamedTuple, Optional

import torch

from .._runtime.knobs import knobs

__all__ = ["Decision", "decision", "speaking", "speaking_layer"]

_log = logging.getLogger("flashinfer.api")
_LEVEL = 3
_QUANTIZED_ROWS = 8
_FEW_TOKENS = 8  # MONO_TOKENS of include/flashinfer/moe/mono/shape.h
_BATCHED, _MASKED, _PACKED = 0, 2, 3  # ``Grouping`` of include/flashinfer/gemm.h


class Decision(NamedTuple):
    """A tile, what the blocks of a cluster do, and why: what ``gemm_sm90_choose`` of a module returns."""

    tile: int  #: index among ``tiles_of`` the kind
    swap_ab: bool  #: weights on the M side of the tensor cores
    block_m: int  #: tokens
    block_n: int  #: weights
    cluster: int
    split_k: bool
    share_b: bool
    raster: int
    reason: str

    def __str__(self) -> str:
        form = "swap_ab" if self.swap_ab else "tile"
        cluster = f", {'split_k' if self.split_k else 'cluster'} {self.cluster}" if self.cluster > 1 else ""
        return f"{form} {self.block_m}x{self.block_n}{cluster}, raster {self.raster} ({self.reason})"


def decision(
    module: Any,
    rows: int,
    n: int,
    k: int,
    batch: int = 1,
    grouping: int = _BATCHED,
    *,
    by_row: bool,
    sms: int,
    is_gated: bool = False,
) -> Decision:
    """Return the choice of a module's rule. ``by_row``: every row of weights has block scales; ``is_gated``: SwiGLU."""
    chosen: Mapping[str, Any] = module.gemm_sm90_choose(rows, n, k, batch, grouping, by_row, is_gated, sms)
    return Decision(**{name: chosen[name] for name in Decision._fields})


def speaking(module: Any, name: str) -> Callable[..., Any]:
    """Return a function of a module, which names its decisions in the log if the log shows arguments."""
    function: Callable[..., Any] = getattr(module, name)
    describe = _DESCRIBED.get(name)
    if knobs.log_level < _LEVEL or describe is None:
        return function

    return _described(function, functools.partial(describe, module))


def speaking_layer(
    module: Any, launch: Callable[..., Any], ranks: int, has_blocks: bool, is_swiglu: bool
) -> Callable[..., Any]:
    """Return a launch of a layer of experts, which names the tiles of both GEMMs in the log if it shows arguments.

    ``launch(input, ids, token_scales, fc1, fc2, ...)`` is one of ``flashinfer/fused_moe/cutlass/call.py``; weights have
    scales of blocks or none.
    """
    if knobs.log_level < _LEVEL:
        return launch
    return _described(launch, functools.partial(_layer, module, ranks, has_blocks, is_swiglu))


def _described(function: Callable[..., Any], describe: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def launch(*arguments: Any) -> Any:
        result = function(*arguments)
        if result:  # else the module does not take the operands
            try:
                _log.info(describe(*arguments))
            except Exception as error:  # the log must not reach the caller
                _log.warning("naming the tile failed: %s: %s", type(error).__name__, error)
        return result

    return launch


def _layer(
    module: Any,
    ranks: int,
    has_blocks: bool,
    is_swiglu: bool,
    input: torch.Tensor,
    ids: torch.Tensor,
    token_scales: Any,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    *_: Any,
) -> str:
    (tokens, top_k), (experts, rows1, hidden), inner = ids.shape, fc1.shape, fc2.shape[2]
    sms = torch.cuda.get_device_properties(input.device).multi_processor_count
    pairs = (tokens * top_k + ranks - 1) // ranks  # as expected_pairs() in include/flashinfer/moe/workspace.h
    choose = functools.partial(decision, module, pairs, batch=experts, grouping=_PACKED, by_row=False, sms=sms)
    is_gated = is_swiglu and (not has_blocks or inner % 128 == 0)  # ActivatesInProduct, ActivatesBlocks in csrc
    chosen = f"GEMM 1 {choose(n=rows1, k=hidden, is_gated=is_gated)}; GEMM 2 {choose(n=hidden, k=inner)}"
    few = ", unless one kernel takes so few tokens" if tokens <= _FEW_TOKENS else ", unless tiles were measured"
    return f"cutlass_fused_moe tokens={tokens} top_k={top_k} -> {chosen}{few}"


def _line(module: Any, a: torch.Tensor, n: int, batch: int, grouping: int, rows: int, by_row: bool) -> str:
    k, sms = a.shape[-1], torch.cuda.get_device_properties(a.device).multi_processor_count
    chosen = decision(module, rows, n, k, batch, grouping, by_row=by_row, sms=sms)
    groups = f" batch={batch} grouping={grouping}" if batch > 1 else ""
    return f"gemm_sm90 m={rows} n={n} k={k}{groups} -> {chosen}"


def _product(
    module: Any,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    groups: Any,
    weight_indices: Optional[torch.Tensor],
    grouping: int,
    scale_rows: int,
    expected_m: int,
    tile: int,
    *_: Any,
) -> str:
    if tile >= 0:
        return f"gemm_sm90 m={a.shape[-2]} n={b.shape[-2]} k={a.shape[-1]} -> tile {tile}, as measured"
    batch = b.shape[0] if b.dim() == 3 else 1
    batch = batch if weight_indices is None else weight_indices.shape[0]
    rows = max(expected_m, 1) if grouping == _MASKED else a.shape[-2]
    return _line(module, a, b.shape[-2], batch, grouping, rows, by_row=b_scale is not None and scale_rows == 1)


def _ordinary(
    module: Any,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    groups: Optional[torch.Tensor],
    grouping: int,
    expected_m: int,
) -> str:
    if groups is None:
        return _line(module, a, b.shape[-1], b.shape[0] if b.dim() == 3 else 1, _BATCHED, a.shape[-2], by_row=False)
    rows = max(expected_m, 1) if grouping == _MASKED else a.shape[-2]
    return _line(module, a, b.shape[-2], b.shape[0], grouping, rows, by_row=False)


def _blockscale(
    module: Any, out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, scale: Any, w_scale: Any, *_: Any
) -> str:
    n, rows = weight.shape[0], input.shape[0]
    # Where it is faster, up to 8 rows are quantised by the product (MultiplyUnquantized in csrc/gemm_sm90.cu).
    other = ", or the kernel that quantises" if scale is None and rows <= _QUANTIZED_ROWS else ""
    return _line(module, input, n, 1, _BATCHED, rows, by_row=w_scale.shape[0] == n) + other


#: Exports whose tile the rule chooses, and how their arguments are read.
_DESCRIBED: dict[str, Callable[..., str]] = {
    "gemm_sm90": _product,
    "gemm_sm90_ordinary": _ordinary,
    "gemm_sm90_blockscale": _blockscale,
}
