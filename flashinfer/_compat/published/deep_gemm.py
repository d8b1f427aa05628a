# SPDX-License-Identifier: Apache-2.0
"""The published low-level names of DeepGEMM's layouts, over :mod:`flashinfer.gemm.deepgemm`."""

from __future__ import annotations

from typing import Optional

import torch

from flashinfer._compat.unsupported import needs
from flashinfer._runtime.integer_math import round_up
from flashinfer.gemm.deepgemm import batch_deepgemm_fp8_nt_groupwise, group_deepgemm_fp8_nt_groupwise

__all__ = [
    "get_m_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]

Scaled = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]

_RECIPE = (1, 128, 128)
_TMA_ALIGNMENT = 16  # bytes

get_col_major_tma_aligned_packed_tensor = needs(
    "get_col_major_tma_aligned_packed_tensor", "an SM100 GPU (Blackwell), whose kernels take packed UE8M0 scales"
)


def get_m_alignment_for_contiguous_layout() -> int:
    """Return the number of rows at whose multiples the groups of the contiguous layout begin."""
    return 128


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Round a number of elements of ``element_size`` bytes up to whole 16 bytes, as strides of TMA tensors must be."""
    return round_up(x, _TMA_ALIGNMENT // element_size)


def m_grouped_fp8_gemm_nt_contiguous(
    a_fp8: Scaled,
    b_fp8: Scaled,
    d: torch.Tensor,
    m_indices: torch.Tensor,
    recipe: Optional[Recipe] = None,
    compiled_dims: str = "nk",
) -> None:
    """Write the product of each row with the matrix of its group to ``d``.

    Parameters
    ----------
    a_fp8, b_fp8 : tuple of two torch.Tensor
        Values and scales as in :func:`flashinfer.gemm.group_deepgemm_fp8_nt_groupwise`.
    d : torch.Tensor
        ``(m, n)`` bfloat16, written.
    m_indices : torch.Tensor
        ``(m,)`` int32, the group of each row.
    recipe : Optional[tuple of int]
        Granularity of the scales; None means (1, 128, 128), the only one there is.
    compiled_dims : str
        Accepted for compatibility and ignored.
    """
    (a, a_scale), (b, b_scale) = a_fp8, b_fp8
    group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, m_indices, recipe or _RECIPE, d)


def m_grouped_fp8_gemm_nt_masked(
    a_fp8: Scaled,
    b_fp8: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Optional[Recipe] = None,
    compiled_dims: str = "nk",
) -> None:
    """Write the product of the first rows of each group with the matrix of the group to ``d``.

    Parameters
    ----------
    a_fp8, b_fp8 : tuple of two torch.Tensor
        Values and scales as in :func:`flashinfer.gemm.batch_deepgemm_fp8_nt_groupwise`.
    d : torch.Tensor
        ``(groups, m, n)`` bfloat16, of which the first ``masked_m[g]`` rows of group g are written.
    masked_m : torch.Tensor
        ``(groups,)`` int32, rows of each group.
    expected_m : int
        Rows that a group has on average.
    recipe : Optional[tuple of int]
        Granularity of the scales; None means (1, 128, 128), the only one there is.
    compiled_dims : str
        Accepted for compatibility and ignored.
    """
    (a, a_scale), (b, b_scale) = a_fp8, b_fp8
    batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, masked_m, expected_m, recipe or _RECIPE, d)
