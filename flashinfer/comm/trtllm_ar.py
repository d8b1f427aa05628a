# SPDX-License-Identifier: Apache-2.0
"""Constants of all-reduce fused with subsequent operations."""

from __future__ import annotations

__all__ = ["AllReduceFusionPattern", "QuantizationSFLayout"]


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


class QuantizationSFLayout:
    """Order of the scales that a fused quantisation writes."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2
