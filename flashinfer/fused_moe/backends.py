# SPDX-License-Identifier: Apache-2.0
"""Backends that a layer of experts can choose from: where each runs, and the form of its weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Optional

import torch

from .._runtime.errors import ArgumentError
from .formats import ActivationConfig
from .prepare import (
    fp8_tensor_activations,
    prepare_bf16_weights,
    prepare_fp8_block_weights,
    prepare_fp8_tensor_weights,
    prepare_humming_weights,
    prepare_w4a8_weights,
    prepare_w4a16_weights,
)

__all__ = [
    "ALL_BACKEND_CONFIGS",
    "MAX_SUPPORTED_TOP_EXPERTS",
    "MAX_SUPPORTED_TOTAL_EXPERTS",
    "B12xNvfp4Config",
    "B12xW4A16Config",
    "CakeWarpDecodeConfig",
    "CuTileBf16Config",
    "CuTileFp8PerTensorBf16Config",
    "CuTileFp8PerTensorConfig",
    "CuTileMxfp4Bf16Config",
    "CuTileMxfp4Config",
    "CuTileMxfp4Mxfp8Config",
    "CuTileMxfp8Bf16Config",
    "CuTileMxfp8Config",
    "CuTileNvfp4Bf16Config",
    "CuTileNvfp4Config",
    "CudnnFrostBf16Config",
    "CudnnFrostMxfp8Config",
    "CudnnFrostMxfp8Mxfp4Config",
    "CudnnFrostNvfp4Config",
    "CuteDslConfig",
    "CutlassBf16Config",
    "CutlassConfig",
    "CutlassFp8BlockConfig",
    "CutlassFp8PerTensorConfig",
    "CutlassHummingConfig",
    "CutlassMxfp8Config",
    "CutlassMxfp8Mxfp4Config",
    "CutlassNvfp4Config",
    "CutlassW4A16Config",
    "CutlassW4A8Config",
    "PrimsTsConfig",
    "SM12xFp8Config",
    "SM12xMxfp8Mxfp4Config",
    "SM12xNvfp4Bf16Config",
    "SM12xNvfp4Config",
    "TrtllmBf16Config",
    "TrtllmFp4Config",
    "TrtllmFp8BlockConfig",
    "TrtllmFp8PerTensorConfig",
    "TrtllmMxInt4Config",
]

#: Limits that published runners state; the kernels of this package have none that is lower.
MAX_SUPPORTED_TOP_EXPERTS = 32
MAX_SUPPORTED_TOTAL_EXPERTS = 512

_SM89_AND_LATER = frozenset({89, 90, 100, 103, 107, 110, 120, 121})


@dataclass(frozen=True)
class _Backend:
    """A backend: its key in :class:`MoEWeightPack`, and the architectures that it runs on."""

    key: ClassVar[str] = ""
    archs: ClassVar[frozenset[int]] = frozenset()
    runs_on_cpu: ClassVar[bool] = False
    #: What is missing, for backends that never run here.
    lacks: ClassVar[Optional[str]] = None

    @classmethod
    def supported(cls, arch: int) -> bool:
        """Tell whether the backend runs on an architecture, such as 90."""
        return arch in cls.archs


@dataclass(frozen=True)
class _FromBf16(_Backend):
    """A backend whose weights are made from bfloat16 ones, whatever the calibration."""

    runs_on_cpu: ClassVar[bool] = True
    _prepare: ClassVar[Callable[..., dict[str, torch.Tensor]]]

    @classmethod
    def prepare_weights(
        cls,
        w1_bf16: torch.Tensor,
        w2_bf16: torch.Tensor,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Optional[ActivationConfig] = None,
        device: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Return the view of the weights in the form of the backend.

        Parameters
        ----------
        w1_bf16 : torch.Tensor
            ``(num_local_experts, 2 * intermediate_size, hidden_size)`` bfloat16, rows [up ; gate]; half as many rows
            if ``activation`` is not gated.
        w2_bf16 : torch.Tensor
            ``(num_local_experts, hidden_size, intermediate_size)`` bfloat16.
        num_local_experts, hidden_size, intermediate_size : int
            Sizes that the weights must have; multiples of 128 for weights of four bits.
        activation : Optional[ActivationConfig]
            The activation of the layer; None: SwiGLU.
        device : Any
            Where the view is; None: where the weights are.
        """
        sizes = (num_local_experts, hidden_size, intermediate_size)
        return cls._prepare(f"{cls.__name__}.prepare_weights", w1_bf16, w2_bf16, sizes, activation, device)


