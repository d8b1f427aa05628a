# SPDX-License-Identifier: Apache-2.0
"""Backends of a layer of experts that call ``cutlass_fused_moe``, one for each number format."""

from __future__ import annotations

import itertools
import threading
from typing import Any, ClassVar, Hashable, Optional, Sequence, Union

import torch

from .._compat.tllm_enums import ActivationType, RoutingInputMode, RoutingMethodType
from .._runtime.arch import get_compute_capability
from .._runtime.errors import ArgumentError
from .._runtime.integer_math import next_positive_power_of_2
from ..autotuner import AutoTuner, TunableRunner, TuningConfig
from .api import MoEActivationPack, MoEConfig, MoEWeightPack, QuantConfig, QuantVariant
from .backends import (
    CuTileBf16Config,
    CuTileFp8PerTensorConfig,
    CutlassBf16Config,
    CutlassFp8BlockConfig,
    CutlassFp8PerTensorConfig,
    CutlassHummingConfig,
    CutlassW4A8Config,
    CutlassW4A16Config,
)
from .cutlass.api import cutlass_fused_moe
from .cutlass.workspace import cutlass_fused_moe_workspace_size
from .formats import QuantFormat, SwiGLU
from .routing import route_tokens
from .runner import MoERunner, pairs, unpack_topk

__all__ = [
    "CuTileBf16Runner",
    "CuTileFp8PerTensorRunner",
    "CutlassBf16Runner",
    "CutlassFp8BlockRunner",
    "CutlassFp8PerTensorRunner",
    "CutlassHummingRunner",
    "CutlassW4A8Runner",
    "CutlassW4A16Runner",
]

_OUTPUT_DTYPES = {QuantFormat.BF16: torch.bfloat16, QuantFormat.FP16: torch.float16}
_WEIGHTS = ("fc1_expert_weights", "fc2_expert_weights")


def _format_name(quant: QuantConfig) -> str:
    """Return the name of a pair of formats: the older one, else one that names both."""
    if quant.variant is not None:
        return quant.variant.name
    return f"weight={quant.weight.name}, activation={quant.activation.name}"


class _Products(TunableRunner):
    """The layer as the tuner of one of its products sees it.

    ``cutlass_fused_moe`` measures the tiles of both products itself, under the names of ``cutlass/tuning.py``, when a
    trial here calls it; so each product has one tactic.
    """

    def __init__(self, launch: Any) -> None:
        self.launch_cache = launch

    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> Sequence[Any]:
        return [-1]

    def forward(
        self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, *, gemm_idx: int = 0, **kwargs: Any
    ) -> Any:
        return self.launch_cache(inputs)


