# SPDX-License-Identifier: Apache-2.0
"""Base class of the backends of a layer of experts: lifecycle, support, and the steps of a tuned call."""

from __future__ import annotations

import functools
from typing import Any, Callable, ClassVar, Hashable, Iterable, Union

import torch

from .._compat.tllm_enums import RoutingInputMode
from ..autotuner import TunableRunner, TuningConfig
from .api import MoEActivationPack, MoEWeightPack
from .formats import ActivationConfig, QuantConfig, QuantFormat, QuantVariant, formats_of

__all__ = ["FormatPairs", "MoERunner", "unpack_topk"]

_Pair = tuple[QuantFormat, QuantFormat]


class FormatPairs(frozenset[Any]):
    """Pairs of formats of weights and activations; a :class:`QuantVariant` is a member if its pair is."""

    def __contains__(self, quant: object) -> bool:
        return super().__contains__(formats_of(quant) if isinstance(quant, QuantVariant) else quant)


def pairs(*given: Union[_Pair, QuantVariant]) -> FormatPairs:
    """Return a set of pairs; an older name stands for its pair."""
    return FormatPairs(formats_of(quant) if isinstance(quant, QuantVariant) else quant for quant in given)


class MoERunner(TunableRunner):
    """A backend of :class:`flashinfer.fused_moe.MoELayer` with its configuration, on one device."""

    #: Key of the weights in :class:`MoEWeightPack`, and keys of other backends whose weights have the same form.
    backend_key: ClassVar[str] = ""
    weight_view_aliases: ClassVar[tuple[str, ...]] = ()
    #: Ways of giving the choice of experts.
    supported_routing_modes: ClassVar[frozenset[RoutingInputMode]] = frozenset()
    supported_quant_variants: ClassVar[Iterable[Any]] = FormatPairs()
    supported_output_formats: ClassVar[frozenset[QuantFormat]] = frozenset({QuantFormat.BF16})
    supported_activation_classes: ClassVar[tuple[type[ActivationConfig], ...]] = ()
    supports_fused_shared_experts: ClassVar[bool] = False
    supports_per_token_scale: ClassVar[bool] = False
    supports_expert_parallelism: ClassVar[bool] = False
    supports_nvfp4_4over6: ClassVar[bool] = False

    _is_checked = False
    _is_built = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let what a subclass computes raise before :meth:`build`."""
        super().__init_subclass__(**kwargs)
        for name in ("pack_inputs", "get_valid_tactics", "forward"):
            if name in vars(cls):
                setattr(cls, name, _after_build(vars(cls)[name]))

    @classmethod
    def supports_quant(cls, quant: Union[QuantConfig, QuantVariant, _Pair]) -> bool:
        """Tell whether the backend multiplies weights and activations of these formats."""
        return (quant.pair if isinstance(quant, QuantConfig) else quant) in cls.supported_quant_variants

    def check_support(self) -> None:
        """Raise ``NotImplementedError`` if the configuration cannot be served. Subclasses define ``_check_support``."""
        self._is_checked = False
        self._check_support()
        self._is_checked = True

    def build(self) -> None:
        """Get ready for calls, once; :meth:`check_support` comes first. Subclasses define ``_build``."""
        if self._is_built:
            return
        if not self._is_checked:
            raise RuntimeError(f"{type(self).__name__}: check_support() must succeed before build().")
        self._build()
        self._is_built = True

    def _check_support(self) -> None:
        """Raise ``NotImplementedError`` if the configuration cannot be served."""

    def _build(self) -> None:
        """Get ready for calls."""

    def view_of(self, weights: MoEWeightPack) -> Any:
        """Return the weights of the backend, or those of a backend whose form is the same."""
        keys = [key for key in (self.backend_key, *self.weight_view_aliases) if key in weights.native_views]
        return weights.get_view(keys[0] if keys else self.backend_key)

    def has_view(self, weights: MoEWeightPack) -> bool:
        """Tell whether weights were prepared for the backend."""
        return any(key in weights.native_views for key in (self.backend_key, *self.weight_view_aliases))

    def accepts(self, activations: MoEActivationPack, weights: MoEWeightPack) -> bool:
        """Tell whether the backend can compute a call: its way of giving experts, and its weights are prepared."""
        return activations.routing_input_mode in self.supported_routing_modes and self.has_view(weights)

    def pack_inputs(self, activations: MoEActivationPack, weights: MoEWeightPack) -> list[Any]:
        """Return the arguments of :meth:`forward`."""
        raise NotImplementedError(f"{type(self).__name__}: pack_inputs must be defined, got a runner without it")

    def tuning_config_for(self, inputs: list[Any]) -> TuningConfig:
        """Return how trials vary the inputs."""
        return TuningConfig()

    def launch_kwargs_for(self, inputs: list[Any]) -> dict[str, Any]:
        """Return what else :meth:`forward` takes for these inputs."""
        return {}

    def launch_state_for(self, inputs: list[Any]) -> Hashable:
        """Return what a launch depends on besides shapes; a time that was measured holds for an equal state."""
        return ()


def _after_build(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: MoERunner, *args: Any, **kwargs: Any) -> Any:
        if not self._is_built:
            raise RuntimeError(f"{type(self).__name__}: build() must be called before execution ({method.__name__})")
        return method(self, *args, **kwargs)

    return checked


def unpack_topk(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and float32 weights of ids that hold both: ``(expert << 16) | bits of the bfloat16 weight``."""
    bits = (packed & 0xFFFF).to(torch.int32)
    return packed >> 16, (bits << 16).view(torch.float32)
