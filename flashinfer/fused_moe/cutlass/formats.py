# SPDX-License-Identifier: Apache-2.0
"""Formats of weights of ``cutlass_fused_moe``, and where each finds its scales in ``quant_scales``."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch

from ..._runtime.errors import ArgumentError

__all__ = ["Format", "Scales", "format_of", "scales_of", "sharing_ranks"]

OptionalTensor = Optional[torch.Tensor]


class Format:
    """Numbers of ``Format`` in include/flashinfer/moe/layer.h."""

    PLAIN, FP8_TENSOR, FP8_BLOCK, MXFP4, INT4_FP8, MXFP4_FP8 = range(6)


class Scales(NamedTuple):
    """Scales of weights, factors of each expert's sums, and factors of operands before their rounding; 1 and 2."""

    scale1: OptionalTensor = None
    scale2: OptionalTensor = None
    factor1: OptionalTensor = None
    factor2: OptionalTensor = None
    quant1: OptionalTensor = None
    quant2: OptionalTensor = None


#: Length of ``quant_scales`` and the positions of :class:`Scales` in it; -1: the format has no such scale.
_POSITIONS = {
    Format.FP8_TENSOR: (4, (-1, -1, 0, 2, -1, 1)),
    Format.FP8_BLOCK: (2, (0, 1, -1, -1, -1, -1)),
    Format.MXFP4: (2, (0, 1, -1, -1, -1, -1)),
    Format.INT4_FP8: (8, (0, 1, 6, 7, 2, 3)),
    Format.MXFP4_FP8: (5, (0, 3, 1, 4, -1, -1)),
}
_NO_SCALES = Scales()
_SCALES_OF_NVFP4 = 6


def format_of(
    weight_dtype: torch.dtype,
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    use_packed_weights: bool,
    use_wfp4afp8_humming: bool,
) -> int:
    """Return the format that flags and the dtype of weights select."""
    if use_deepseek_fp8_block_scale:
        return Format.FP8_BLOCK
    if use_w4_group_scaling:
        if use_wfp4afp8_humming:
            return Format.MXFP4_FP8
        return Format.INT4_FP8 if use_packed_weights else Format.MXFP4
    return Format.FP8_TENSOR if weight_dtype is torch.float8_e4m3fn else Format.PLAIN


def sharing_ranks(ep_size: int, enable_alltoall: bool, experts: torch.Tensor) -> int:
    """Return how many ranks share the ``(tokens, top_k)`` experts: one of each token that was sent is of this rank."""
    return min((ep_size, *experts.shape[1:])) if enable_alltoall else ep_size


def scales_of(format: int, quant_scales: Optional[Sequence[torch.Tensor]]) -> Scales:
    """Return the scales of a format by name."""
    count = len(quant_scales) if quant_scales else 0
    if format == Format.PLAIN:
        if count == _SCALES_OF_NVFP4:
            raise NotImplementedError(
                "cutlass_fused_moe: fc1_expert_weights must be 16-bit, e4m3, MXFP4 or int4, got the 6 quant_scales of "
                "NVFP4, which needs Blackwell"
            )
        if count:
            raise ArgumentError(
                f"cutlass_fused_moe: quant_scales must be empty for 16-bit weights, got {count} tensors"
            )
        return _NO_SCALES
    expected, positions = _POSITIONS[format]
    if count != expected or quant_scales is None:
        raise ArgumentError(f"cutlass_fused_moe: quant_scales must have {expected} tensors, got {count}")
    return Scales(*(None if i < 0 else quant_scales[i] for i in positions))
