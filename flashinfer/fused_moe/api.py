# SPDX-License-Identifier: Apache-2.0
"""Configuration of a mixture-of-experts layer, and the tensors of a call. The layer is in ``layer.py``."""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Iterator, Optional

import torch

from .._compat.tllm_enums import ActivationType as ActivationType
from .._compat.tllm_enums import RoutingInputMode as RoutingInputMode
from .._compat.tllm_enums import RoutingMethodType
from .._runtime.errors import ArgumentError
from .backends import ALL_BACKEND_CONFIGS as ALL_BACKEND_CONFIGS
from .backends import MAX_SUPPORTED_TOP_EXPERTS as MAX_SUPPORTED_TOP_EXPERTS
from .backends import MAX_SUPPORTED_TOTAL_EXPERTS as MAX_SUPPORTED_TOTAL_EXPERTS
from .backends import B12xNvfp4Config as B12xNvfp4Config
from .backends import B12xW4A16Config as B12xW4A16Config
from .backends import CakeWarpDecodeConfig as CakeWarpDecodeConfig
from .backends import CudnnFrostBf16Config as CudnnFrostBf16Config
from .backends import CudnnFrostMxfp8Config as CudnnFrostMxfp8Config
from .backends import CudnnFrostMxfp8Mxfp4Config as CudnnFrostMxfp8Mxfp4Config
from .backends import CudnnFrostNvfp4Config as CudnnFrostNvfp4Config
from .backends import CuteDslConfig as CuteDslConfig
from .backends import CuTileBf16Config as CuTileBf16Config
from .backends import CuTileFp8PerTensorBf16Config as CuTileFp8PerTensorBf16Config
from .backends import CuTileFp8PerTensorConfig as CuTileFp8PerTensorConfig
from .backends import CuTileMxfp4Bf16Config as CuTileMxfp4Bf16Config
from .backends import CuTileMxfp4Config as CuTileMxfp4Config
from .backends import CuTileMxfp4Mxfp8Config as CuTileMxfp4Mxfp8Config
from .backends import CuTileMxfp8Bf16Config as CuTileMxfp8Bf16Config
from .backends import CuTileMxfp8Config as CuTileMxfp8Config
from .backends import CuTileNvfp4Bf16Config as CuTileNvfp4Bf16Config
from .backends import CuTileNvfp4Config as CuTileNvfp4Config
from .backends import CutlassBf16Config as CutlassBf16Config
from .backends import CutlassConfig as CutlassConfig
from .backends import CutlassFp8BlockConfig as CutlassFp8BlockConfig
from .backends import CutlassFp8PerTensorConfig as CutlassFp8PerTensorConfig
from .backends import CutlassHummingConfig as CutlassHummingConfig
from .backends import CutlassMxfp8Config as CutlassMxfp8Config
from .backends import CutlassMxfp8Mxfp4Config as CutlassMxfp8Mxfp4Config
from .backends import CutlassNvfp4Config as CutlassNvfp4Config
from .backends import CutlassW4A8Config as CutlassW4A8Config
from .backends import CutlassW4A16Config as CutlassW4A16Config
from .backends import PrimsTsConfig as PrimsTsConfig
from .backends import SM12xFp8Config as SM12xFp8Config
from .backends import SM12xMxfp8Mxfp4Config as SM12xMxfp8Mxfp4Config
from .backends import SM12xNvfp4Bf16Config as SM12xNvfp4Bf16Config
from .backends import SM12xNvfp4Config as SM12xNvfp4Config
from .backends import TrtllmBf16Config as TrtllmBf16Config
from .backends import TrtllmFp4Config as TrtllmFp4Config
from .backends import TrtllmFp8BlockConfig as TrtllmFp8BlockConfig
from .backends import TrtllmFp8PerTensorConfig as TrtllmFp8PerTensorConfig
from .backends import TrtllmMxInt4Config as TrtllmMxInt4Config
from .formats import GELU as GELU
from .formats import ActivationConfig as ActivationConfig
from .formats import GeGLU as GeGLU
from .formats import GeGLUTanh as GeGLUTanh
from .formats import Identity as Identity
from .formats import QuantConfig as QuantConfig
from .formats import QuantFormat as QuantFormat
from .formats import QuantVariant as QuantVariant
from .formats import ReLU as ReLU
from .formats import ReLU2 as ReLU2
from .formats import SiLU as SiLU
from .formats import SiTU as SiTU
from .formats import SwiGLU as SwiGLU
from .formats import SwiGLUStep as SwiGLUStep

__all__ = [
    "ActivationConfig",
    "BackendOptions",
    "ExecutionConfig",
    "ExpertConfig",
    "MoEActivationPack",
    "MoEConfig",
    "MoEFinalizeConfig",
    "MoEWeightPack",
    "QuantConfig",
    "QuantFormat",
    "QuantVariant",
    "RoutingConfig",
]


