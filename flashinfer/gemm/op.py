# SPDX-License-Identifier: Apache-2.0
"""The op behind grouped, segmented and block-scaled products, as ``torch.compile`` sees it."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.torch_ops import called, register_custom_op
from .native import product

__all__ = ["grouped_product"]


@register_custom_op("flashinfer::gemm_grouped", mutates_args=("out",))
@called("gemm")
def grouped_product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Optional[torch.Tensor],
    b_scale: Optional[torch.Tensor],
    groups: Optional[torch.Tensor],
    grouping: int,
    scale_m: int = 0,
    scale_n: int = 0,
    scale_k: int = 0,
    expected_m: int = 0,
    weight_indices: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """Call :func:`flashinfer.gemm.native.product` with the granularity as three integers, 0 for whole tensors."""
    product(
        out,
        a,
        b,
        a_scale=a_scale,
        b_scale=b_scale,
        groups=groups,
        weight_indices=weight_indices,
        grouping=grouping,
        granularity=(scale_m, scale_n, scale_k) if scale_m else None,
        alpha=alpha,
        beta=beta,
        expected_m=expected_m,
    )
