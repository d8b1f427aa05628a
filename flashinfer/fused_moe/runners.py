# SPDX-License-Identifier: Apache-2.0
"""One backend of a layer of experts at work: check_support, then build, then pack_inputs and forward."""

from __future__ import annotations

import functools
from typing import Any, Callable, ClassVar, Optional, Sequence, Union

import torch

from .._compat.tllm_enums import ActivationType, RoutingInputMode, RoutingMethodType
from .._compat.unsupported import UnsupportedError
from .._runtime.errors import ArgumentError
from .._runtime.integer_math import next_positive_power_of_2
from ..autotuner import TunableRunner
from .api import MoEActivationPack, MoEConfig, MoEWeightPack, QuantConfig, QuantVariant
from .backends import _BLACKWELL, CutlassBf16Config, CutlassW4A16Config
from .cutlass.api import cutlass_fused_moe
from .cutlass.workspace import cutlass_fused_moe_workspace_size
from .formats import SwiGLU
from .routing import route_tokens

__all__ = [
    "B12xNvfp4Runner",
    "B12xW4A16Runner",
    "CuteDslNvfp4Runner",
    "CutlassBf16Runner",
    "CutlassW4A16Runner",
    "MoERunner",
    "TrtllmBf16RoutedRunner",
    "TrtllmFp4RoutedRunner",
    "TrtllmFp8BlockRunner",
    "TrtllmFp8PerTensorRunner",
    "TrtllmMxInt4RoutedRunner",
]