def _text(value: Any) -> str:
    """Return an expression for a value; the representation of an enum member is none."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


class _Printed:
    """Base of configurations whose representation can be evaluated."""

    def __repr__(self) -> str:
        parts = (f"{x.name}={_text(getattr(self, x.name))}" for x in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class RoutingConfig(_Printed):
    """Choice of the experts of each token."""

    num_experts: int
    top_k: int
    method: RoutingMethodType = RoutingMethodType.Default
    n_group: Optional[int] = None
    topk_group: Optional[int] = None
    routed_scaling_factor: Optional[float] = None


@dataclass(frozen=True, repr=False)
class ExpertConfig(_Printed):
    """Sizes of the experts, and which of them this process has."""

    intermediate_size: int
    local_expert_offset: int = 0
    local_num_experts: Optional[int] = None
    num_fused_shared_experts: int = 0


@dataclass(frozen=True, repr=False)
class MoEFinalizeConfig(_Printed):
    """Sum of the outputs of a token's experts: whether a kernel adds them, and which one."""

    do_finalize: bool = True
    use_fused_finalize: bool = True


@dataclass(frozen=True, repr=False)
class ExecutionConfig(_Printed):
    """Launch options, and the largest number of tokens that is tuned for."""

    enable_pdl: Optional[bool] = None
    tune_max_num_tokens: int = 8192


@dataclass(frozen=True, repr=False)
class BackendOptions(_Printed):
    """Backends to choose from: objects with a method ``supported(arch)``."""

    candidates: tuple[Any, ...] = ()

    def valid_for(self, arch: int) -> list[Any]:
        """Return the candidates that support an architecture, such as 90."""
        return [candidate for candidate in self.candidates if candidate.supported(arch)]

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.candidates)


@dataclass(frozen=True, repr=False)
class MoEConfig(_Printed):
    """Configuration of a layer; ``**config`` gives its fields."""

    routing: RoutingConfig
    quant: QuantConfig
    experts: ExpertConfig
    activation: ActivationConfig = ActivationConfig.swiglu
    backend: BackendOptions = BackendOptions()
    execution: ExecutionConfig = ExecutionConfig()
    finalize: MoEFinalizeConfig = MoEFinalizeConfig()

    def __post_init__(self) -> None:
        shared = self.experts.num_fused_shared_experts
        if shared and self.routing.method != RoutingMethodType.DeepSeekV3:
            raise ArgumentError(
                f"MoEConfig: num_fused_shared_experts must be 0 without DeepSeekV3 routing, got {shared} with "
                f"{self.routing.method.name}"
            )
        local, total = self.experts.local_num_experts, self.routing.num_experts
        if shared and (self.experts.local_expert_offset or local not in (None, total)):
            raise ArgumentError(
                f"MoEConfig: num_fused_shared_experts must be 0 with expert parallelism, got {shared} with {local} of "
                f"{total} experts from {self.experts.local_expert_offset} on"
            )

    def keys(self) -> list[str]:
        return [x.name for x in fields(self)]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


@dataclass
class MoEActivationPack:
    """Tokens of a call with their choice of experts, which is given or follows from ``routing_logits``."""

    hidden_states_q: torch.Tensor
    hidden_states_scale: Optional[torch.Tensor]
    topk_ids: Optional[torch.Tensor] = None
    topk_weights: Optional[torch.Tensor] = None
    _: KW_ONLY
    per_token_scale: Optional[torch.Tensor] = None
    routing_input_mode: RoutingInputMode = RoutingInputMode.PackedPrecomputed
    routing_logits: Optional[torch.Tensor] = None
    routing_bias: Optional[torch.Tensor] = None

    #: Fields that a mode needs.
    _needed: ClassVar[dict[RoutingInputMode, tuple[str, ...]]] = {
        RoutingInputMode.FromLogits: ("routing_logits",),
        RoutingInputMode.PackedPrecomputed: ("topk_ids",),
        RoutingInputMode.UnpackedPrecomputed: ("topk_ids", "topk_weights"),
    }

    def __post_init__(self) -> None:
        mode = self.routing_input_mode
        for name in self._needed[mode]:
            if getattr(self, name) is None:
                raise ArgumentError(f"MoEActivationPack: {name} must be a tensor with {mode.name}, got None")
        if mode != RoutingInputMode.FromLogits and self.routing_logits is not None:
            raise ArgumentError(f"MoEActivationPack: routing_logits must be None with {mode.name}, got a tensor")
        if self.topk_ids is not None and self.topk_ids.dtype != torch.int32:
            raise TypeError(f"MoEActivationPack: topk_ids must be torch.int32, got {self.topk_ids.dtype}")
        device = self.hidden_states_q.device
        for x in fields(self):
            value = getattr(self, x.name)
            if isinstance(value, torch.Tensor) and value.device != device:
                raise ArgumentError(f"MoEActivationPack: {x.name} must be on {device}, got {value.device}")

    @property
    def num_tokens(self) -> int:
        return self.hidden_states_q.shape[0]


@dataclass
class MoEWeightPack:
    """Weights in the form of each backend, by the backend's key."""

    native_views: dict[str, Any] = field(default_factory=dict)

    def prepare_for(self, backend_key: str, view: Any) -> None:
        """Store the weights of a backend."""
        self.native_views[backend_key] = view

    def get_view(self, backend_key: str) -> Any:
        """Return the weights of a backend; ``KeyError`` if they were not prepared."""
        if backend_key not in self.native_views:
            known = ", ".join(self.native_views) or "none"
            raise KeyError(f"MoEWeightPack: backend_key must be prepared ({known}), got {backend_key!r}")
        return self.native_views[backend_key]
