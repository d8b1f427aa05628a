# SPDX-License-Identifier: Apache-2.0
"""Norms with gains and gates of hybrid models: residual streams in float32, heads behind a sigmoid."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.norm import gen_gated_norm_module
from ..trace.templates.norm_gated import (
    gated_residual_next_rmsnorm_trace,
    gated_residual_rmsnorm_trace,
    rmsnorm_sigmoid_gate_trace,
)

__all__ = [
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "rmsnorm_sigmoid_gate",
    "supports_gated_residual_next_rmsnorm",
    "supports_gated_residual_rmsnorm",
    "supports_rmsnorm_sigmoid_gate",
]

get_gated_norm_module = module_cache(gen_gated_norm_module)
_native_residual = NativeFunction(get_gated_norm_module, "gated_residual_norm")
_native_sigmoid = NativeFunction(get_gated_norm_module, "sigmoid_gate_norm")

_HEAD_DIM, _MOST_COLUMNS, _OLDEST = 64, 16384, 8  # size of a head, of a row; major compute capability


@register_custom_op("flashinfer::gated_residual_rmsnorm", mutates_args=("out",))
def _residual(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor],
    alpha: torch.Tensor,
    beta: torch.Tensor,
    eps: float,
    gain_center: float,
    out: torch.Tensor,
    enable_pdl: bool,
) -> None:
    _native_residual[branch.is_cuda](
        branch, residual, weight, alpha, beta, out, None, None, None, 0.0, eps, gain_center, 0.0, 0.0,
        use_pdl(branch, enable_pdl),
    )  # fmt: skip


@register_custom_op(
    "flashinfer::gated_residual_next_rmsnorm", mutates_args=("residual_out", "ffn_input", "router_input")
)
def _residual_next(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: Optional[torch.Tensor],
    alpha_scalar: float,
    beta: torch.Tensor,
    post_eps: float,
    next_eps: float,
    next_gain_center: float,
    residual_out: torch.Tensor,
    ffn_input: torch.Tensor,
    post_weight: Optional[torch.Tensor],
    post_gain_center: float,
    router_input: Optional[torch.Tensor],
    enable_pdl: bool,
) -> None:
    _native_residual[branch.is_cuda](
        branch, residual, post_weight, alpha, beta, residual_out, next_weight, ffn_input, router_input, alpha_scalar,
        post_eps, post_gain_center, next_eps, next_gain_center, use_pdl(branch, enable_pdl),
    )  # fmt: skip


@register_custom_op("flashinfer::rmsnorm_sigmoid_gate", mutates_args=("input",))
def _sigmoid_gate(input: torch.Tensor, gate: torch.Tensor, eps: float, enable_pdl: bool) -> None:
    _native_sigmoid[input.is_cuda](input, gate, eps, use_pdl(input, enable_pdl))


# Needs of a call. The probes never raise, whatever they are given.


def _is_vector(x: Any, like: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        isinstance(x, torch.Tensor) and x.device == like.device and x.dtype is dtype and x.ndim == 1
        and x.shape[0] == like.shape[1] and x.is_contiguous() and x.data_ptr() % 16 == 0
    )  # fmt: skip


def _are_rows(x: Any, like: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        isinstance(x, torch.Tensor) and x.device == like.device and x.dtype is dtype and x.shape == like.shape
        and x.ndim == 2 and x.stride(1) == 1 and x.data_ptr() % 16 == 0
        and (x.shape[0] <= 1 or x.stride(0) * x.itemsize % 16 == 0)
    )  # fmt: skip


def _runs_on(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _OLDEST


def _serves(branch: Any, residual: Any, weight: Any, alpha: Any, beta: Any) -> bool:
    return (
        isinstance(branch, torch.Tensor) and branch.ndim == 2 and branch.shape[1] % 8 == 0
        and branch.shape[1] <= _MOST_COLUMNS and _runs_on(branch.device) and _are_rows(branch, branch, torch.bfloat16)
        and _are_rows(residual, branch, torch.float32) and _is_vector(beta, branch, torch.float32)
        and (isinstance(alpha, (int, float)) or _is_vector(alpha, branch, torch.float32))
        and (weight is None or _is_vector(weight, branch, torch.bfloat16))
    )  # fmt: skip


def supports_gated_residual_rmsnorm(branch: Any, residual: Any, weight: Any, alpha: Any, beta: Any) -> bool:
    """Return True if :func:`gated_residual_rmsnorm` takes these tensors. Never raises."""
    try:
        return not isinstance(alpha, (int, float)) and _serves(branch, residual, weight, alpha, beta)
    except Exception:
        return False


def supports_gated_residual_next_rmsnorm(
    branch: Any, residual: Any, next_weight: Any, alpha: Any, beta: Any, *, post_weight: Any = None
) -> bool:
    """Return True if :func:`gated_residual_next_rmsnorm` takes these tensors. Never raises."""
    try:
        return _serves(branch, residual, post_weight, alpha, beta) and _is_vector(next_weight, branch, torch.bfloat16)
    except Exception:
        return False


def supports_rmsnorm_sigmoid_gate(dtype: Any, head_dim: Any, device: Any = None) -> bool:
    """Return True if :func:`rmsnorm_sigmoid_gate` takes heads of this kind on the device. Never raises."""
    try:
        if dtype is not torch.bfloat16 or head_dim != _HEAD_DIM:
            return False
        if device is None:
            return _runs_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return _runs_on(torch.device(device))
    except Exception:
        return False


def _refuse(name: str, error: Exception) -> None:
    """Raise the published error, which names the function, for tensors that it does not take."""
    raise ArgumentError(f"{name}: tensors do not satisfy the {name} contract ({error})") from error


# The public functions.


@flashinfer_api(trace=gated_residual_rmsnorm_trace)
def gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor],
    alpha: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
    out: Optional[torch.Tensor] = None,
    *,
    enable_pdl: bool = True,
) -> torch.Tensor:
    r"""``alpha * residual + beta * rms(branch * (weight + gain_center))`` with ``rms(x) = x / sqrt(mean(x^2) + eps)``.

    Parameters
    ----------
    branch : torch.Tensor
        ``(rows, hidden)`` bfloat16, hidden a multiple of 8 up to 16384.
    residual : torch.Tensor
        ``(rows, hidden)`` float32.
    weight : Optional[torch.Tensor]
        ``(hidden,)`` bfloat16, the gain before the norm; None: no gain.
    alpha, beta : torch.Tensor
        ``(hidden,)`` float32.
    out : Optional[torch.Tensor]
        Float32, may be ``residual``.
    enable_pdl : bool
        Programmatic dependent launch: a hint without effect on the result.

    Examples
    --------
    >>> branch, residual, one = torch.randn(2, 64).bfloat16(), torch.randn(2, 64), torch.ones(64)
    >>> y = flashinfer.gated_residual_rmsnorm(branch, residual, None, one, one)
    """
    if out is None:
        out = torch.empty_like(residual)
    elif out.shape != branch.shape or out.dtype is not torch.float32:
        raise ArgumentError(f"gated_residual_rmsnorm: out must be float32 of the shape of branch, got {out.dtype}")
    try:
        _residual(branch, residual, weight, alpha, beta, eps, gain_center, out, enable_pdl)
    except (ArgumentError, TypeError) as error:
        _refuse("gated_residual_rmsnorm", error)
    return out


@flashinfer_api(trace=gated_residual_next_rmsnorm_trace)
def gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: Union[torch.Tensor, float],
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    residual_out: Optional[torch.Tensor] = None,
    ffn_input: Optional[torch.Tensor] = None,
    *,
    post_weight: Optional[torch.Tensor] = None,
    post_gain_center: float = 0.0,
    enable_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r""":func:`gated_residual_rmsnorm`, then the norm before the next block, from the unrounded sum.

    ``residual_out`` is as there with the gain ``post_weight``; ``ffn_input`` is
    ``rms(residual_out, next_eps) * (next_weight + next_gain_center)`` in bfloat16. ``alpha`` may be a number.

    Examples
    --------
    >>> branch, residual, one = torch.randn(2, 64).bfloat16(), torch.randn(2, 64), torch.ones(64)
    >>> stream, y = flashinfer.gated_residual_next_rmsnorm(branch, residual, one.bfloat16(), 0.5, one)
    """
    return run_next(
        branch, residual, alpha, beta, next_weight, post_eps, next_eps, next_gain_center, residual_out, ffn_input,
        post_weight, post_gain_center, None, enable_pdl, None,
    )  # fmt: skip


def run_next(
    branch: torch.Tensor,
    residual: torch.Tensor,
    alpha: Union[torch.Tensor, float],
    beta: torch.Tensor,
    next_weight: torch.Tensor,
    post_eps: float,
    next_eps: float,
    next_gain_center: float,
    residual_out: Optional[torch.Tensor],
    ffn_input: Optional[torch.Tensor],
    post_weight: Optional[torch.Tensor] = None,
    post_gain_center: float = 0.0,
    alpha_scalar: Optional[float] = None,
    enable_pdl: bool = False,
    router_input: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Serve the published ``norm.kernels.gated_residual_next_rmsnorm.run``; ``router_input`` is the norm in float32."""
    op = "gated_residual_next_rmsnorm"
    outputs = (("residual_out", residual_out, torch.float32), ("ffn_input", ffn_input, torch.bfloat16))
    for name, x, dtype in outputs:
        if x is not None and (x.shape != branch.shape or x.dtype is not dtype):
            raise ArgumentError(f"{op}: {name} must be {dtype} of the shape of branch, got {x.dtype} {tuple(x.shape)}")
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    ffn_input = torch.empty_like(branch) if ffn_input is None else ffn_input
    vector = alpha if isinstance(alpha, torch.Tensor) and alpha_scalar is None else None
    number = alpha_scalar if alpha_scalar is not None else 0.0 if isinstance(alpha, torch.Tensor) else float(alpha)
    try:
        _residual_next(
            branch, residual, next_weight, vector, number, beta, post_eps, next_eps, next_gain_center, residual_out,
            ffn_input, post_weight, post_gain_center, router_input, enable_pdl,
        )  # fmt: skip
    except (ArgumentError, TypeError) as error:
        _refuse(op, error)
    return residual_out, ffn_input


@flashinfer_api(trace=rmsnorm_sigmoid_gate_trace)
def rmsnorm_sigmoid_gate(
    input: torch.Tensor, gate: torch.Tensor, eps: float = 1e-5, *, enable_pdl: bool = True
) -> None:
    r"""``input <- rms(input) * sigmoid(gate)`` of each head of 64 channels, in place.

    Parameters
    ----------
    input, gate : torch.Tensor
        ``(rows, 64)`` or ``(rows, heads, 64)`` bfloat16; heads are packed, rows begin at multiples of 16 bytes.
    eps : float
        Added to the mean square.
    enable_pdl : bool
        Programmatic dependent launch: a hint without effect on the result.

    Examples
    --------
    >>> x, gate = torch.randn(2, 4, 64).bfloat16(), torch.zeros(2, 4, 64).bfloat16()
    >>> flashinfer.rmsnorm_sigmoid_gate(x, gate)  # the norm times one half
    """
    try:
        _sigmoid_gate(input, gate, eps, enable_pdl)
    except (ArgumentError, TypeError) as error:
        _refuse("rmsnorm_sigmoid_gate", error)