@dataclass(frozen=True)
class CutlassBf16Config(_FromBf16):
    """``cutlass_fused_moe`` with bfloat16 weights."""

    key: ClassVar[str] = "cutlass_bf16"
    archs: ClassVar[frozenset[int]] = _SM89_AND_LATER
    _prepare: ClassVar[Any] = staticmethod(prepare_bf16_weights)


@dataclass(frozen=True)
class CutlassFp8BlockConfig(_FromBf16):
    """``cutlass_fused_moe`` with e4m3 weights in blocks of 128 x 128, and tokens quantised by 1 x 128."""

    key: ClassVar[str] = "cutlass_fp8_block"
    archs: ClassVar[frozenset[int]] = frozenset({90})
    _prepare: ClassVar[Any] = staticmethod(prepare_fp8_block_weights)


@dataclass(frozen=True)
class CutlassW4A16Config(_FromBf16):
    """``cutlass_fused_moe`` with MXFP4 weights and bfloat16 activations."""

    key: ClassVar[str] = "cutlass_w4a16"
    archs: ClassVar[frozenset[int]] = frozenset({90})
    _prepare: ClassVar[Any] = staticmethod(prepare_w4a16_weights)


@dataclass(frozen=True)
class CutlassW4A8Config(_FromBf16):
    """``cutlass_fused_moe`` with int4 weights in groups of 128, and activations rounded to e4m3."""

    key: ClassVar[str] = "cutlass_w4a8"
    archs: ClassVar[frozenset[int]] = frozenset({90})
    _prepare: ClassVar[Any] = staticmethod(prepare_w4a8_weights)


@dataclass(frozen=True)
class CutlassHummingConfig(_FromBf16):
    """``cutlass_fused_moe`` with MXFP4 weights and rows of activations quantised to e4m3."""

    key: ClassVar[str] = "cutlass_humming"
    archs: ClassVar[frozenset[int]] = frozenset({90})
    _prepare: ClassVar[Any] = staticmethod(prepare_humming_weights)


