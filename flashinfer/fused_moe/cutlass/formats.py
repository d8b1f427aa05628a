# SPDX-License-Identifier: Apache-2.0
"""Formats of weights of ``cutlass_fused_moe``, and where each finds its scales in ``quant_scales``."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Optional, Sequence

import torch

from ..._runtime.errors import ArgumentError

__all__ = ["NO_SCALES", "PICK_SCALES", "Format", "Scales", "format_of", "name_of", "scales_of", "sharing_ranks"]

OptionalTensor = Optional[torch.Tensor]


class Format:
    """Numbers of ``Format`` in include/flashinfer/moe/layer.h."""

    PLAIN, FP8_TENSOR, FP8_BLOCK, MXFP4, INT4_FP8, MXFP4_FP8 = range(6)


def name_of(format: int) -> str:
    """Return the name of a format in lower case."""
    return next(name.lower() for name, value in vars(Format).items() if value == format)


#: Scales of weights, factors of each expert's accumulators, and factors of operands before their rounding, of GEMM 1
#: and 2: scale1, scale2, factor1, factor2, quant1, quant2.
Scales = tuple[OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor]
_NONE = -1

#: Length of ``quant_scales`` and the positions of :data:`Scales` in it; -1 is None, which is put behind it.
_POSITIONS = {
    Format.PLAIN: (0, (_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)),
    Format.FP8_TENSOR: (4, (_NONE, _NONE, 0, 2, _NONE, 1)),
    Format.FP8_BLOCK: (2, (0, 1, _NONE, _NONE, _NONE, _NONE)),
    Format.MXFP4: (2, (0, 1, _NONE, _NONE, _NONE, _NONE)),
    Format.INT4_FP8: (8, (0, 1, 6, 7, 2, 3)),
    Format.MXFP4_FP8: (5, (0, 3, 1, 4, _NONE, _NONE)),
}


NO_SCALES: Scales = (None, None, None, None, None, None)
#: Function by format that returns the :data:`Scales` of ``(*quant_scales, None)`` in 0.3 us, where :func:`scales_of`
#: takes 2.8. Not for code that torch.compile traces.
PICK_SCALES: dict[int, Any] = {format: itemgetter(*positions) for format, (_, positions) in _POSITIONS.items()}
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
    """Return the scales of a format, or raise for another number of them."""
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
    expected, positions = _POSITIONS[format]
    if count != expected:
        raise ArgumentError(f"cutlass_fused_moe: quant_scales must have {expected} tensors, got {count}")
    given = quant_scales or ()
    return tuple(None if i == _NONE else given[i] for i in positions)  # type: ignore[return-value]
