# SPDX-License-Identifier: Apache-2.0
"""Constants of all-reduce fused with subsequent operations. Classes of plain integers, which pass through torch ops."""

from __future__ import annotations

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "QuantizationSFLayout",
    "compute_fp4_swizzled_layout_sf_size",
]


class AllReduceStrategyType:
    """Names of algorithms in published calls."""

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6


class AllReduceStrategyConfig:
    """Flags of algorithms in published calls."""

    USE_MEMCPY = 1
    PUSH_MODE = 2


class AllReduceFusionOp:
    """Names of fused operations in older published calls."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = 6
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = 7
    MOE_ALLREDUCE_RESIDUAL_RMS_NORM = 8
    MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM = 9


class AllReduceFusionPattern:
    """Fused operations after the sum: residual addition, RMS norm, quantisation; ``Out`` also returns the norm."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout:
    """Order of the scales that a fused quantisation writes."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Return the number of scales of ``total_row`` x ``total_column`` scales in tiles of 128 x 4.

    Examples
    --------
    >>> flashinfer.comm.compute_fp4_swizzled_layout_sf_size(129, 5)
    2048
    """
    return -(-total_row // 128) * 128 * (-(-total_column // 4) * 4)