@dataclass(frozen=True)
class CutlassFp8PerTensorConfig(_Backend):
    """``cutlass_fused_moe`` with e4m3 weights that have one scale per expert, and one scale for all tokens."""

    key: ClassVar[str] = "cutlass_fp8_per_tensor"
    archs: ClassVar[frozenset[int]] = _SM89_AND_LATER
    runs_on_cpu: ClassVar[bool] = True

    @classmethod
    def prepare_weights(
        cls,
        w1_bf16: torch.Tensor,
        w2_bf16: torch.Tensor,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_states_scale_global: Any,
        intermediate_scale_global: Any,
        activation: Optional[ActivationConfig] = None,
        device: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Return the view of the weights, quantised to e4m3 with 448 over the largest magnitude of an expert.

        Parameters
        ----------
        hidden_states_scale_global, intermediate_scale_global : Union[float, torch.Tensor]
            Factors by which tokens, and hidden values between the products, are multiplied before they are rounded to
            e4m3; 448 over the largest magnitude uses the whole range.
        w1_bf16, w2_bf16, num_local_experts, hidden_size, intermediate_size, activation, device
            As for the other backends.
        """
        sizes = (num_local_experts, hidden_size, intermediate_size)
        scales = (hidden_states_scale_global, intermediate_scale_global)
        return prepare_fp8_tensor_weights(
            f"{cls.__name__}.prepare_weights", w1_bf16, w2_bf16, sizes, activation, device, *scales
        )

    @classmethod
    def prepare_activations(cls, hidden_states_bf16: torch.Tensor, *, hidden_states_scale_global: Any) -> torch.Tensor:
        """Return tokens times the factor in e4m3, saturated: ``hidden_states_q`` of a pack."""
        return fp8_tensor_activations(
            f"{cls.__name__}.prepare_activations", hidden_states_bf16, hidden_states_scale_global
        )


@dataclass(frozen=True)
class CuTileBf16Config(CutlassBf16Config):
    """The published backend in ``cuda.tile`` with bfloat16 weights; kernels of this package compute it."""

    key: ClassVar[str] = "cutile_bf16"
    archs: ClassVar[frozenset[int]] = frozenset({89, 90, 120, 121})


@dataclass(frozen=True)
class CuTileFp8PerTensorConfig(CutlassFp8PerTensorConfig):
    """The published backend in ``cuda.tile`` with e4m3 per tensor; kernels of this package compute it."""

    key: ClassVar[str] = "cutile_fp8_per_tensor"
    archs: ClassVar[frozenset[int]] = frozenset({89, 90, 120, 121})


class CutlassConfig(_Backend):
    """Name of a backend that was replaced by :class:`CutlassBf16Config` and :class:`CutlassW4A16Config`."""

    key: ClassVar[str] = "cutlass"
    lacks = "a choice between CutlassBf16Config and CutlassW4A16Config, which replaced it"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "CutlassConfig is deprecated and supports nothing: use CutlassBf16Config or CutlassW4A16Config",
            DeprecationWarning,
            stacklevel=2,
        )


_BLACKWELL = "a Blackwell GPU and kernels for it, which this package does not have"


class _BlackwellBackend(_Backend):
    """Backend whose name can be configured, and that supports nothing here."""

    lacks = _BLACKWELL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "arguments", (args, kwargs))

    @classmethod
    def prepare_weights(cls, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(f"{cls.__name__}: backend must be one that runs here: it needs {_BLACKWELL}")


def _blackwell(name: str, key: str) -> type[_BlackwellBackend]:
    text = f"Not available here: needs {_BLACKWELL}."
    made = type(name, (_BlackwellBackend,), {"key": key, "__doc__": text, "__module__": __name__})
    return dataclass(frozen=True, init=False)(made)


B12xNvfp4Config = _blackwell("B12xNvfp4Config", "b12x_nvfp4")
B12xW4A16Config = _blackwell("B12xW4A16Config", "b12x_w4a16")
CakeWarpDecodeConfig = _blackwell("CakeWarpDecodeConfig", "cake_warp_decode")
CuTileFp8PerTensorBf16Config = _blackwell("CuTileFp8PerTensorBf16Config", "cutile_fp8_per_tensor_bf16")
CuTileMxfp4Bf16Config = _blackwell("CuTileMxfp4Bf16Config", "cutile_mxfp4_bf16")
CuTileMxfp4Config = _blackwell("CuTileMxfp4Config", "cutile_mxfp4")
CuTileMxfp4Mxfp8Config = _blackwell("CuTileMxfp4Mxfp8Config", "cutile_mxfp4_mxfp8")
CuTileMxfp8Bf16Config = _blackwell("CuTileMxfp8Bf16Config", "cutile_mxfp8_bf16")
CuTileMxfp8Config = _blackwell("CuTileMxfp8Config", "cutile_mxfp8")
CuTileNvfp4Bf16Config = _blackwell("CuTileNvfp4Bf16Config", "cutile_nvfp4_bf16")
CuTileNvfp4Config = _blackwell("CuTileNvfp4Config", "cutile_nvfp4")
CudnnFrostBf16Config = _blackwell("CudnnFrostBf16Config", "cudnn_frost_bf16")
CudnnFrostMxfp8Config = _blackwell("CudnnFrostMxfp8Config", "cudnn_frost_mxfp8")
CudnnFrostMxfp8Mxfp4Config = _blackwell("CudnnFrostMxfp8Mxfp4Config", "cudnn_frost_mxfp8_mxfp4")
CudnnFrostNvfp4Config = _blackwell("CudnnFrostNvfp4Config", "cudnn_frost_nvfp4")
CuteDslConfig = _blackwell("CuteDslConfig", "cute_dsl_nvfp4")
CutlassMxfp8Config = _blackwell("CutlassMxfp8Config", "cutlass_mxfp8")
CutlassMxfp8Mxfp4Config = _blackwell("CutlassMxfp8Mxfp4Config", "cutlass_mxfp8_mxfp4")
CutlassNvfp4Config = _blackwell("CutlassNvfp4Config", "cutlass_nvfp4")
PrimsTsConfig = _blackwell("PrimsTsConfig", "prims_ts")
SM12xFp8Config = _blackwell("SM12xFp8Config", "sm12x_fp8")
SM12xMxfp8Mxfp4Config = _blackwell("SM12xMxfp8Mxfp4Config", "sm12x_mxfp8_mxfp4")
SM12xNvfp4Bf16Config = _blackwell("SM12xNvfp4Bf16Config", "sm12x_nvfp4_bf16")
SM12xNvfp4Config = _blackwell("SM12xNvfp4Config", "sm12x_nvfp4")
TrtllmBf16Config = _blackwell("TrtllmBf16Config", "trtllm_bf16")
TrtllmFp4Config = _blackwell("TrtllmFp4Config", "trtllm_fp4")
TrtllmFp8BlockConfig = _blackwell("TrtllmFp8BlockConfig", "trtllm_fp8_block")
TrtllmFp8PerTensorConfig = _blackwell("TrtllmFp8PerTensorConfig", "trtllm_fp8_per_tensor")
TrtllmMxInt4Config = _blackwell("TrtllmMxInt4Config", "trtllm_mxint4")

#: Every backend that can be configured; those that never run here say so by ``supported``.
ALL_BACKEND_CONFIGS: tuple[type[_Backend], ...] = tuple(
    globals()[name] for name in __all__ if name.endswith("Config") and name != "CutlassConfig"
)
