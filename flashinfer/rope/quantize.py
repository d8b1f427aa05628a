# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding with fp8 output: queries and keys in a rotated and an unrotated part."""

from __future__ import annotations

import importlib.util
from typing import Optional

import torch

from .._runtime.dispatch import backend_of, use_pdl
from .._runtime.errors import ArgumentError, LibraryError
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.rope_quantize import mla_rope_quantize_fp8_trace, rope_quantize_fp8_trace
from .modules import get_rope_module

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@register_custom_op("flashinfer::rope_quantize", mutates_args=("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"))
def _rope_quantize(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    q_rope_out: torch.Tensor,
    k_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    k_nope_out: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    quant_scale_q: float,
    quant_scale_kv: float,
    interleave: bool,
    enable_pdl: Optional[bool],
) -> None:
    get_rope_module(backend_of(q_rope)).rope_quantize(
        q_rope, k_rope, q_nope, k_nope, q_rope_out, k_rope_out, q_nope_out, k_nope_out,
        cos_sin_cache, pos_ids, quant_scale_q, quant_scale_kv, interleave, use_pdl(q_rope, enable_pdl),
    )  # fmt: skip


def target_dtype(quantize_dtype: Optional[torch.dtype], *outputs: Optional[torch.Tensor]) -> torch.dtype:
    """Return the dtype the caller asked for, else the dtype of the first output that was supplied, else e4m3."""
    if quantize_dtype is not None:
        return quantize_dtype
    return next((out.dtype for out in outputs if out is not None), torch.float8_e4m3fn)


