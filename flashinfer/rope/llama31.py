# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of Llama 3.1: low frequencies are stretched, high ones are kept."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import NativeFunction
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.rope import (
    apply_llama31_rope_inplace_trace,
    apply_llama31_rope_pos_ids_inplace_trace,
    apply_llama31_rope_pos_ids_trace,
    apply_llama31_rope_trace,
)
from .modules import get_rope_module

_native_apply_llama31_rope = NativeFunction(get_rope_module, "apply_llama31_rope")
_native_apply_llama31_rope_pos_ids = NativeFunction(get_rope_module, "apply_llama31_rope_pos_ids")


@register_custom_op("flashinfer::apply_llama31_rope", mutates_args=("q_rope", "k_rope"))
def _apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int],
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: float,
) -> None:
    _native_apply_llama31_rope[q.is_cuda](
        q, k, None if q_rope is q else q_rope, None if k_rope is k else k_rope,
        indptr, offsets, rotary_dim, interleave,
        rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


@register_custom_op("flashinfer::apply_llama31_rope_pos_ids", mutates_args=("q_rope", "k_rope"))
def _apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int],
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: float,
) -> None:
    _native_apply_llama31_rope_pos_ids[q.is_cuda](
        q, k, None if q_rope is q else q_rope, None if k_rope is k else k_rope,
        pos_ids, rotary_dim, interleave,
        rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


@flashinfer_api(trace=apply_llama31_rope_trace)
@explain_type_errors
def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Llama 3.1's rotary embedding of a ragged batch.

    As :func:`flashinfer.apply_rope`, but a frequency ``f`` that completes less than ``low_freq_factor`` turns over
    ``old_context_len`` positions is divided by ``rope_scale``, one with more than ``high_freq_factor`` turns is kept,
    and between them the two are blended: ``(1 - s) * f / rope_scale + s * f`` with
    ``s = (old_context_len * f / (2 * pi) - low) / (high - low)``.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_theta
        As in :func:`flashinfer.apply_rope`.
    rope_scale : float
        How far low frequencies are stretched.
    low_freq_factor, high_freq_factor : float
        Turns over the old context below which a frequency is stretched, and above which it is kept.
    old_context_len : int
        Context the model was trained on first.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        q and k rotated: new tensors of the same shapes.

    Examples
    --------
    >>> q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)  # a request of two tokens and one of three
    >>> indptr, offsets = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 7]).int()
    >>> q_rotated, k_rotated = flashinfer.apply_llama31_rope(q, k, indptr, offsets)
    """
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    _apply_llama31_rope(
        q, k, q_rope, k_rope, indptr, offsets, rotary_dim, interleave,
        rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip
    return q_rope, k_rope


@flashinfer_api(trace=apply_llama31_rope_inplace_trace)
def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    r""":func:`apply_llama31_rope` that overwrites q and k.

    Examples
    --------
    >>> q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    >>> indptr, offsets = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 7]).int()
    >>> flashinfer.apply_llama31_rope_inplace(q, k, indptr, offsets)
    """
    _apply_llama31_rope(
        q, k, q, k, indptr, offsets, rotary_dim, interleave,
        rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


@flashinfer_api(trace=apply_llama31_rope_pos_ids_trace)
@explain_type_errors
def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Llama 3.1's rotary embedding of tokens whose positions are given.

    ``pos_ids`` is ``(nnz,)``, int32 or int64; everything else as in :func:`apply_llama31_rope`.

    Examples
    --------
    >>> q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    >>> q_rotated, k_rotated = flashinfer.apply_llama31_rope_pos_ids(q, k, torch.tensor([0, 1, 7, 8, 9]))
    """
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    _apply_llama31_rope_pos_ids(
        q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave,
        rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip
    return q_rope, k_rope


@flashinfer_api(trace=apply_llama31_rope_pos_ids_inplace_trace)
def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    r""":func:`apply_llama31_rope_pos_ids` that overwrites q and k.

    Examples
    --------
    >>> q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    >>> flashinfer.apply_llama31_rope_pos_ids_inplace(q, k, torch.tensor([0, 1, 7, 8, 9]))
    """
    _apply_llama31_rope_pos_ids(
        q, k, q, k, pos_ids, rotary_dim, interleave,
        rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip
