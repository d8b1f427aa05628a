# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the order of tokens by expert, and checks of activations."""

from __future__ import annotations

import enum
import math
from typing import Any, Optional, Union

import torch

from ..._compat.tllm_enums import ActivationType
from ..._runtime.errors import ArgumentError
from ..permute import moe_permute as moe_permute
from ..permute import moe_unpermute as moe_unpermute
from ..sort import get_max_num_permuted_tokens as get_max_num_permuted_tokens
from ..sort import get_max_num_tiles as get_max_num_tiles
from ..sort import moe_sort as moe_sort

__all__ = [
    "SUPPORTED_CUTE_DSL_MOE_ACTIVATION_TYPES",
    "MoeActivationType",
    "allocate_moe_sort_buffers",
    "get_max_num_permuted_tokens",
    "get_max_num_tiles",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "normalize_cute_dsl_moe_activation_type",
    "validate_cute_dsl_moe_situ_config",
    "validate_cute_dsl_moe_swiglu_config",
]

#: Activations of published kernels in the CuTe DSL.
SUPPORTED_CUTE_DSL_MOE_ACTIVATION_TYPES = (ActivationType.Swiglu, ActivationType.GegluTanh, ActivationType.Relu2)
_LARGEST = torch.finfo(torch.float32).max


class MoeActivationType(enum.IntEnum):
    """Numbers of activations in the launchers of the published order of tokens."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    Identity = 5


def normalize_cute_dsl_moe_activation_type(activation_type: Any) -> tuple[ActivationType, bool]:
    """Return an activation as a member of :class:`ActivationType`, and whether it is gated.

    Parameters
    ----------
    activation_type : Union[ActivationType, int, str]
        A member, its number or its name.
    """
    known = {one.name: one for one in ActivationType}
    try:
        found = known[activation_type] if isinstance(activation_type, str) else ActivationType(activation_type)
    except (KeyError, ValueError):
        found = ActivationType.InvalidType
    if found not in SUPPORTED_CUTE_DSL_MOE_ACTIVATION_TYPES:
        names = ", ".join(one.name for one in SUPPORTED_CUTE_DSL_MOE_ACTIVATION_TYPES)
        raise ArgumentError(
            f"normalize_cute_dsl_moe_activation_type: Unsupported activation_type: it must be one of {names}, got "
            f"{activation_type!r}"
        )
    return found, found is not ActivationType.Relu2


def _check(op: str, name: str, value: Any, is_positive: bool) -> None:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not abs(number) <= _LARGEST or (is_positive and not torch.tensor(number, dtype=torch.float32).item() > 0):
        what = "positive and finite in fp32" if is_positive else "finite in fp32"
        raise ArgumentError(f"{op}: {name} must be {what}, got {value!r}")


def validate_cute_dsl_moe_swiglu_config(alpha: float, beta: float, limit: float) -> None:
    """Raise ``ValueError`` unless the constants of SwiGLU can be given to a kernel as float32."""
    op = "validate_cute_dsl_moe_swiglu_config"
    for name, value, is_positive in (("alpha", alpha, False), ("beta", beta, False), ("limit", limit, True)):
        _check(op, name, value, is_positive)


def validate_cute_dsl_moe_situ_config(
    activation_type: Union[ActivationType, int], situ_beta: Optional[float], situ_linear_beta: Optional[float]
) -> None:
    """Raise ``ValueError`` unless the constants of SiTU belong together; both None: the activation is not SiTU."""
    op = "validate_cute_dsl_moe_situ_config"
    if situ_beta is None:
        if situ_linear_beta is not None:
            raise ArgumentError(f"{op}: situ_linear_beta requires situ_beta, got {situ_linear_beta!r} without it")
        return
    if int(activation_type) != ActivationType.Swiglu:
        raise ArgumentError(f"{op}: SiTU parameters require ActivationType.Swiglu, got {activation_type!r}")
    _check(op, "situ_beta", situ_beta, True)
    if situ_linear_beta is not None:
        _check(op, "situ_linear_beta", situ_linear_beta, True)


def allocate_moe_sort_buffers(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_local_experts: Optional[int] = None,
    tile_tokens_dim: int = 128,
    device: Union[torch.device, str] = "cuda",
) -> dict[str, torch.Tensor]:
    """Return the ``out_*`` arguments of :func:`moe_sort` for up to so many tokens, by name; they hold nothing yet."""
    local = num_experts if num_local_experts is None else num_local_experts
    tiles = get_max_num_tiles(num_tokens, top_k, local, tile_tokens_dim)
    sizes: dict[str, tuple[int, ...]] = {
        "out_tile_idx_to_expert_idx": (tiles,),
        "out_tile_idx_to_mn_limit": (tiles,),
        "out_expanded_idx_to_permuted_idx": (num_tokens, top_k),
        "out_permuted_idx_to_expanded_idx": (tiles * tile_tokens_dim,),
        "out_total_num_padded_tokens": (1,),
        "out_num_non_exiting_tiles": (1,),
    }
    return {name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
