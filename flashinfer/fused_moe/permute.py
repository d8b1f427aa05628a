# SPDX-License-Identifier: Apache-2.0
"""Activations of a mixture-of-experts layer in the order of :func:`flashinfer.fused_moe.moe_sort`, and back."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.fused_moe.routing import get_moe_permute_module
from ..trace.templates.fused_moe_permute import moe_permute_trace, moe_unpermute_trace

__all__ = ["moe_permute", "moe_unpermute"]

_native_permute = NativeFunction(get_moe_permute_module, "moe_permute")
_native_finalize = NativeFunction(get_moe_permute_module, "moe_finalize")


@register_custom_op("flashinfer::moe_permute", mutates_args=("output",))
def _moe_permute(
    output: torch.Tensor, input: torch.Tensor, row_to_pair: torch.Tensor, top_k: int, enable_pdl: bool
) -> None:
    _native_permute[input.is_cuda](output, input, row_to_pair, top_k, enable_pdl)


@register_custom_op("flashinfer::moe_unpermute", mutates_args=("output",))
@called("moe_unpermute")
def _moe_unpermute(
    output: torch.Tensor,
    rows: torch.Tensor,
    pair_to_row: torch.Tensor,
    scales: Optional[torch.Tensor],
    enable_pdl: bool,
) -> None:
    _native_finalize[rows.is_cuda](output, rows, pair_to_row, scales, enable_pdl)


@flashinfer_api(trace=moe_permute_trace)
def moe_permute(
    input: torch.Tensor,
    permuted_output: torch.Tensor,
    tile_idx_to_mn_limit: Optional[torch.Tensor],
    permuted_idx_to_expanded_idx: torch.Tensor,
    num_non_exiting_tiles: Optional[torch.Tensor],
    max_num_permuted_tokens: int,
    top_k: int,
    tile_size: int,
    enable_pdl: bool = False,
    input_sf: Optional[torch.Tensor] = None,
    permuted_sf: Optional[torch.Tensor] = None,
) -> None:
    r"""Copy the row of each token to the rows of its experts.

    Parameters
    ----------
    input : torch.Tensor
        ``(num_tokens, hidden_size)``, elements of one, two or four bytes.
    permuted_output : torch.Tensor
        ``(at least max_num_permuted_tokens, hidden_size)``, dtype of ``input``. Rows without a pair are not written.
    tile_idx_to_mn_limit, num_non_exiting_tiles : Optional[torch.Tensor]
        Results of :func:`moe_sort`. Not read: ``permuted_idx_to_expanded_idx`` tells which rows have a pair.
    permuted_idx_to_expanded_idx : torch.Tensor
        ``(at least max_num_permuted_tokens,)`` int32: ``token * top_k + slot`` of each row; negative: no pair.
    max_num_permuted_tokens : int
        Rows to look at.
    top_k : int
        Slots of a token.
    tile_size : int
        Rows of a tile. Not read.
    enable_pdl : bool
        Whether the kernel may start before the kernel before it has ended.
    input_sf, permuted_sf : Optional[torch.Tensor]
        Scales of the tokens, ``(num_tokens, scales per row)``, and where those of the rows are written, likewise; both
        or neither.

    Examples
    --------
    >>> x, rows = torch.arange(4.0).view(2, 2), torch.full((4, 2), -1.0)
    >>> pairs = torch.tensor([0, 2, 3, 1]).int()  # token * top_k + slot of each row
    >>> flashinfer.fused_moe.moe_permute(x, rows, None, pairs, None, 4, top_k=2, tile_size=4)
    >>> rows[:, 0].tolist()
    [0.0, 2.0, 2.0, 0.0]
    """
    if max_num_permuted_tokens < 0:
        raise ArgumentError(f"moe_permute: max_num_permuted_tokens must be at least 0, got {max_num_permuted_tokens}")
    if permuted_idx_to_expanded_idx.shape[0] < max_num_permuted_tokens:
        raise ArgumentError(
            f"moe_permute: permuted_idx_to_expanded_idx must have max_num_permuted_tokens = {max_num_permuted_tokens} "
            f"elements, got {permuted_idx_to_expanded_idx.shape[0]}"
        )
    if (input_sf is None) != (permuted_sf is None):
        given = "input_sf" if permuted_sf is None else "permuted_sf"
        raise ArgumentError(f"moe_permute: input_sf and permuted_sf must both be given or neither, got {given} alone")
    rows, pdl = permuted_idx_to_expanded_idx[:max_num_permuted_tokens], use_pdl(input, enable_pdl)
    _moe_permute(permuted_output, input, rows, top_k, pdl)
    if input_sf is not None and permuted_sf is not None:
        _moe_permute(permuted_sf, input_sf, rows, top_k, pdl)


@flashinfer_api(trace=moe_unpermute_trace)
def moe_unpermute(
    permuted_input: torch.Tensor,
    output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    topk_scales: Optional[torch.Tensor],
    num_tokens: int,
    top_k: int,
    enable_pdl: bool = False,
    input_is_expanded: bool = False,
) -> None:
    r"""Add up the rows of each token: ``output[t] = sum_s topk_scales[t, s] * permuted_input[row of (t, s)]``.

    Sums are in float32, in the order of slots, and rounded once.

    Parameters
    ----------
    permuted_input : torch.Tensor
        ``(num_rows, hidden_size)`` float16, bfloat16 or float32.
    output : torch.Tensor
        ``(num_tokens, hidden_size)``, dtype of ``permuted_input`` or float32; any of the three for float32 rows. Tokens
        without rows get zeros.
    expanded_idx_to_permuted_idx : torch.Tensor
        ``(num_tokens, top_k)`` int32; negative: the slot is skipped.
    topk_scales : Optional[torch.Tensor]
        ``(num_tokens, top_k)`` float32; None is 1.
    num_tokens : int
        Tokens.
    top_k : int
        Slots of a token.
    enable_pdl : bool
        Whether the kernel may start before the kernel before it has ended.
    input_is_expanded : bool
        Whether row ``token * top_k + slot`` of ``permuted_input`` is that of a slot, whatever its permuted row: only
        the sign of ``expanded_idx_to_permuted_idx`` counts then.

    Examples
    --------
    >>> rows, out = torch.arange(8.0).view(4, 2), torch.empty(2, 2)
    >>> where = torch.tensor([[0, 3], [1, 2]]).int()  # the row of each slot of a token
    >>> flashinfer.fused_moe.moe_unpermute(rows, out, where, None, num_tokens=2, top_k=2)
    >>> out[:, 0].tolist()
    [6.0, 6.0]
    """
    rows = expanded_idx_to_permuted_idx
    if rows.numel() != num_tokens * top_k or top_k < 0:
        raise ArgumentError(
            f"moe_unpermute: expanded_idx_to_permuted_idx must be (num_tokens, top_k) = ({num_tokens}, {top_k}), got "
            f"{tuple(rows.shape)}"
        )
    if input_is_expanded:
        if permuted_input.shape[0] < rows.numel():
            raise ArgumentError(
                f"moe_unpermute: permuted_input must have num_tokens * top_k = {rows.numel()} rows with "
                f"input_is_expanded, got {permuted_input.shape[0]}"
            )
        places = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device).view(rows.shape)
        rows = torch.where(rows < 0, rows, places)
    _moe_unpermute(output, permuted_input, rows.view(num_tokens, top_k), topk_scales, use_pdl(output, enable_pdl))
