# SPDX-License-Identifier: Apache-2.0
"""Norms with FP4 outputs, which published code imports: they need conversions of Blackwell GPUs and raise an error."""

from __future__ import annotations

from .unsupported import needs

__all__ = ["add_rmsnorm_fp4quant", "rmsnorm_fp4quant"]

_GPU = "a Blackwell GPU (SM100) and kernels of the CuTe DSL for it, which this package does not have"
_OUTPUTS = "y_fp4=None, block_scale=None, global_scale=None, eps=1e-6, block_size=16, scale_format=None"

rmsnorm_fp4quant = needs(
    "rmsnorm_fp4quant", _GPU, f"input, weight, {_OUTPUTS}, is_sf_swizzled_layout=False, enable_pdl=None"
)
add_rmsnorm_fp4quant = needs(
    "add_rmsnorm_fp4quant",
    _GPU,
    f"input, residual, weight, {_OUTPUTS}, is_sf_swizzled_layout=False, output_both_sf_layouts=False, "
    "block_scale_unswizzled=None, enable_pdl=None, y_out=None",
)
