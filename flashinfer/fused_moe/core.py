# SPDX-License-Identifier: Apache-2.0
"""Weight layouts of experts for kernels with transposed output tiles, computed by torch on any device.

Published code imports other names of expert layers from here too.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import torch

from .._compat.tllm_enums import ActivationType as ActivationType
from .._compat.tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from .._compat.tllm_enums import RoutingInputMode as RoutingInputMode
from .._compat.tllm_enums import RoutingMethodType as RoutingMethodType
from .._compat.tllm_enums import WeightLayout as WeightLayout
from .._compat.unsupported_fused_moe import setup_cubin_loader as setup_cubin_loader
from .._runtime.errors import ArgumentError, BackendSupportedError
from .._runtime.explain_error import explain_type_errors
from ..jit.fused_moe.cutlass import get_fused_moe_module
from ..quantization.fp4_quantization import get_shuffle_matrix_a_row_indices, get_shuffle_matrix_sf_a_row_indices
from .cutlass.api import cutlass_fused_moe as cutlass_fused_moe
from .cutlass.workspace import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size
from .mixed_weights import interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm
from .mixed_weights import interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm
from .mixed_weights import (
    preprocess_moe_weights_for_sm90_mixed_gemm_humming as preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)

__all__ = [
    "MoEInputs",
    "MoeRunnerInputs",
    "convert_to_block_layout",
    "get_cutlass_fused_moe_module",
    "get_reorder_rows_for_gated_act_gemm_row_indices",
    "get_w2_permute_indices_with_cache",
    "reorder_rows_for_gated_act_gemm",
]


class MoeRunnerInputs(NamedTuple):
    """Tensors of a MoE call in the order in which tuned runners take them; a call without one has None.

    Of ``routing_logits`` and ``topk_ids`` with ``expert_weights``, the first lets the kernel route.
    """

    output: Optional[torch.Tensor]
    routing_logits: Optional[torch.Tensor]
    topk_ids: Optional[torch.Tensor]
    expert_weights: Optional[torch.Tensor]
    hidden_states: torch.Tensor
    hidden_states_scale: Optional[torch.Tensor] = None
    gemm1_lora_delta: Optional[torch.Tensor] = None
    per_token_scale: Optional[torch.Tensor] = None


MoEInputs = MoeRunnerInputs  # the name of older releases


def get_cutlass_fused_moe_module(backend: str = "100", use_fast_build: bool = False) -> Any:
    """Return the native module of :func:`cutlass_fused_moe`; it is built if it is not in the cache.

    Parameters
    ----------
    backend : str
        Compute capability of the GPU, such as ``"90"``; one module serves all up to 9.0.
    use_fast_build : bool
        Accepted for compatibility and ignored: there is one build.
    """
    if not backend.isdecimal() or int(backend) > 90:
        raise BackendSupportedError(
            f"get_cutlass_fused_moe_module: backend must be a capability up to 90, as there are no kernels for later "
            f"ones, got {backend!r}"
        )
    return get_fused_moe_module("cuda")


@explain_type_errors
def get_reorder_rows_for_gated_act_gemm_row_indices(x: torch.Tensor) -> torch.Tensor:
    """Return the row indices of :func:`reorder_rows_for_gated_act_gemm` for ``x``: ``(m,)``, int64, on the CPU."""
    if x.ndim != 2 or x.shape[0] % 2:
        raise ArgumentError(
            f"reorder_rows_for_gated_act_gemm: x must have 2 dimensions and an even number of rows, got shape "
            f"{tuple(x.shape)}"
        )
    return torch.arange(x.shape[0], device="cpu").view(2, -1).t().reshape(-1)


@explain_type_errors
def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    """Copy a gated weight ``(m, k)`` with the rows of its halves interleaved: ``r0, r(m/2), r1, r(m/2 + 1), ...``."""
    return x[get_reorder_rows_for_gated_act_gemm_row_indices(x).to(x.device)]


@explain_type_errors
def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """Copy a weight ``(m, k)`` to ``(k / blockK, m, blockK)``, contiguous."""
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


@explain_type_errors
def _maybe_get_cached_w3_w1_permute_indices(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w3_w1_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: Optional[int] = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """Return the row order of a first weight (or its scales) for kernels: halves interleaved if gated, then shuffled.

    Parameters
    ----------
    _cache_permute_indices : dict
        Cache of row orders; the caller owns it.
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


@explain_type_errors
def get_w2_permute_indices_with_cache(
    _cache_permute_indices: dict[Any, torch.Tensor],
    dst_w2_weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: Optional[int] = None,
) -> torch.Tensor:
    """Return the row order of a second weight (or its scales) for kernels, which is that of ``shuffle_matrix_a``."""
    key = ("w2", tuple(dst_w2_weight.shape), epilogue_tile_m, num_elts_per_sf)
    if key not in _cache_permute_indices:
        rows = _shuffled_rows(dst_w2_weight, epilogue_tile_m, num_elts_per_sf)
        _cache_permute_indices[key] = rows.to(dst_w2_weight.device)
    return _cache_permute_indices[key].to(dst_w2_weight.device)


def _moe_topk_ids_init(num_experts: int, *, packed: bool = True) -> Callable[..., torch.Tensor]:
    """Return what makes random expert ids for a trial (a published name); packed: with the bfloat16 weight 1.0."""

    def make(shape: Sequence[int], dtype: torch.dtype, device: Union[str, torch.device]) -> torch.Tensor:
        ids = torch.randint(num_experts, tuple(shape), device=device)
        return ((ids << 16) | 0x3F80 if packed else ids).to(dtype)  # 0x3F80: the bits of 1.0

    return make
