# SPDX-License-Identifier: Apache-2.0
"""Number formats and activations of a mixture-of-experts layer, one class for each activation."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Optional

from .._compat.tllm_enums import ActivationType, is_gated_activation
from .._runtime.errors import ArgumentError

__all__ = [
    "GELU",
    "ActivationConfig",
    "GeGLU",
    "GeGLUTanh",
    "Identity",
    "QuantConfig",
    "QuantFormat",
    "QuantVariant",
    "ReLU",
    "ReLU2",
    "SiLU",
    "SiTU",
    "SwiGLU",
    "SwiGLUStep",
    "formats_of",
]

_LARGEST = 3.4028234663852886e38  # largest float32


class QuantFormat(enum.Enum):
    """Number format of one operand: weights, activations or the output."""

    BF16 = 0
    FP16 = 1
    FP8PerTensor = 2
    DeepSeekFp8 = 3
    MXFP8 = 4
    NVFP4 = 5
    MXFP4 = 6
    MXINT4 = 7
    INT4 = 8

    def __repr__(self) -> str:
        return f"QuantFormat.{self.name}"


class QuantVariant(enum.IntEnum):
    """Number formats of weights and activations together, as releases up to 0.6.18 name them."""

    BF16 = 0
    FP8PerTensor = 1
    DeepSeekFp8 = 2
    MxFp8 = 3
    NVFP4 = 4
    MXFP4 = 5
    MxInt4 = 6
    W4A16 = 7


_PAIRS = {
    QuantVariant.BF16: (QuantFormat.BF16, QuantFormat.BF16),
    QuantVariant.FP8PerTensor: (QuantFormat.FP8PerTensor, QuantFormat.FP8PerTensor),
    QuantVariant.DeepSeekFp8: (QuantFormat.DeepSeekFp8, QuantFormat.DeepSeekFp8),
    QuantVariant.MxFp8: (QuantFormat.MXFP8, QuantFormat.MXFP8),
    QuantVariant.NVFP4: (QuantFormat.NVFP4, QuantFormat.NVFP4),
    QuantVariant.MXFP4: (QuantFormat.MXFP4, QuantFormat.MXFP4),
    QuantVariant.MxInt4: (QuantFormat.MXINT4, QuantFormat.BF16),
    QuantVariant.W4A16: (QuantFormat.MXFP4, QuantFormat.BF16),
}
_VARIANTS = {pair: variant for variant, pair in _PAIRS.items()}


def formats_of(variant: QuantVariant) -> tuple[QuantFormat, QuantFormat]:
    """Return the formats of weights and activations that an older name stands for."""
    return _PAIRS[variant]


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"


_UNSET: Any = _Unset()


@dataclass(frozen=True, init=False, repr=False)
class QuantConfig:
    """Formats of weights, activations and output, and the form of their scale factors.

    The form of releases up to 0.6.18 is accepted: ``QuantConfig(QuantVariant.W4A16)``, or ``variant=`` by name.
    """

    weight: QuantFormat
    activation: QuantFormat
    output: QuantFormat
    swizzled_scale_factors: Optional[bool]
    per_token_scale: Optional[bool]
    nvfp4_4over6: Any

    def __init__(
        self,
        weight: Any = QuantFormat.BF16,
        activation: Any = QuantFormat.BF16,
        output: Any = QuantFormat.BF16,
        *,
        swizzled_scale_factors: Optional[bool] = None,
        per_token_scale: Optional[bool] = None,
        nvfp4_4over6: Any = _UNSET,
        variant: Optional[QuantVariant] = None,
    ) -> None:
        if isinstance(weight, QuantVariant):  # the older form, whose next arguments were the scale factors
            given = [value for value in (activation, output) if not isinstance(value, QuantFormat)]
            swizzled_scale_factors = given[0] if given else swizzled_scale_factors
            per_token_scale = given[1] if len(given) > 1 else per_token_scale
            variant, output = weight, QuantFormat.BF16
        if variant is not None:
            weight, activation = _PAIRS[QuantVariant(variant)]
        for name, value in (("weight", weight), ("activation", activation), ("output", output)):
            if not isinstance(value, QuantFormat):
                raise TypeError(f"QuantConfig: {name} must be a QuantFormat, got {value!r}")
        if nvfp4_4over6 is not _UNSET and activation is not QuantFormat.NVFP4:
            raise ArgumentError(
                f"QuantConfig: nvfp4_4over6 applies only to activation=QuantFormat.NVFP4, got {activation!r}"
            )
        values = (weight, activation, output, swizzled_scale_factors, per_token_scale, nvfp4_4over6)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def pair(self) -> tuple[QuantFormat, QuantFormat]:
        """Formats of weights and activations."""
        return self.weight, self.activation

    @property
    def variant(self) -> Optional[QuantVariant]:
        """The older name of the pair; None for a pair without one."""
        return _VARIANTS.get(self.pair)

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.nvfp4_4over6 is _UNSET:
            del given["nvfp4_4over6"]
        return f"QuantConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class _OfType(type):
    """Lets a call of the base class with a type make the class of that type."""

    def __call__(cls, *given: Any, **by_name: Any) -> Any:
        if cls.__name__ != "ActivationConfig":
            return super().__call__(*given, **by_name)
        kind = given[0] if given else by_name.get("type")
        if kind not in _OF_TYPE:
            raise TypeError(f"ActivationConfig: construct a typed activation, or give an ActivationType, got {kind!r}")
        return _OF_TYPE[kind]()


@dataclass(frozen=True)
class ActivationConfig(metaclass=_OfType):
    """Activation between the two products of an expert: one of the classes below.

    ``ActivationConfig(ActivationType.Relu2)``, the form of releases up to 0.6.18, gives the class of that type.
    """

    type: ClassVar[ActivationType]
    swiglu: ClassVar[ActivationConfig]
    geglu: ClassVar[ActivationConfig]
    relu2: ClassVar[ActivationConfig]
    identity: ClassVar[ActivationConfig]

    @property
    def is_gated(self) -> bool:
        """Tell whether one half of the columns gates the other."""
        return is_gated_activation(self.type)

    def _check_numbers(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if value is None and (type(self).__name__, field.name) == ("SiTU", "linear_scale"):
                continue
            what = f"{type(self).__name__}: {field.name}"
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ArgumentError(f"{what} must be a finite scalar, got {value!r}")
            if value <= 0 and field.name != "beta":
                raise ArgumentError(f"{what} must be positive, got {value!r}")


@dataclass(frozen=True)
class SwiGLU(ActivationConfig):
    """``gate * sigmoid(alpha * gate) * (linear + beta)``; gate is at most ``limit``, linear between both limits."""

    type: ClassVar[ActivationType] = ActivationType.Swiglu
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = _LARGEST

    def __post_init__(self) -> None:
        self._check_numbers()


@dataclass(frozen=True)
class SiTU(ActivationConfig):
    """SwiGLU whose gate and linear part are bounded smoothly by ``gate_scale`` and ``linear_scale``."""

    type: ClassVar[ActivationType] = ActivationType.Situ
    gate_scale: float = 4.0
    linear_scale: Optional[float] = 25.0
    clamp_limit: Optional[float] = None

    def __post_init__(self) -> None:
        self._check_numbers()


@dataclass(frozen=True)
class SwiGLUStep(ActivationConfig):
    """SwiGLU with both parts limited after the sigmoid."""

    type: ClassVar[ActivationType] = ActivationType.SwigluStep
    limit: float = 7.0

    def __post_init__(self) -> None:
        self._check_numbers()


def _plain(name: str, kind: ActivationType, doc: str) -> Any:
    made = _OfType(name, (ActivationConfig,), {"type": kind, "__doc__": doc, "__module__": __name__})
    return dataclass(frozen=True)(made)


GeGLU = _plain("GeGLU", ActivationType.Geglu, "``gelu(gate) * linear``.")
GeGLUTanh = _plain("GeGLUTanh", ActivationType.GegluTanh, "GeGLU by the approximation with tanh.")
ReLU2 = _plain("ReLU2", ActivationType.Relu2, "The square of what is positive.")
Identity = _plain("Identity", ActivationType.Identity, "The value itself.")
GELU = _plain("GELU", ActivationType.Gelu, "``x * Phi(x)``.")
ReLU = _plain("ReLU", ActivationType.Relu, "What is positive.")
SiLU = _plain("SiLU", ActivationType.Silu, "``x * sigmoid(x)``.")
_SwiGLUBias = _plain("_SwiGLUBias", ActivationType.SwigluBias, "SwiGLU with a bias, by its type alone.")

_OF_TYPE: dict[Any, Any] = {
    one.type: one
    for one in (SwiGLU, SiTU, SwiGLUStep, GeGLU, GeGLUTanh, ReLU2, Identity, GELU, ReLU, SiLU, _SwiGLUBias)
}

ActivationConfig.swiglu = SwiGLU()
ActivationConfig.geglu = GeGLU()
ActivationConfig.relu2 = ReLU2()
ActivationConfig.identity = Identity()
