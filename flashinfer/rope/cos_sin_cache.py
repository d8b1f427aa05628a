# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding by a table of cosines and sines."""

from __future__ import annotations

import torch

from .._runtime.dispatch import NativeFunction
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_arguments, explain_type_errors
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.rope import (
    apply_rope_with_cos_sin_cache_inplace_trace,
    apply_rope_with_cos_sin_cache_trace,
)
from .modules import get_rope_module

_native_apply_rope_pos_ids_cos_sin_cache = NativeFunction(get_rope_module, "apply_rope_pos_ids_cos_sin_cache")


@register_custom_op("flashinfer::apply_rope_pos_ids_cos_sin_cache", mutates_args=("query_out", "key_out"))
@called("apply_rope_with_cos_sin_cache")
def _apply_rope_pos_ids_cos_sin_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    query_out: torch.Tensor,
    key_out: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    interleave: bool,
) -> None:
    _native_apply_rope_pos_ids_cos_sin_cache[query.is_cuda](
        query, key, None if query_out is query else query_out, None if key_out is key else key_out,
        head_size, cos_sin_cache, positions, interleave,
    )  # fmt: skip


def _tokens(x: torch.Tensor, positions: torch.Tensor, head_size: int) -> torch.Tensor:
    """View with one row, or one row of heads, per token. Tensors of the usual shapes are returned unchanged."""
    tokens = positions.numel()
    if x.ndim == 2 or (x.ndim == 3 and x.shape[2] == head_size and x.shape[0] == tokens):
        return x
    try:
        return x.view(tokens, x.numel() // max(tokens * head_size, 1), head_size)
    except RuntimeError as error:
        raise ArgumentError(
            f"apply_rope_with_cos_sin_cache: query and key must be viewable as ({tokens} tokens, heads, head_size = "
            f"{head_size}), got shape {tuple(x.shape)} and strides {x.stride()}"
        ) from error


@flashinfer_api(trace=apply_rope_with_cos_sin_cache_trace)
@explain_type_errors
def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotary embedding whose cosines and sines are rows of a table.

    Parameters
    ----------
    positions : torch.Tensor
        ``(nnz,)`` int32 or int64: the row of the table for each token.
    query, key : torch.Tensor
        ``(nnz, num_heads * head_size)``, or any shape that can be viewed as ``(nnz, num_heads, head_size)``; float16,
        bfloat16 or float32. The heads of a token lie side by side; tokens have any stride.
    head_size : int
        Columns of a head.
    cos_sin_cache : torch.Tensor
        ``(max_position, rotary_dim)`` float32: ``rotary_dim / 2`` cosines, then as many sines. The first ``rotary_dim``
        columns of each head are rotated, the others copied.
    is_neox : bool
        Pairs are ``(j, j + rotary_dim / 2)``; otherwise ``(2j, 2j + 1)``.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        query and key rotated: new tensors of the same shapes.

    Examples
    --------
    >>> angle = torch.arange(100)[:, None] * 1e4 ** (-torch.arange(0, 128, 2) / 128)
    >>> table = torch.cat([angle.cos(), angle.sin()], dim=-1)
    >>> q, k = torch.randn(5, 32 * 128), torch.randn(5, 8 * 128)
    >>> q_rope, k_rope = flashinfer.apply_rope_with_cos_sin_cache(torch.arange(5), q, k, 128, table)
    """
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    q, k, q_out, k_out = (_tokens(x, positions, head_size) for x in (query, key, query_out, key_out))
    _apply_rope_pos_ids_cos_sin_cache(q, k, q_out, k_out, head_size, cos_sin_cache, positions, not is_neox)
    return query_out, key_out


@flashinfer_api(trace=apply_rope_with_cos_sin_cache_inplace_trace)
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    r""":func:`apply_rope_with_cos_sin_cache` that overwrites query and key.

    Examples
    --------
    >>> angles = torch.arange(16)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    >>> table = torch.cat([angles.cos(), angles.sin()], dim=1)
    >>> q, k = torch.randn(5, 4 * 64), torch.randn(5, 2 * 64)
    >>> flashinfer.apply_rope_with_cos_sin_cache_inplace(torch.tensor([0, 1, 7, 8, 9]), q, k, 64, table)
    """
    try:
        q = query if query.ndim == 2 else _tokens(query, positions, head_size)
        k = key if key.ndim == 2 else _tokens(key, positions, head_size)
        _apply_rope_pos_ids_cos_sin_cache(q, k, q, k, head_size, cos_sin_cache, positions, not is_neox)
    except (AttributeError, TypeError) as error:
        tensors = {"query": query, "key": key, "positions": positions, "cos_sin_cache": cos_sin_cache}
        expected = [(name, torch.Tensor, x) for name, x in tensors.items()]
        explain_arguments("apply_rope_with_cos_sin_cache_inplace", error, *expected, ("head_size", int, head_size))
        raise
