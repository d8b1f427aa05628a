# SPDX-License-Identifier: Apache-2.0
"""A whole layer of experts for few tokens: from router logits to the output, with e4m3 weights in 128 x 128 blocks.

The published kernel of this name is one launch for one shape. Here one token is one launch on SM90; other calls are
composed of :func:`route_tokens` and :func:`cutlass_fused_moe`.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.arch import capability_of
from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.not_copied import NotCopied
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.fused_moe.cutlass import get_fused_moe_module
from ..tllm_enums import RoutingMethodType
from ..trace.templates.monomoe import mono_moe_trace
from .cutlass.api import cutlass_fused_moe
from .cutlass.faults import refuse_output
from .cutlass.workspace import cutlass_fused_moe_workspace_size
from .routing import route_tokens

__all__ = ["alloc_scratchpad", "get_scratchpad_size_bytes", "has_monomoe", "interleave_for_tma_wgmma_up", "mono_moe"]

# Methods by (is_sigmoid, renormalize).
_METHODS = {
    (False, True): RoutingMethodType.RenormalizeNaive,
    (False, False): RoutingMethodType.Default,
    (True, True): RoutingMethodType.SigmoidRenorm,
    (True, False): RoutingMethodType.Sigmoid,
}
_SLAB = 128  # rows that the interleaved order permutes
_MOST_SLOTS = 32  # MOE_ROUTE_MAX_TOP_K of moe/route.h

_native_mono_moe = NativeFunction(get_fused_moe_module, "mono_moe")  # CUDA only


@functools.cache
def has_monomoe() -> bool:
    """Tell whether :func:`mono_moe` exists: it does, on the CPU and on SM90."""
    return True


@functools.cache
def get_scratchpad_size_bytes() -> int:
    """Return the bytes of a scratchpad for 8 tokens of the published shape: 256 experts, 8 of them, 2048 x 512."""
    return cutlass_fused_moe_workspace_size(
        *(8, 2048, 512, 256, 8),
        x_dtype=torch.bfloat16,
        weight_dtype=torch.float8_e4m3fn,
        use_deepseek_fp8_block_scale=True,
    )


def alloc_scratchpad(device: Union[torch.device, str]) -> torch.Tensor:
    """Allocate a scratchpad of :func:`get_scratchpad_size_bytes` zeros; calls on one stream may share it."""
    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


def _interleaved_rows(rows: int) -> torch.Tensor:
    """Return the row of [gate ; up] at each place of the interleaved order."""
    gate = torch.arange(rows // 2).view(-1, 8)  # 8 rows of a warp's half
    return torch.stack((gate, gate + rows // 2), dim=1).flatten()


def _check_rows(op: str, w: torch.Tensor) -> None:
    if w.dim() != 3 or w.shape[1] % _SLAB:
        raise ArgumentError(
            f"{op}: weights must be (num_experts, 2 * intermediate_size, hidden_size) with rows in slabs of {_SLAB}, "
            f"got {tuple(w.shape)}"
        )


def _writes(x: torch.Tensor) -> Optional[int]:
    """Return how often a tensor was written; None where nobody counts: in graphs, and for inference tensors."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def _is_counted(writes: tuple[Optional[int], ...]) -> bool:
    """Tell whether a copy may be kept: not of an inference tensor, as nobody would know that it is old."""
    return None not in writes or torch.compiler.is_compiling()


class _Kept(NotCopied):
    """Weights and scales with swapped halves, the scales they were made of, and how often both had been written."""

    def __init__(self, made: tuple[torch.Tensor, torch.Tensor], scales: torch.Tensor, writes: tuple[Any, ...]) -> None:
        self.made, self.scales, self.writes = made, scales, writes


def _was_written(now: tuple[Optional[int], ...], then: tuple[Optional[int], ...]) -> bool:
    return any(count is not None and count != before for count, before in zip(now, then, strict=True))


def interleave_for_tma_wgmma_up(w_fp8: torch.Tensor) -> torch.Tensor:
    """Copy [gate ; up] weights with their rows interleaved: 8 of gate, then the 8 of up that match, and so on.

    Parameters
    ----------
    w_fp8 : torch.Tensor
        ``(num_experts, 2 * intermediate_size, hidden_size)``, elements of one byte. The copy is kept on the tensor as
        ``_tma_interleaved_up`` and returned again by later calls, until the tensor is written; a file of the tensor
        has it too. Writes through ``.data`` and ``numpy()`` are not seen. No copy is kept of an inference tensor, whose
        writes nobody counts.
    """
    _check_rows("interleave_for_tma_wgmma_up", w_fp8)
    tensor: Any = w_fp8
    writes = (_writes(w_fp8),)
    is_old = _was_written(writes, getattr(tensor, "_tma_interleaved_up_writes", writes))
    made: Optional[torch.Tensor] = getattr(tensor, "_tma_interleaved_up", None)
    if made is None or is_old or not _is_counted(writes):
        rows = _interleaved_rows(w_fp8.shape[1]).to(w_fp8.device)
        made = w_fp8.view(torch.uint8).index_select(1, rows).view(w_fp8.dtype)
        if _is_counted(writes):
            tensor._tma_interleaved_up, tensor._tma_interleaved_up_writes = made, writes
    return made


