# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding with frequencies from a base: of ragged batches, and by position."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import NativeFunction
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.rope import (
    apply_rope_inplace_trace,
    apply_rope_pos_ids_inplace_trace,
    apply_rope_pos_ids_trace,
    apply_rope_trace,
)
from .modules import get_rope_module

_native_apply_rope = NativeFunction(get_rope_module, "apply_rope")
_native_apply_rope_pos_ids = NativeFunction(get_rope_module, "apply_rope_pos_ids")


@register_custom_op("flashinfer::apply_rope", mutates_args=("q_rope", "k_rope"))
def _apply_rope(
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
) -> None:
    _native_apply_rope[q.is_cuda](
        q, k, None if q_rope is q else q_rope, None if k_rope is k else k_rope,
        indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta,
    )  # fmt: skip


@register_custom_op("flashinfer::apply_rope_pos_ids", mutates_args=("q_rope", "k_rope"))
def _apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int],
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
) -> None:
    _native_apply_rope_pos_ids[q.is_cuda](
        q, k, None if q_rope is q else q_rope, None if k_rope is k else k_rope,
        pos_ids, rotary_dim, interleave, rope_scale, rope_theta,
    )  # fmt: skip


@flashinfer_api(trace=apply_rope_trace)
@explain_type_errors
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotary embedding of a ragged batch: the tokens of each request follow each other.

    Token ``indptr[b] + i`` has position ``offsets[b] + i``. Pair ``j`` of a head turns by
    ``position * rope_theta ** (-2 * j / rotary_dim) / rope_scale``, an angle that is exact for large positions too. The
    rotation is float32, rounded once.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(nnz, num_qo_heads, head_dim)`` and ``(nnz, num_kv_heads, head_dim)``; float16, bfloat16 or float32. The last
        dimension is contiguous, the others have any stride.
    indptr : torch.Tensor
        ``(batch_size + 1,)`` int32 or int64: where each request begins, then where the last one ends. Tokens before
        ``indptr[0]`` or from ``indptr[-1]`` on are left alone: in new tensors their rows are undefined. Offsets rise;
        those on a GPU are not looked at, and where they fall the result means nothing.
    offsets : torch.Tensor
        ``(batch_size,)``, dtype of ``indptr``: position of the first token of each request.
    rotary_dim : Optional[int]
        How many leading columns of a head are rotated (even); None means all of them. The others are copied.
    interleave : bool
        Pairs are ``(2j, 2j + 1)``, as in GPT-J, rather than ``(j, j + rotary_dim / 2)``, as in Llama.
    rope_scale : float
        Positions are divided by it (linear interpolation).
    rope_theta : float
        Base of the frequencies.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        q and k rotated: new tensors of the same shapes.

    Examples
    --------
    >>> q, k = torch.randn(5, 32, 128), torch.randn(5, 8, 128)
    >>> indptr, offsets = torch.tensor([0, 3, 5]), torch.tensor([0, 10])  # positions 0 1 2, 10 11
    >>> q_rope, k_rope = flashinfer.apply_rope(q, k, indptr, offsets)
    """
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    _apply_rope(q, k, q_rope, k_rope, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)
    return q_rope, k_rope


@flashinfer_api(trace=apply_rope_inplace_trace)
def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    r""":func:`apply_rope` that overwrites q and k.

    Examples
    --------
    >>> q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)  # a request of two tokens and one of three
    >>> indptr, offsets = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 7]).int()
    >>> flashinfer.apply_rope_inplace(q, k, indptr, offsets)
    """
    _apply_rope(q, k, q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)


@flashinfer_api(trace=apply_rope_pos_ids_trace)
@explain_type_errors
def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotary embedding of tokens whose positions are given.

    Parameters
    ----------
    q, k, rotary_dim, interleave, rope_scale, rope_theta
        As in :func:`apply_rope`.
    pos_ids : torch.Tensor
        ``(nnz,)`` int32 or int64: the position of each token.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        q and k rotated: new tensors of the same shapes.

    Examples
    --------
    >>> q, k = torch.randn(5, 32, 128), torch.randn(5, 8, 128)
    >>> q_rope, k_rope = flashinfer.apply_rope_pos_ids(q, k, torch.arange(5))
    """
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    _apply_rope_pos_ids(q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)
    return q_rope, k_rope


@flashinfer_api(trace=apply_rope_pos_ids_inplace_trace)
def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: Optional[int] = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    r""":func:`apply_rope_pos_ids` that overwrites q and k.

    Examples
    --------
    >>> q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    >>> flashinfer.apply_rope_pos_ids_inplace(q, k, torch.tensor([0, 1, 7, 8, 9]))
    """
    _apply_rope_pos_ids(q, k, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)