class MoERunner(TunableRunner):
    """A backend of :class:`flashinfer.fused_moe.MoELayer` with its configuration, on one device."""

    #: Key of the weights in :class:`MoEWeightPack`.
    backend_key: ClassVar[str] = ""
    #: Ways of giving the choice of experts.
    modes: ClassVar[frozenset[RoutingInputMode]] = frozenset()

    _is_checked = False
    _is_built = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let what a subclass computes raise before :meth:`build`."""
        super().__init_subclass__(**kwargs)
        for name in ("pack_inputs", "get_valid_tactics", "forward"):
            if name in vars(cls):
                setattr(cls, name, _after_build(vars(cls)[name]))

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

    def pack_inputs(self, activations: MoEActivationPack, weights: MoEWeightPack) -> list[Any]:
        """Return the arguments of :meth:`forward`."""
        raise NotImplementedError(f"{type(self).__name__}: pack_inputs must be defined, got a runner without it")


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


def _format_name(quant: QuantConfig) -> str:
    """Return the name of a pair of formats: the older one, else one that names both."""
    if quant.variant is not None:
        return quant.variant.name
    return f"weight={quant.weight.name}, activation={quant.activation.name}"


class _CutlassRunner(MoERunner):
    """``cutlass_fused_moe`` in one format."""

    backend_key = ""
    modes = frozenset(RoutingInputMode)
    variant: ClassVar[QuantVariant]
    flags: ClassVar[dict[str, Any]] = {}
    weight_dtype: ClassVar[torch.dtype]

    def __init__(self, config: MoEConfig, device: Union[torch.device, str]) -> None:
        self.config, self.device = config, torch.device(device)
        self._inner: Optional[Callable[..., Any]] = None
        self._workspace_cache: dict[tuple[int, int], torch.Tensor] = {}

    def _check_support(self) -> None:
        config, name = self.config, type(self).__name__
        total = config.routing.num_experts
        quant, experts = config.quant, config.experts
        formats = f" (weight={quant.weight.name}, activation={quant.activation.name})"
        wanted: tuple[tuple[str, Any, Any, str], ...] = (
            ("quant.variant", self.variant.name, _format_name(quant), formats),
            ("activation.type", ActivationType.Swiglu.name, ActivationType(config.activation.type).name, ""),
            ("activation", SwiGLU(), config.activation, ""),
            ("finalize.do_finalize", True, config.finalize.do_finalize, " (only do_finalize=True is served)"),
            ("experts.local_expert_offset", 0, experts.local_expert_offset, " (no expert parallelism)"),
            ("experts.local_num_experts", total, experts.local_num_experts or total, " (no expert parallelism)"),
            ("experts.num_fused_shared_experts", 0, experts.num_fused_shared_experts, ""),
        )
        for what, expected, actual, note in wanted:
            if actual != expected:
                raise NotImplementedError(f"{name}: {what} must be {expected}, got {actual}{note}")

    def _build(self) -> None:
        self._inner = cutlass_fused_moe

    def _ensure_workspace(self, num_tokens: int, hidden_size: int) -> torch.Tensor:
        """Return a buffer for calls of up to the next power of two of tokens; it is never freed.

        For a caller that orders its calls: :meth:`forward` takes memory of its own stream, because calls of several
        threads or streams would write to one buffer at the same time.
        """
        capacity = next_positive_power_of_2(max(num_tokens, 1))
        if (capacity, hidden_size) not in self._workspace_cache:
            size = cutlass_fused_moe_workspace_size(
                capacity,
                hidden_size,
                self.config.experts.intermediate_size,
                self.config.routing.num_experts,
                self.config.routing.top_k,
                x_dtype=torch.bfloat16,
                weight_dtype=self.weight_dtype,
                device=self.device,
                **self.flags,
            )
            made = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._workspace_cache[capacity, hidden_size] = made
        return self._workspace_cache[capacity, hidden_size]

    def _routing(self, pack: MoEActivationPack) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts int32 and weights float32."""
        routing, mode = self.config.routing, pack.routing_input_mode
        if mode == RoutingInputMode.FromLogits:
            if routing.method == RoutingMethodType.Llama4:
                raise NotImplementedError(
                    f"{type(self).__name__}: routing.method must not be Llama4, whose weights multiply the experts' "
                    f"input, got {routing.method.name}"
                )
            assert pack.routing_logits is not None
            weights, experts = route_tokens(
                pack.routing_logits,
                routing.top_k,
                routing.method,
                pack.routing_bias,
                routing.n_group or 1,
                routing.topk_group or 1,
                1.0 if routing.routed_scaling_factor is None else routing.routed_scaling_factor,
                self.config.execution.enable_pdl,
            )
            return experts, weights
        assert pack.topk_ids is not None
        if pack.topk_weights is None:
            return unpack_topk(pack.topk_ids)
        return pack.topk_ids, pack.topk_weights

    def pack_inputs(self, activations: MoEActivationPack, weights: MoEWeightPack) -> list[Any]:
        name, x = type(self).__name__, activations.hidden_states_q
        if activations.hidden_states_scale is not None or activations.per_token_scale is not None:
            raise ArgumentError(f"{name}: hidden_states_scale and per_token_scale must be None, got a tensor")
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name}: hidden_states_q must be torch.bfloat16, got {x.dtype}")
        experts, scales = self._routing(activations)
        if scales.dtype != torch.float32:
            raise TypeError(f"{name}: topk_weights must be torch.float32, got {scales.dtype}")
        if experts.shape[-1] != self.config.routing.top_k:
            raise ArgumentError(
                f"{name}: topk_ids must have routing.top_k = {self.config.routing.top_k} columns, got "
                f"{experts.shape[-1]}"
            )
        view = weights.get_view(self.backend_key)
        names = ("fc1_expert_weights", "fc2_expert_weights", "fc1_expert_scales", "fc2_expert_scales")
        return [x, experts, scales, *(view.get(key) for key in names)]

    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> Sequence[int]:
        """Return one tactic: the op chooses its tiles by a rule."""
        return [-1]

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Return what a time depends on besides shapes."""
        config = self.config
        sizes = (config.routing.num_experts, config.routing.top_k, config.experts.intermediate_size)
        return (self.backend_key, *sizes, _format_name(config.quant))

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> torch.Tensor:
        """Compute the layer for what :meth:`pack_inputs` returned."""
        assert self._inner is not None
        x, experts, scales, fc1, fc2, scale1, scale2 = inputs
        config = self.config
        out: torch.Tensor = self._inner(
            x,
            experts,
            scales,
            fc1,
            fc2,
            torch.bfloat16,
            [] if scale1 is None else [scale1, scale2],
            tune_max_num_tokens=config.execution.tune_max_num_tokens,
            enable_pdl=config.execution.enable_pdl,
            use_fused_finalize=config.finalize.use_fused_finalize,
            **self.flags,
        )[0]
        return out


class CutlassBf16Runner(_CutlassRunner):
    """``cutlass_fused_moe`` with bfloat16 weights."""

    backend_key = CutlassBf16Config.key
    variant = QuantVariant.BF16
    weight_dtype = torch.bfloat16


class CutlassW4A16Runner(_CutlassRunner):
    """``cutlass_fused_moe`` with MXFP4 weights and bfloat16 activations."""

    backend_key = CutlassW4A16Config.key
    variant = QuantVariant.W4A16
    weight_dtype = torch.uint8
    flags: ClassVar[dict[str, Any]] = {"use_w4_group_scaling": True}


class _BlackwellRunner(MoERunner):
    """Runner whose name can be imported; making one raises an error that names what is missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(f"{type(self).__name__}: needs {_BLACKWELL}, which this machine lacks")

    def pack_inputs(self, activations: MoEActivationPack, weights: MoEWeightPack) -> list[Any]: ...  # type: ignore
    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> Sequence[int]: ...  # type: ignore
    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any: ...


def _blackwell(name: str) -> type[_BlackwellRunner]:
    return type(
        name, (_BlackwellRunner,), {"__doc__": f"Not available here: needs {_BLACKWELL}.", "__module__": __name__}
    )


B12xNvfp4Runner = _blackwell("B12xNvfp4Runner")
B12xW4A16Runner = _blackwell("B12xW4A16Runner")
CuteDslNvfp4Runner = _blackwell("CuteDslNvfp4Runner")
TrtllmBf16RoutedRunner = _blackwell("TrtllmBf16RoutedRunner")
TrtllmFp4RoutedRunner = _blackwell("TrtllmFp4RoutedRunner")
TrtllmFp8BlockRunner = _blackwell("TrtllmFp8BlockRunner")
TrtllmFp8PerTensorRunner = _blackwell("TrtllmFp8PerTensorRunner")
TrtllmMxInt4RoutedRunner = _blackwell("TrtllmMxInt4RoutedRunner")

#: Runner of each backend that runs here.
_BACKEND_RUNNERS: dict[type, type[_CutlassRunner]] = {
    CutlassBf16Config: CutlassBf16Runner,
    CutlassW4A16Config: CutlassW4A16Runner,
}