def _up_gate(weights: torch.Tensor, scales: torch.Tensor, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and scales with rows [up ; gate], which ``cutlass_fused_moe`` takes; kept on the tensors."""
    name = "_up_gate_of_interleaved" if is_interleaved else "_up_gate"
    kept: Optional[_Kept] = getattr(weights, name, None)
    writes = (_writes(weights), _writes(scales))  # weights of a model in training are written where they are
    is_counted = _is_counted(writes)
    if not kept or kept.scales is not scales or not is_counted or _was_written(writes, kept.writes):
        rows, half = torch.arange(weights.shape[1]), weights.shape[1] // 2
        if is_interleaved:
            rows = torch.argsort(_interleaved_rows(weights.shape[1]))
        order = torch.cat((rows[half:], rows[:half])).to(weights.device)
        swapped = weights.view(torch.uint8).index_select(1, order).view(weights.dtype)
        blocks = scales.shape[1] // 2
        made = (swapped, torch.cat((scales[:, blocks:], scales[:, :blocks]), dim=1))
        kept = _Kept(made, scales, writes)
        if is_counted:
            setattr(weights, name, kept)
    return kept.made


@register_custom_op("flashinfer::mono_moe", mutates_args=("out", "scratchpad"))
@called("mono_moe")
def _mono_moe(
    out: torch.Tensor,
    x: torch.Tensor,
    logits: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_scales: torch.Tensor,
    down_scales: torch.Tensor,
    scratchpad: Optional[torch.Tensor],
    top_k: int,
    is_sigmoid: bool,
    renormalize: bool,
) -> None:
    """Compute a layer with rows [up ; gate], one token in one kernel where the native function takes it."""
    if not x.is_contiguous():
        x = x.contiguous()
    if (
        x.shape[0] == 1
        and capability_of[x.get_device()] == 90
        and _native_mono_moe[True](
            *(out, x, logits, up, down, up_scales, down_scales, scratchpad, top_k, is_sigmoid, renormalize)
        )
    ):
        return
    weights, experts = route_tokens(logits, top_k, _METHODS[is_sigmoid, renormalize])
    if scratchpad is not None and not _has_room(scratchpad, x, down, top_k):
        scratchpad = None
    cutlass_fused_moe(
        x,
        experts,
        weights,
        up,
        down,
        torch.bfloat16,
        [up_scales, down_scales],
        output=out,
        use_deepseek_fp8_block_scale=True,
        workspace_buffer=scratchpad,
    )


def _has_room(scratchpad: torch.Tensor, x: torch.Tensor, down: torch.Tensor, top_k: int) -> bool:
    """Tell whether a scratchpad is large enough for all stages of ``cutlass_fused_moe``."""
    if x.shape[0] == 0:
        return False
    return scratchpad.numel() >= cutlass_fused_moe_workspace_size(
        *(*x.shape, down.shape[2], down.shape[0], top_k),
        x_dtype=torch.bfloat16,
        weight_dtype=down.dtype,
        use_deepseek_fp8_block_scale=True,
        device=x.device,
    )


def _check(
    x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, up_scale: torch.Tensor, down: torch.Tensor, top_k: int
) -> None:
    op = "mono_moe"
    for name, tensor, dtype, rank in (
        ("activations_in", x, torch.bfloat16, 2),
        ("router_logits", logits, torch.bfloat16, 2),
        ("expert_weights_up", up, torch.float8_e4m3fn, 3),
        ("expert_scales_up", up_scale, torch.float32, 3),
        ("expert_weights_down", down, torch.float8_e4m3fn, 3),
    ):
        if tensor.dtype != dtype or tensor.dim() != rank:
            raise ArgumentError(
                f"{op}: {name} must be {dtype} with {rank} dimensions, got {tensor.dtype} with {tensor.dim()}"
            )
    experts, rows, hidden = up.shape
    if rows % (2 * _SLAB):
        raise ArgumentError(f"{op}: expert_weights_up must have rows in multiples of {2 * _SLAB}, got {rows}")
    if logits.shape != (x.shape[0], experts) or x.shape[1] != hidden or down.shape != (experts, hidden, rows // 2):
        raise ArgumentError(
            f"{op}: shapes must be (M, H), (M, E), (E, 2 I, H) and (E, H, I) for activations_in, router_logits, "
            f"expert_weights_up and expert_weights_down, got {tuple(x.shape)}, {tuple(logits.shape)}, "
            f"{tuple(up.shape)} and {tuple(down.shape)}"
        )
    if not 1 <= top_k <= min(experts, _MOST_SLOTS):
        raise ArgumentError(f"{op}: top_k must be from 1 to {min(experts, _MOST_SLOTS)}, got {top_k}")
    blocks = (experts, rows // _SLAB, -(-hidden // _SLAB))
    if up_scale.shape != blocks:
        raise ArgumentError(f"{op}: expert_scales_up must be {blocks}, got {tuple(up_scale.shape)}")


@flashinfer_api(trace=mono_moe_trace)
def mono_moe(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: Optional[torch.Tensor] = None,
    scratchpad: Optional[torch.Tensor] = None,
    interleave_up: bool = True,
) -> torch.Tensor:
    r"""Route few tokens and compute their experts: ``sum over the top_k experts of w * down(silu(gate x) * up x)``.

    The first call on a weight copies it with its halves swapped and keeps the copy on the tensor: the layer takes
    [up ; gate]. A weight, or scales, that were written since are copied again. Writes through ``.data`` and
    ``numpy()``, and those after the capture of a graph, are not seen: load new weights with ``parameter.copy_(loaded)``
    under ``torch.no_grad()``, not with ``parameter.data.copy_(loaded)``. Weights and scales that were made in inference
    mode count no writes, so that each call copies them: make them outside of it. On CUDA the call needs SM90, where one
    token is one kernel. Other calls are :func:`route_tokens` and :func:`cutlass_fused_moe`, with the same result.

    Parameters
    ----------
    activations_in : torch.Tensor
        ``(M, H)`` bfloat16; quantised to e4m3 by 1 x 128.
    router_logits : torch.Tensor
        ``(M, E)`` bfloat16.
    expert_weights_up : torch.Tensor
        ``(E, 2 * I, H)`` float8_e4m3fn, rows [gate ; up]; I in multiples of 128.
    expert_scales_up : torch.Tensor
        ``(E, 2 * I / 128, H / 128)`` float32.
    expert_weights_down, expert_scales_down : torch.Tensor
        ``(E, H, I)`` float8_e4m3fn and ``(E, H / 128, I / 128)`` float32.
    top_k : int
        Experts of a token. Among equal logits the smaller number is chosen.
    scoring_func : str
        ``"softmax"`` or ``"sigmoid"`` of the logits.
    renormalize : bool
        Whether the weights of a token's experts add up to one.
    out : Optional[torch.Tensor]
        ``(M, H)`` bfloat16; written and returned when given.
    scratchpad : Optional[torch.Tensor]
        Memory between the stages, of :func:`alloc_scratchpad`; one that is too small for the call is not used.
    interleave_up : bool
        Whether ``expert_weights_up`` has the order above; False: it has that of :func:`interleave_for_tma_wgmma_up`.

    Returns
    -------
    torch.Tensor
        ``(M, H)`` bfloat16. The weight of an expert multiplies its output, in float32.

    Examples
    --------
    >>> x, logits = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[3.0, 1.0, 2.0, 0.0]] * 2).bfloat16()
    >>> up = torch.full((4, 256, 128), 0.125).to(torch.float8_e4m3fn)  # four experts, rows [gate ; up]
    >>> down = torch.ones(4, 128, 128).to(torch.float8_e4m3fn)
    >>> scales = torch.full((4, 2, 1), 0.125), torch.full((4, 1, 1), 0.125)
    >>> flashinfer.fused_moe.mono_moe(x, logits, up, scales[0], down, scales[1], top_k=2).shape
    torch.Size([2, 128])
    """
    if scoring_func not in ("softmax", "sigmoid"):
        raise ArgumentError(f"mono_moe: scoring_func must be 'softmax' or 'sigmoid', got {scoring_func!r}")
    _check(activations_in, router_logits, expert_weights_up, expert_scales_up, expert_weights_down, top_k)
    if scratchpad is not None and (scratchpad.dtype != torch.uint8 or scratchpad.dim() != 1):
        raise ArgumentError(
            f"mono_moe: scratchpad must be torch.uint8 with 1 dimension, got {scratchpad.dtype} with {scratchpad.dim()}"
        )
    tokens, hidden = activations_in.shape
    if out is None:
        out = new_empty(activations_in, torch.bfloat16, tokens, hidden)
    elif out.shape != activations_in.shape or out.dtype is not torch.bfloat16 or out.device != activations_in.device:
        refuse_output(out, (tokens, hidden), torch.bfloat16, activations_in.device)
    up, up_scales = _up_gate(expert_weights_up, expert_scales_up, not interleave_up)
    _mono_moe(
        out,
        activations_in,
        router_logits,
        up,
        expert_weights_down,
        up_scales,
        expert_scales_down,
        scratchpad,
        top_k,
        scoring_func == "sigmoid",
        bool(renormalize),
    )
    return out