class CutlassRunner(MoERunner):
    """``cutlass_fused_moe`` in one format."""

    supported_routing_modes = frozenset(RoutingInputMode)
    supported_activation_classes = (SwiGLU,)
    variant: ClassVar[Optional[QuantVariant]] = None
    flags: ClassVar[dict[str, Any]] = {}
    weight_dtype: ClassVar[torch.dtype]
    input_dtype: ClassVar[torch.dtype] = torch.bfloat16
    #: Names in the view of the elements of ``quant_scales``; None: an empty tensor.
    scale_names: ClassVar[tuple[Optional[str], ...]] = ()

    def __init__(self, config: MoEConfig, device: Union[torch.device, str]) -> None:
        self.config, self.device = config, torch.device(device)
        self._inner: Optional[TunableRunner] = None
        self._constants: dict[str, torch.Tensor] = {}
        self._workspace: Optional[torch.Tensor] = None
        self._workspace_num_tokens = self._workspace_hidden_size = 0
        self._workspace_cache: dict[tuple[int, int], torch.Tensor] = {}
        self._workspace_owners: dict[tuple[int, int], Hashable] = {}

    def __hash__(self) -> int:  # buffers do not tell runners apart
        return hash((type(self), repr(self.config), self.device))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and (self.config, self.device) == (other.config, other.device)

    def _check_support(self) -> None:
        config, name = self.config, type(self).__name__
        total = config.routing.num_experts
        quant, experts = config.quant, config.experts
        if not self.supports_quant(quant):
            expected = (
                self.variant.name if self.variant is not None else " or ".join(map(str, self.supported_quant_variants))
            )
            raise NotImplementedError(
                f"{name}: quant.variant must be {expected}, got {_format_name(quant)} (weight={quant.weight.name}, "
                f"activation={quant.activation.name})"
            )
        if quant.output not in self.supported_output_formats:
            expected = ", ".join(sorted(one.name for one in self.supported_output_formats))
            raise NotImplementedError(f"{name}: quant.output must be one of {expected}, got {quant.output.name}")
        if not isinstance(config.activation, self.supported_activation_classes):
            raise NotImplementedError(
                f"{name}: activation must be SwiGLU (activation.type must be {ActivationType.Swiglu.name}, got "
                f"{ActivationType(config.activation.type).name})"
            )
        wanted: tuple[tuple[str, Any, Any, str], ...] = (
            ("finalize.do_finalize", True, config.finalize.do_finalize, " (only do_finalize=True is served)"),
            ("experts.local_expert_offset", 0, experts.local_expert_offset, " (no expert parallelism)"),
            ("experts.local_num_experts", total, experts.local_num_experts or total, " (no expert parallelism)"),
            ("experts.num_fused_shared_experts", 0, experts.num_fused_shared_experts, ""),
        )
        for what, expected, actual, note in wanted:
            if actual != expected:
                raise NotImplementedError(f"{name}: {what} must be {expected}, got {actual}{note}")

    def _build(self) -> None:
        self._inner = _Products(self._launch)
        activation = self.config.activation
        if activation != SwiGLU():
            assert isinstance(activation, SwiGLU)
            values = {"alpha": activation.alpha, "beta": activation.beta, "limit": activation.limit}
            experts = self.config.routing.num_experts
            self._constants = {
                f"swiglu_{name}": torch.full((experts,), value, device=self.device) for name, value in values.items()
            }

    # memory --------------------------------------------------------------------------------------

    def _ensure_workspace(self, num_tokens: int, hidden_size: int) -> torch.Tensor:
        """Select the buffer for calls of up to the next power of two of tokens.

        It is never freed, so that captured graphs stay valid.
        """
        key = next_positive_power_of_2(max(num_tokens, 1)), hidden_size
        if key not in self._workspace_cache:
            size = cutlass_fused_moe_workspace_size(
                *key,
                self.config.experts.intermediate_size,
                self.config.routing.num_experts,
                self.config.routing.top_k,
                x_dtype=self.input_dtype,
                weight_dtype=self.weight_dtype,
                output_dtype=_OUTPUT_DTYPES[self.config.quant.output],
                device=self.device,
                **self.flags,
            )
            self._workspace_cache[key] = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._workspace = self._workspace_cache[key]
        self._workspace_num_tokens, self._workspace_hidden_size = key
        return self._workspace_cache[key]

    def _workspace_for(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the buffer of a call, or None, with which the op takes memory of its stream.

        A buffer is of the stream that used it first, on the CPU of the thread: calls of others may run at the same
        time, and would write to it.
        """
        buffer = self._ensure_workspace(*x.shape)
        key = next_positive_power_of_2(max(x.shape[0], 1)), x.shape[1]
        here = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else threading.get_ident()
        return buffer if self._workspace_owners.setdefault(key, here) == here else None

    def _prepare_tuning_inputs(self, inputs: list[Any]) -> list[Any]:
        """Get the buffer of a trial before its time is taken."""
        self._ensure_workspace(*inputs[0].shape)
        return inputs

    # a call --------------------------------------------------------------------------------------

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

    def _pack_weight_inputs(self, view: Any, hidden_size: int) -> list[torch.Tensor]:
        """Return both weights of a view, whose second one must have ``hidden_size`` rows."""
        w1, w2 = (view[name] for name in _WEIGHTS)
        if w2.shape[1] != hidden_size:
            raise ArgumentError(
                f"{type(self).__name__}: fc2_expert_weights must have hidden_size = {hidden_size} rows, got shape "
                f"{tuple(w2.shape)}"
            )
        return [w1, w2]

    def _scales_of(self, view: Any) -> list[torch.Tensor]:
        nothing = view[_WEIGHTS[0]].new_empty(0, dtype=torch.bfloat16)
        return [nothing if name is None else view[name] for name in self.scale_names]

    def pack_inputs(self, activations: MoEActivationPack, weights: MoEWeightPack) -> list[Any]:
        name, x, config = type(self).__name__, activations.hidden_states_q, self.config
        if activations.hidden_states_scale is not None or activations.per_token_scale is not None:
            raise ArgumentError(f"{name}: hidden_states_scale and per_token_scale must be None, got a tensor")
        if x.dtype != self.input_dtype:
            raise TypeError(f"{name}: hidden_states_q must be {self.input_dtype}, got {x.dtype}")
        limit = config.execution.tune_max_num_tokens
        if x.shape[0] > limit:
            raise ArgumentError(
                f"{name}: num_tokens must be at most the planned number: num_tokens={x.shape[0]} exceeds "
                f"tune_max_num_tokens={limit}"
            )
        experts, scales = self._routing(activations)
        if scales.dtype != torch.float32:
            raise TypeError(f"{name}: topk_weights must be torch.float32, got {scales.dtype}")
        if experts.shape[-1] != config.routing.top_k:
            raise ArgumentError(
                f"{name}: topk_ids must have routing.top_k = {config.routing.top_k} columns, got {experts.shape[-1]}"
            )
        view = self.view_of(weights)
        self._ensure_workspace(*x.shape)
        return [x, experts, scales, *self._pack_weight_inputs(view, x.shape[1]), *self._scales_of(view)]

    def tuning_config_for(self, inputs: list[Any]) -> TuningConfig:
        return TuningConfig(inputs_pre_hook=self._prepare_tuning_inputs)

    def launch_state_for(self, inputs: list[Any]) -> Hashable:
        x = inputs[0]
        return next_positive_power_of_2(max(x.shape[0], 1)), x.shape[1]

    def _arch(self) -> int:
        if self.device.type == "cpu":
            return 0
        major, minor = get_compute_capability(self.device)
        return major * 10 + minor

    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> Sequence[Any]:
        """Return pairs of the best tactic of each product."""
        assert self._inner is not None
        op = f"moe_{self.backend_key}_sm{self._arch()}"
        config, tuner = self.tuning_config_for(inputs), AutoTuner.get()
        best = [
            tuner.rank_tactics(f"{op}_gemm{index}", [self._inner], config, inputs, k=1, gemm_idx=index)
            for index in (1, 2)
        ]
        return list(itertools.product(*best))

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Return what a time depends on besides shapes."""
        config = self.config
        sizes = (config.routing.num_experts, config.routing.top_k, config.experts.intermediate_size)
        quant = (_format_name(config.quant), config.quant.output.name, repr(config.activation))
        return (self.backend_key, *sizes, *quant, self._arch(), config.execution.enable_pdl)

    def _launch(self, inputs: Sequence[Any]) -> torch.Tensor:
        x, experts, scales, fc1, fc2, *quant_scales = inputs
        config = self.config
        out: torch.Tensor = cutlass_fused_moe(
            x,
            experts,
            scales,
            fc1,
            fc2,
            _OUTPUT_DTYPES[config.quant.output],
            quant_scales,
            tune_max_num_tokens=config.execution.tune_max_num_tokens,
            enable_pdl=config.execution.enable_pdl,
            use_fused_finalize=config.finalize.use_fused_finalize,
            workspace_buffer=self._workspace_for(x) if x.shape[0] else None,
            **self._constants,
            **self.flags,
        )[0]
        return out

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> torch.Tensor:
        """Compute the layer for what :meth:`pack_inputs` returned.

        ``tactic`` is -1 or a pair of tactics of the products. ``do_preparation``: run each product of the inner runner
        once, so that nothing is built or allocated in a trial, and return the first input.
        """
        assert self._inner is not None
        if do_preparation:
            for index in (1, 2):
                self._inner.forward(inputs, tactic=-1, do_preparation=True, gemm_idx=index)
            result: torch.Tensor = inputs[0]
            return result
        return self._launch(inputs)


class CutlassBf16Runner(CutlassRunner):
    """``cutlass_fused_moe`` with bfloat16 weights."""

    backend_key = CutlassBf16Config.key
    variant = QuantVariant.BF16
    supported_quant_variants = pairs(QuantVariant.BF16)
    weight_dtype = torch.bfloat16


class CutlassFp8PerTensorRunner(CutlassRunner):
    """``cutlass_fused_moe`` with e4m3 tokens, and e4m3 weights that have one scale per expert."""

    backend_key = CutlassFp8PerTensorConfig.key
    variant = QuantVariant.FP8PerTensor
    supported_quant_variants = pairs(QuantVariant.FP8PerTensor)
    supported_output_formats = frozenset(_OUTPUT_DTYPES)
    weight_dtype = input_dtype = torch.float8_e4m3fn
    scale_names = ("fc1_dequant", "fc2_quant", "fc2_dequant", "fc1_input_dequant")


class CutlassFp8BlockRunner(CutlassRunner):
    """``cutlass_fused_moe`` with e4m3 weights in blocks; it quantises bfloat16 tokens itself."""

    backend_key = CutlassFp8BlockConfig.key
    variant = QuantVariant.DeepSeekFp8
    supported_quant_variants = pairs(QuantVariant.DeepSeekFp8, (QuantFormat.DeepSeekFp8, QuantFormat.BF16))
    weight_dtype = torch.float8_e4m3fn
    flags: ClassVar[dict[str, Any]] = {"use_deepseek_fp8_block_scale": True}
    scale_names = ("fc1_expert_scales", "fc2_expert_scales")


class CutlassW4A16Runner(CutlassRunner):
    """``cutlass_fused_moe`` with MXFP4 weights and bfloat16 activations."""

    backend_key = CutlassW4A16Config.key
    variant = QuantVariant.W4A16
    supported_quant_variants = pairs(QuantVariant.W4A16)
    weight_dtype = torch.uint8
    flags: ClassVar[dict[str, Any]] = {"use_w4_group_scaling": True}
    scale_names = ("fc1_expert_scales", "fc2_expert_scales")


class CutlassW4A8Runner(CutlassRunner):
    """``cutlass_fused_moe`` with int4 weights in groups of 128; it rounds bfloat16 tokens to e4m3 itself."""

    backend_key = CutlassW4A8Config.key
    supported_quant_variants = pairs((QuantFormat.INT4, QuantFormat.FP8PerTensor))
    weight_dtype = torch.uint8
    flags: ClassVar[dict[str, Any]] = {"use_w4_group_scaling": True, "use_packed_weights": True}
    scale_names = (
        *("fc1_expert_scales", "fc2_expert_scales", "fc1_act_scale", "fc2_act_scale"),
        *(None, None, "fc1_alpha", "fc2_alpha"),
    )


class CutlassHummingRunner(CutlassRunner):
    """``cutlass_fused_moe`` with MXFP4 weights; it quantises rows of bfloat16 tokens to e4m3 itself."""

    backend_key = CutlassHummingConfig.key
    supported_quant_variants = pairs((QuantFormat.MXFP4, QuantFormat.FP8PerTensor))
    weight_dtype = torch.uint8
    flags: ClassVar[dict[str, Any]] = {"use_w4_group_scaling": True, "use_wfp4afp8_humming": True}
    scale_names = ("fc1_expert_scales", "fc1_dequant", None, "fc2_expert_scales", "fc2_dequant")


class CuTileBf16Runner(CutlassBf16Runner):
    """The arithmetic of :class:`CutlassBf16Runner` under the name of the backend in ``cuda.tile``."""

    backend_key = CuTileBf16Config.key
    weight_view_aliases = (CutlassBf16Config.key,)


class CuTileFp8PerTensorRunner(CutlassFp8PerTensorRunner):
    """The arithmetic of :class:`CutlassFp8PerTensorRunner` under the name of the backend in ``cuda.tile``."""

    backend_key = CuTileFp8PerTensorConfig.key
    weight_view_aliases = (CutlassFp8PerTensorConfig.key,)
