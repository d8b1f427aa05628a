# SPDX-License-Identifier: Apache-2.0
"""Orders of the weights of experts, as kernels with transposed output tiles read them; host code, any device."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..errors import ArgumentError
from ..quantization.fp4_quantization import get_shuffle_matrix_a_row_indices, get_shuffle_matrix_sf_a_row_indices
from ..tllm_enums import ActivationType as ActivationType
from ..tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from ..tllm_enums import RoutingInputMode as RoutingInputMode
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from ..tllm_enums import WeightLayout as WeightLayout

__all__ = [
    "convert_to_block_layout",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_w2_permute_indices_with_cache",
    "reorder_rows_for_gated_act_gemm",
]


def get_reorder_rows_for_gated_act_gemm_row_indices(x: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` in the order of :func:`reorder_rows_for_gated_act_gemm`: ``(m,)``, int64, on the CPU."""
    if x.ndim != 2 or x.shape[0] % 2:
        raise ArgumentError(
            f"reorder_rows_for_gated_act_gemm: x must have 2 dimensions and an even number of rows, got shape "
            f"{tuple(x.shape)}"
        )
    return torch.arange(x.shape[0], device="cpu").view(2, -1).t().reshape(-1)


def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    """Rows of the two halves of a gated weight in turn: ``r0, r(m/2), r1, r(m/2 + 1), ...``; a copy of ``(m, k)``."""
    return x[get_reorder_rows_for_gated_act_gemm_row_indices(x).to(x.device)]


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """A weight ``(m, k)`` as ``(k / blockK, m, blockK)``, contiguous."""
    if input_tensor.ndim != 2 or blockK < 1 or input_tensor.shape[1] % blockK:
        raise ArgumentError(
            f"convert_to_block_layout: input_tensor must have 2 dimensions and columns in blocks of blockK = {blockK}, "
            f"got shape {tuple(input_tensor.shape)}"
        )
    m, k = input_tensor.shape
    return input_tensor.view(m, k // blockK, blockK).permute(1, 0, 2).contiguous()


def _shuffled_rows(weight: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: Optional[int]) -> torch.Tensor:
    if num_elts_per_sf is None:
        return get_shuffle_matrix_a_row_indices(weight, epilogue_tile_m)
    return get_shuffle_matrix_sf_a_row_indices(weight, epilogue_tile_m, num_elts_per_sf)


def _maybe_get_cached_w3_w1_permute_indices(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w3_w1_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: Optional[int] = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """Rows of a first weight (or its scales) in the order of kernels: halves in turn if gated, then shuffled.

    Parameters
    ----------
    _cache_permute_indices : dict
        Where orders are kept; the caller owns it.
    dst_w3_w1_weight : torch.Tensor
        ``(m, k)``: its shape and device count.
    epilogue_tile_m : int
        Rows of the kernel's tile.
    num_elts_per_sf : Optional[int]
        Elements that share a scale, where the tensor holds scales.
    is_gated_act_gemm : bool
        Whether the weight has two halves.

    Returns
    -------
    torch.Tensor
        ``(m,)`` int64 on the device of the weight; ``weight[result]`` is in order.
    """
    weight = dst_w3_w1_weight
    key = ("w3_w1", tuple(weight.shape), epilogue_tile_m, num_elts_per_sf, is_gated_act_gemm)
    if key not in _cache_permute_indices:
        rows = _shuffled_rows(weight, epilogue_tile_m, num_elts_per_sf)
        if is_gated_act_gemm:
            rows = get_reorder_rows_for_gated_act_gemm_row_indices(weight)[rows]
        _cache_permute_indices[key] = rows.to(weight.device)
    return _cache_permute_indices[key].to(weight.device)


def get_w2_permute_indices_with_cache(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w2_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: Optional[int] = None,
) -> torch.Tensor:
    """Rows of a second weight (or its scales) in the order of kernels: those of ``shuffle_matrix_a``; see above."""
    key = ("w2", tuple(dst_w2_weight.shape), epilogue_tile_m, num_elts_per_sf)
    if key not in _cache_permute_indices:
        rows = _shuffled_rows(dst_w2_weight, epilogue_tile_m, num_elts_per_sf)
        _cache_permute_indices[key] = rows.to(dst_w2_weight.device)
    return _cache_permute_indices[key].to(dst_w2_weight.device)
