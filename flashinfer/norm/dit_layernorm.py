# SPDX-License-Identifier: Apache-2.0
"""LayerNorm of diffusion transformers, fused with the gated residual before it and the modulation after it."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import backend_of
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.probes import probes
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.norm import (
    fused_dit_gate_residual_layernorm_gamma_beta_trace,
    fused_dit_gate_residual_layernorm_scale_shift_trace,
    fused_dit_residual_layernorm_scale_shift_trace,
)
from .modules import get_dit_layernorm_module

HIDDEN = 3072
MODULATION_STRIDE = 6 * HIDDEN  # gate, scale and shift are slices of one (batch, seq, 6, hidden) buffer


@register_custom_op("flashinfer::fused_dit_layernorm", mutates_args=("norm_out", "residual_out"))
def _dit_layernorm(
    norm_out: torch.Tensor,
    residual_out: torch.Tensor,
    input: torch.Tensor,
    residual: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
    gate_bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    scale_bias: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    shift_bias: Optional[torch.Tensor],
    gamma: Optional[torch.Tensor],
    beta: Optional[torch.Tensor],
    input_scale: Optional[torch.Tensor],
    eps: float,
) -> None:
    get_dit_layernorm_module(backend_of(input)).dit_layernorm(
        *(norm_out, residual_out, input, residual, gate, gate_bias, scale, scale_bias, shift, shift_bias, gamma, beta),
        *(input_scale, MODULATION_STRIDE, eps),
    )


def _run(
    op: str,
    input: torch.Tensor,
    *,
    epsilon: float,
    use_nvfp4: bool,
    use_mxfp8: bool,
    global_scaling_factor: Optional[torch.Tensor],
    input_global_scaling_factor: Optional[torch.Tensor],
    residual_out: Optional[torch.Tensor],
    norm_out: Optional[torch.Tensor],
    sf_out: Optional[torch.Tensor],
    residual: Optional[torch.Tensor] = None,
    modulation: Optional[dict] = None,
    bias: Optional[dict] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validate the arguments that the three forms share, and launch."""
    if use_nvfp4 and use_mxfp8:
        raise ArgumentError(f"{op}: Cannot use both: use_nvfp4 and use_mxfp8 must not be set together, got both")
    if input.ndim != 3 or input.shape[-1] != HIDDEN:
        raise ArgumentError(f"{op}: input must have shape (batch, seq, {HIDDEN}), got {tuple(input.shape)}")
    if use_nvfp4 and global_scaling_factor is None:
        raise ArgumentError(
            f"{op}: global_scaling_factor must be a float32 tensor (because use_nvfp4 is set), got None"
        )
    if use_nvfp4 or use_mxfp8:
        where = "the CPU" if not input.is_cuda else "SM{}{}".format(*probes.get_compute_capability(input.device))
        raise RuntimeError(f"{op}: quantised output needs an SM100 kernel, this is {where}")
    if sf_out is not None:
        raise ArgumentError(f"{op}: sf_out must be None (only quantised output has scale factors), got a value")
    for name, tensor in (modulation or {}).items():
        rows_in_line = (
            tensor.ndim != 3 or tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * MODULATION_STRIDE
        )
        if (
            tensor.ndim not in (2, 3)
            or tensor.stride(-1) != 1
            or tensor.stride(-2) != MODULATION_STRIDE
            or not rows_in_line
        ):
            raise ArgumentError(
                f"{op}: {name} must be 2-D or 3-D with row stride {MODULATION_STRIDE} (a slice of a (batch, "
                f"seq, 6, {HIDDEN}) buffer), got strides {tensor.stride()}"
            )
    if norm_out is None:
        norm_out = torch.empty_like(input)
    elif norm_out.dtype is not torch.bfloat16:
        raise ArgumentError(f"{op}: norm_out dtype must be torch.bfloat16, got {norm_out.dtype}")
    elif norm_out.shape != input.shape:
        raise ArgumentError(f"{op}: norm_out shape must be {tuple(input.shape)}, got {tuple(norm_out.shape)}")
    if residual_out is None:
        residual_out = torch.empty_like(input)
    elif residual_out.shape != input.shape:
        raise ArgumentError(f"{op}: residual_out shape must be {tuple(input.shape)}, got {tuple(residual_out.shape)}")
    m, b = modulation or {}, bias or {}
    _dit_layernorm(
        *(norm_out, residual_out, input, residual, m.get("gate"), b.get("gate"), m.get("scale"), b.get("scale")),
        *(m.get("shift"), b.get("shift"), b.get("gamma"), b.get("beta"), input_global_scaling_factor, epsilon),
    )
    return residual_out, norm_out


