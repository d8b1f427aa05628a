# SPDX-License-Identifier: Apache-2.0
"""Enumerations that callers of MoE and GEMM kernels pass, and properties of their dtypes."""

from __future__ import annotations

import enum
from typing import Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..quantization.layout import SfLayout as SfLayout

__all__ = ["ActivationType", "RoutingMethodType", "is_gated_activation"]

DEFAULT_SWIGLU_ALPHA = 1.0
DEFAULT_SWIGLU_BETA = 0.0
DEFAULT_SWIGLU_LIMIT = torch.finfo(torch.float32).max
DEFAULT_SITU_BETA = 4.0
DEFAULT_SITU_LINEAR_BETA = 25.0


class _Readable(enum.IntEnum):
    """An IntEnum whose ``repr`` is an expression for the member."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class RoutingMethodType(_Readable):
    """Routing methods: selection of experts from router logits ``l``, and the weight of a selected expert."""

    Default = 0  #: top-k of softmax(l); softmax(l)
    Renormalize = 1  #: top-k of l; softmax over the selected
    DeepSeekV3 = 2  #: groups of experts by sigmoid(l) + bias; normalised sigmoid
    Llama4 = 3  #: top-1 of l; sigmoid(l), applied to the input of the expert
    RenormalizeNaive = 4  #: top-k of softmax(l); softmax(l) normalised over the selected
    TopK = 5  #: top-k of l; l
    SigmoidRenorm = 6  #: top-k of sigmoid(l); normalised
    MiniMax2 = 7  #: top-k of sigmoid(l) + bias; normalised sigmoid(l)
    Sigmoid = 8  #: top-k of sigmoid(l); sigmoid(l)
    TopKSigmoid = 9  #: top-k of l; sigmoid(l)
    Unspecified = 10


class RoutingInputMode(enum.IntEnum):
    """Inputs of a MoE kernel: router logits, or experts chosen before, packed with their weights or separate."""

    FromLogits = 0
    PackedPrecomputed = 1
    UnpackedPrecomputed = 2


class ActivationType(_Readable):
    """The activation between the two matrix products of an expert."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11

    @property
    def is_gated(self) -> bool:
        """True if the first product has two halves, one of which gates the other."""
        return self in _GATED


_GATED = frozenset(
    (
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.SwigluBias,
        ActivationType.SwigluStep,
        ActivationType.GegluTanh,
        ActivationType.Situ,
    )
)


class WeightLayout(enum.IntEnum):
    """Order of a weight ``(Mn, K)``: rows of K, rows of Mn, or ``(K / block, Mn, block)`` with blocks of 128 bytes."""

    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2


class GatedActType(enum.IntEnum):
    """Gated activations, under the names that older callers use."""

    SwiGlu = 0
    GeGlu = 1


class Fp8QuantizationType(enum.IntEnum):
    """Block scales of FP8 weights: none, float32 for 128 x 128, or a power of two for 32 elements."""

    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2


def _dtype(uid: int, is_block: int, is_signed: int, is_integer: int, bits: int) -> int:
    return is_block << 24 | is_signed << 20 | is_integer << 16 | bits << 8 | uid


class DtypeTrtllmGen(enum.IntEnum):
    """Element types with their properties in the number: has blocks, has a sign, is an integer, bits, identifier."""

    Bfloat16 = _dtype(0, 0, 1, 0, 16)
    Bool = _dtype(1, 0, 0, 1, 1)
    E2m1 = _dtype(2, 1, 1, 0, 4)
    E2m3 = _dtype(3, 1, 1, 0, 6)
    E3m2 = _dtype(4, 1, 1, 0, 6)
    E4m3 = _dtype(5, 0, 1, 0, 8)
    E5m2 = _dtype(6, 0, 1, 0, 8)
    Fp16 = _dtype(7, 0, 1, 0, 16)
    Fp32 = _dtype(8, 0, 1, 0, 32)
    Int8 = _dtype(9, 0, 1, 1, 8)
    Int32 = _dtype(10, 0, 1, 1, 32)
    Int64 = _dtype(11, 0, 1, 1, 64)
    MxE2m1 = _dtype(12, 1, 1, 0, 4)
    MxE4m3 = _dtype(13, 1, 1, 0, 8)
    MxInt4 = _dtype(14, 1, 1, 1, 4)
    UE8m0 = _dtype(15, 0, 0, 0, 8)
    UInt8 = _dtype(16, 0, 0, 1, 8)
    UInt16 = _dtype(17, 0, 0, 1, 16)
    UInt32 = _dtype(18, 0, 0, 1, 32)
    UInt64 = _dtype(19, 0, 0, 1, 64)
    UInt128 = _dtype(20, 0, 0, 1, 128)
    Void = _dtype(21, 0, 1, 0, 0)


def normalize_activation_type(activation_type: Union[int, ActivationType]) -> ActivationType:
    """Return the member for a number or a member; ValueError for anything else."""
    try:
        return ActivationType(activation_type)
    except ValueError:
        raise ArgumentError(
            f"normalize_activation_type: Unsupported activation_type: must be an ActivationType or its number, "
            f"got {activation_type!r}"
        ) from None


def is_gated_activation(activation_type: Union[int, ActivationType]) -> bool:
    """Return True if an activation is gated: Swiglu, Geglu, SwigluBias, SwigluStep, GegluTanh, Situ."""
    return normalize_activation_type(activation_type).is_gated


def trtllm_gen_dtype_has_scale(dtype: DtypeTrtllmGen) -> bool:
    """Return True if tensors of the type come with block scales."""
    return dtype in (DtypeTrtllmGen.E2m1, DtypeTrtllmGen.MxE2m1, DtypeTrtllmGen.MxE4m3, DtypeTrtllmGen.MxInt4)


def deduce_trtllm_gen_tensor_dtype(x: torch.Tensor, scale: Optional[torch.Tensor]) -> DtypeTrtllmGen:
    """Name the type of a tensor and its block scales; uint8 is E2m1 with a scale for 16 elements, else MxE2m1."""
    if x.dtype == torch.bfloat16:
        return DtypeTrtllmGen.Bfloat16
    if x.dtype == torch.float8_e4m3fn:
        return DtypeTrtllmGen.E4m3 if scale is None else DtypeTrtllmGen.MxE4m3
    if x.dtype == torch.uint8:
        if scale is None:
            raise ArgumentError("deduce_trtllm_gen_tensor_dtype: scale must be a tensor for packed FP4, got None")
        return DtypeTrtllmGen.E2m1 if scale.numel() == 2 * x.numel() // 16 else DtypeTrtllmGen.MxE2m1
    raise ArgumentError(
        f"deduce_trtllm_gen_tensor_dtype: x must be bfloat16, float8_e4m3fn or uint8 (packed FP4), got {x.dtype}"
    )
