# SPDX-License-Identifier: Apache-2.0
"""Layout of block scales that CuTe DSL kernels read, and probes; all of it is computed by torch on any device."""

from __future__ import annotations

from typing import Union

import torch

from flashinfer._runtime.arch import get_device_sm_count as get_num_sm
from flashinfer._runtime.errors import ArgumentError
from flashinfer._runtime.integer_math import ceil_div

__all__ = [
    "convert_sf_from_mma_layout",
    "convert_sf_to_mma_layout",
    "get_mma_sf_shape",
    "get_num_sm",
    "is_cute_dsl_arch_supported",
    "is_cute_dsl_available",
    "is_cute_dsl_experimental_available",
    "is_rubin_cute_dsl_available",
    "require_cute_dsl_arch",
]


def is_cute_dsl_available() -> bool:
    """Return False: no kernel of this package is written in the CuTe DSL, whether or not the DSL is installed."""
    return False


def is_cute_dsl_arch_supported(major: int, minor: int, native_only: bool = False) -> bool:
    """Return False: there is no kernel in the CuTe DSL for any architecture here."""
    return False


def require_cute_dsl_arch(device: Union[torch.device, str, int]) -> None:
    """Raise ``NotImplementedError``: there is no kernel in the CuTe DSL for the architecture of a device here."""
    raise NotImplementedError(
        f"require_cute_dsl_arch: device must have kernels in the CuTe DSL, of which this package has none, got {device}"
    )


def is_rubin_cute_dsl_available() -> bool:
    """Return False: no kernel of this package is written in the CuTe DSL for SM107."""
    return False


def is_cute_dsl_experimental_available() -> bool:
    """Return False: no kernel of this package is written in the experimental part of the CuTe DSL."""
    return False


def get_mma_sf_shape(m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16) -> tuple[int, int, int, int, int, int]:
    """Return the shape of the scales of ``num_groups`` matrices ``(m, k)``: ``(32, 4, m_tiles, 4, k_tiles, groups)``.

    A tile holds the scales of 128 rows by 4 blocks of ``sf_vec_size`` elements.
    """
    return 32, 4, ceil_div(m, 128), 4, ceil_div(ceil_div(k, sf_vec_size), 4), num_groups


def convert_sf_to_mma_layout(
    sf: torch.Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16
) -> torch.Tensor:
    """Return a view of swizzled scales with six dimensions, in the shape of :func:`get_mma_sf_shape`.

    Parameters
    ----------
    sf : torch.Tensor
        Scales in tiles of 128 x 4, contiguous, of any shape: group after group, each with its padded rows.
    m, k : int
        Rows and columns of the matrix of one group.
    num_groups : int
        Matrices that ``sf`` belongs to.
    sf_vec_size : int
        Elements of one block.
    """
    rows, columns, m_tiles, inner, k_tiles, groups = get_mma_sf_shape(m, k, num_groups, sf_vec_size)
    expected = rows * columns * m_tiles * inner * k_tiles * groups
    if sf.numel() != expected or not sf.is_contiguous():
        raise ArgumentError(
            f"convert_sf_to_mma_layout: sf must be contiguous and have {expected} elements, got shape "
            f"{tuple(sf.shape)} with strides {sf.stride()}"
        )
    return sf.view(groups, m_tiles, k_tiles, rows, columns, inner).permute(3, 4, 1, 5, 2, 0)


def convert_sf_from_mma_layout(
    sf_6d: torch.Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16
) -> torch.Tensor:
    """Return the swizzled scales ``(groups * padded rows, padded blocks)`` that a tensor of six dimensions shows.

    The inverse of :func:`convert_sf_to_mma_layout`; the result is contiguous.
    """
    shape = get_mma_sf_shape(m, k, num_groups, sf_vec_size)
    if tuple(sf_6d.shape) != shape:
        raise ArgumentError(f"convert_sf_from_mma_layout: sf_6d must have shape {shape}, got {tuple(sf_6d.shape)}")
    rows, columns, m_tiles, inner, k_tiles, groups = shape
    return sf_6d.permute(5, 2, 4, 0, 1, 3).reshape(groups * m_tiles * rows * columns, k_tiles * inner)