@flashinfer_api(trace=fused_dit_gate_residual_layernorm_gamma_beta_trace)
@explain_type_errors
def fused_dit_gate_residual_layernorm_gamma_beta(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: Optional[torch.Tensor] = None,
    input_global_scaling_factor: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    norm_out: Optional[torch.Tensor] = None,
    sf_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Gated residual, then LayerNorm with gain and offset.

    ``r = residual + input * (gate + gate_bias)``; ``norm_out = layernorm(r) * gamma + beta``, all in float32 from the
    unrounded ``r``.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``(batch, seq, 3072)`` bfloat16, contiguous.
    gate : torch.Tensor
        bfloat16 slice of a ``(batch, seq, 6, 3072)`` buffer: row stride ``6 * 3072``.
    gamma, beta : torch.Tensor
        ``(3072,)`` float32.
    gate_bias : Optional[torch.Tensor]
        ``(3072,)`` or ``(1, 3072)`` float32.
    epsilon : float
        Added to the variance ``max(0, E[r^2] - E[r]^2)``.
    use_nvfp4, use_mxfp8, global_scaling_factor, sf_out
        Quantised output, for SM100 and later.
    input_global_scaling_factor : Optional[torch.Tensor]
        One float32 element that multiplies the gated input.
    residual_out, norm_out : Optional[torch.Tensor]
        Buffers of the input's shape, written and returned when given.

    Returns
    -------
    Tuple[torch.Tensor, torch.Tensor]
        ``(residual_out, norm_out)``, bfloat16: ``r`` rounded, and its norm.

    Examples
    --------
    >>> x, residual = torch.randn(2, 1, 4, 3072).bfloat16()
    >>> gate = torch.randn(1, 4, 6, 3072).bfloat16()[:, :, 0]
    >>> gamma, beta = torch.ones(3072), torch.zeros(3072)
    >>> fuse = flashinfer.norm.fused_dit_gate_residual_layernorm_gamma_beta
    >>> new_residual, y = fuse(x, residual, gate, gamma, beta)
    """
    return _run(
        "fused_dit_gate_residual_layernorm_gamma_beta",
        input,
        residual=residual,
        modulation={"gate": gate},
        bias={"gate": gate_bias, "gamma": gamma, "beta": beta},
        epsilon=epsilon,
        use_nvfp4=use_nvfp4,
        use_mxfp8=use_mxfp8,
        global_scaling_factor=global_scaling_factor,
        input_global_scaling_factor=input_global_scaling_factor,
        residual_out=residual_out,
        norm_out=norm_out,
        sf_out=sf_out,
    )


@flashinfer_api(trace=fused_dit_gate_residual_layernorm_scale_shift_trace)
@explain_type_errors
def fused_dit_gate_residual_layernorm_scale_shift(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    scale_bias: Optional[torch.Tensor] = None,
    shift_bias: Optional[torch.Tensor] = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: Optional[torch.Tensor] = None,
    input_global_scaling_factor: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    norm_out: Optional[torch.Tensor] = None,
    sf_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Gated residual, then LayerNorm with per-token scale and shift.

    ``norm_out = layernorm(r) * (1 + scale + scale_bias) + (shift + shift_bias)``; ``scale`` and ``shift`` are strided
    like ``gate``. Everything else as in :func:`fused_dit_gate_residual_layernorm_gamma_beta`.

    Examples
    --------
    >>> x, residual = torch.randn(2, 1, 4, 3072).bfloat16()
    >>> gate, scale, shift = torch.randn(1, 4, 6, 3072).bfloat16().unbind(2)[:3]
    >>> fuse = flashinfer.norm.fused_dit_gate_residual_layernorm_scale_shift
    >>> new_residual, y = fuse(x, residual, gate, scale, shift)
    """
    return _run(
        "fused_dit_gate_residual_layernorm_scale_shift",
        input,
        residual=residual,
        modulation={"gate": gate, "scale": scale, "shift": shift},
        bias={"gate": gate_bias, "scale": scale_bias, "shift": shift_bias},
        epsilon=epsilon,
        use_nvfp4=use_nvfp4,
        use_mxfp8=use_mxfp8,
        global_scaling_factor=global_scaling_factor,
        input_global_scaling_factor=input_global_scaling_factor,
        residual_out=residual_out,
        norm_out=norm_out,
        sf_out=sf_out,
    )


@flashinfer_api(trace=fused_dit_residual_layernorm_scale_shift_trace)
@explain_type_errors
def fused_dit_residual_layernorm_scale_shift(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    residual: Optional[torch.Tensor] = None,
    scale_bias: Optional[torch.Tensor] = None,
    shift_bias: Optional[torch.Tensor] = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: Optional[torch.Tensor] = None,
    input_global_scaling_factor: Optional[torch.Tensor] = None,
    residual_out: Optional[torch.Tensor] = None,
    norm_out: Optional[torch.Tensor] = None,
    sf_out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Residual without a gate, ``r = residual + input`` (``input`` alone when None), then scale and shift as in
    :func:`fused_dit_gate_residual_layernorm_scale_shift`.

    Examples
    --------
    >>> x = torch.randn(1, 4, 3072).bfloat16()
    >>> scale, shift = torch.randn(1, 4, 6, 3072).bfloat16().unbind(2)[:2]
    >>> residual, y = flashinfer.norm.fused_dit_residual_layernorm_scale_shift(x, scale, shift)
    """
    return _run(
        "fused_dit_residual_layernorm_scale_shift",
        input,
        residual=residual,
        modulation={"scale": scale, "shift": shift},
        bias={"scale": scale_bias, "shift": shift_bias},
        epsilon=epsilon,
        use_nvfp4=use_nvfp4,
        use_mxfp8=use_mxfp8,
        global_scaling_factor=global_scaling_factor,
        input_global_scaling_factor=input_global_scaling_factor,
        residual_out=residual_out,
        norm_out=norm_out,
        sf_out=sf_out,
    )