def output(
    op: str,
    name: str,
    out: Optional[torch.Tensor],
    part: Optional[torch.Tensor],
    rope: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Allocate or validate the output buffer of one part; a missing part gets a buffer of width 0."""
    if out is None:
        # empty_like takes 0.8 us, empty with a shape and a device three times as long.
        return torch.empty_like(rope[..., :0] if part is None else part, dtype=dtype)
    if out.dtype != dtype:
        raise ArgumentError(f"{op}: {name} must have dtype {dtype} (the target of the quantisation), got {out.dtype}")
    return out


def _check_backend(backend: str, k_rope: torch.Tensor, is_neox: bool) -> None:
    """Validate ``backend``: "cutile" needs its package installed, but runs the same kernel as "cuda"."""
    op = "rope_quantize_fp8"
    if backend not in ("cuda", "cutile"):
        raise ArgumentError(f"{op}: backend must be 'cuda' or 'cutile', got {backend!r}")
    if is_neox or k_rope.ndim == 3:
        got = "is_neox=True" if is_neox else "a 3-D k_rope"
        raise NotImplementedError(
            f"{op}: is_neox must be False and k_rope 2-D with backend 'cutile', got {got}: use backend='cuda'"
        )
    try:
        found = importlib.util.find_spec("cuda.tile")
    except ModuleNotFoundError:  # no package ``cuda`` at all
        found = None
    if found is None:
        raise LibraryError(
            f"{op}: backend 'cutile' needs the package cuda.tile, which is not installed: use backend='cuda'"
        )


def _quantize(
    op: str,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool,
    quantize_dtype: Optional[torch.dtype],
    quant_scale_q: float,
    quant_scale_kv: float,
    q_rope_out: Optional[torch.Tensor],
    k_rope_out: Optional[torch.Tensor],
    q_nope_out: Optional[torch.Tensor],
    k_nope_out: Optional[torch.Tensor],
    enable_pdl: Optional[bool],
) -> Quantized:
    dtype = target_dtype(quantize_dtype, q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    q_rope_out = output(op, "q_rope_out", q_rope_out, q_rope, q_rope, dtype)
    k_rope_out = output(op, "k_rope_out", k_rope_out, k_rope, k_rope, dtype)
    q_nope_out = output(op, "q_nope_out", q_nope_out, q_nope, q_rope, dtype)
    k_nope_out = output(op, "k_nope_out", k_nope_out, k_nope, k_rope, dtype)
    _rope_quantize(
        q_rope, k_rope, q_nope, k_nope, q_rope_out, k_rope_out, q_nope_out, k_nope_out,
        cos_sin_cache, pos_ids, quant_scale_q, quant_scale_kv, not is_neox, enable_pdl,
    )  # fmt: skip
    return q_rope_out, k_rope_out, q_nope_out, k_nope_out


@flashinfer_api(trace=rope_quantize_fp8_trace)
@explain_type_errors
def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: Optional[torch.dtype] = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Optional[torch.Tensor] = None,
    k_rope_out: Optional[torch.Tensor] = None,
    q_nope_out: Optional[torch.Tensor] = None,
    k_nope_out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = False,
    backend: str = "cuda",
) -> Quantized:
    r"""Rotate the rope parts of q and k, and quantise these and the other parts to fp8, in one pass.

    Every value is multiplied by its scale in float32, saturated and rounded to nearest even.

    Parameters
    ----------
    q_rope, q_nope : torch.Tensor
        ``(nnz, num_qo_heads, rope_dim)`` and ``(nnz, num_qo_heads, nope_dim)``; float16, bfloat16 or float32. The last
        dimension is contiguous. ``q_nope`` may be None.
    k_rope, k_nope : torch.Tensor
        ``(nnz, dim)`` for one head that all queries share (MLA), or ``(nnz, num_kv_heads, dim)``. ``k_nope`` may be
        None.
    cos_sin_cache : torch.Tensor
        ``(max_position, rope_dim)`` float32: ``rope_dim / 2`` cosines, then as many sines.
    pos_ids : torch.Tensor
        ``(nnz,)`` int32 or int64: the row of the table for each token.
    is_neox : bool
        Pairs are ``(j, j + rope_dim / 2)``; otherwise ``(2j, 2j + 1)``.
    quantize_dtype : Optional[torch.dtype]
        float8_e4m3fn or float8_e5m2; None takes that of the first output given, else float8_e4m3fn.
    quant_scale_q, quant_scale_kv : float
        Factors of the queries and of the keys.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : Optional[torch.Tensor]
        Written and returned when given; they may be slices of wider buffers.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None turns it on where the GPU has it (compute capability 9.0 on).
    backend : str
        "cuda" (on a CPU tensor, the CPU kernel), or "cutile", which needs the package ``cuda.tile``.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
        ``q_rope_out, k_rope_out, q_nope_out, k_nope_out``; a part that was None comes back with width 0.

    Examples
    --------
    >>> q_rope, q_nope = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 4, 512).bfloat16()
    >>> k_rope, k_nope = torch.randn(3, 64).bfloat16(), torch.randn(3, 512).bfloat16()  # MLA: one head of keys
    >>> angles = torch.arange(16)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    >>> table, pos_ids = torch.cat([angles.cos(), angles.sin()], dim=1), torch.arange(3)
    >>> parts = flashinfer.rope.rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, table, pos_ids)
    >>> [part.dtype for part in parts] == [torch.float8_e4m3fn] * 4
    True
    """
    if backend != "cuda":
        _check_backend(backend, k_rope, is_neox)
    return _quantize(
        "rope_quantize_fp8", q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip


@flashinfer_api(trace=mla_rope_quantize_fp8_trace)
@explain_type_errors
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: Optional[torch.Tensor],
    k_nope: Optional[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: Optional[torch.dtype] = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Optional[torch.Tensor] = None,
    k_rope_out: Optional[torch.Tensor] = None,
    q_nope_out: Optional[torch.Tensor] = None,
    k_nope_out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = False,
) -> Quantized:
    r"""Call :func:`rope_quantize_fp8`; this is its name from the time when only MLA used it.

    Examples
    --------
    >>> q_rope, k_rope = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    >>> table, pos_ids = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], dim=1), torch.arange(3)
    >>> parts = flashinfer.rope.mla_rope_quantize_fp8(q_rope, k_rope, None, None, table, pos_ids)
    """
    return _quantize(
        "mla_rope_quantize_fp8", q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip
