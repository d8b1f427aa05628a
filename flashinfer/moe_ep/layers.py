# SPDX-License-Identifier: Apache-2.0
"""Layers of a rank: in stages (exchange, experts, exchange), or in one kernel."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence, Union

import torch

from .algo_knobs import (
    AlgoKnob,
    FleetAlgoKnobFaultTolerance,
    FleetAlgoKnobQuantization,
    FleetAlgoKnobTopologyCapacity,
    HandleAlgoKnobTopKWeights,
    HandleAlgoKnobUserStream,
    _index_knobs,
)
from .config import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    FleetParams,
    HandleParams,
    MoEEpTensors,
)
from .errors import MoEEpConfigError
from .fleet import _transport_name, create_fleet
from .kernels import (
    IdentityConfig,
    SplitKernelContext,
    create_mega_kernel,
    create_split_kernel,
    is_mega_kernel_config,
    is_split_kernel_config,
)
from .transports import NcclEpConfig
from .validation import (
    bootstrap_ep_world_size,
    ensure_bootstrap_dist_validated,
    validate_fleet_params,
    validate_fleet_weights,
    validate_mega_forward_inputs,
    validate_split_forward_inputs,
)

__all__ = ["MegaConfig", "MoEEpLayer", "MoEEpMegaLayer", "MoEEpSplitLayer", "SplitConfig"]


@dataclass
class SplitConfig:
    """A layer in stages: the transport, and the experts between its exchanges."""

    comm: Any = field(default_factory=NcclEpConfig)
    kernel: Any = field(default_factory=IdentityConfig)


@dataclass
class MegaConfig:
    """A layer in one kernel, and who quantises: ``transformed_weights`` are in the kernel's form already."""

    megakernel: Any
    quantize_input: bool = True
    preprocess_weights: bool = True
    transformed_weights: Any = None


class MoEEpSplitLayer:
    """A layer in stages.

    Attributes
    ----------
    enable_timing : bool
        Fill ``last_timings_ms`` at each call, which waits for the device.
    last_timings_ms : dict[str, float]
        Milliseconds of ``dispatch``, ``compute`` and ``combine`` of the last call.
    """

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        fleet_params: FleetParams,
        weights: Any,
        fleet_knobs: Sequence[AlgoKnob] = (),
        backend: Any = "nccl_ep",
    ) -> None:
        config = backend if isinstance(backend, SplitConfig) else SplitConfig(comm=backend)
        ensure_bootstrap_dist_validated(bootstrap)
        world, knobs = bootstrap_ep_world_size(bootstrap), _index_knobs(fleet_knobs)
        quant, capacity = knobs.get(FleetAlgoKnobQuantization), knobs.get(FleetAlgoKnobTopologyCapacity)
        validate_fleet_params(
            fleet_params,
            _transport_name(config.comm),
            world,
            getattr(quant, "quants", None),
            getattr(capacity, "n", None),
            knobs.get(FleetAlgoKnobFaultTolerance),  # type: ignore[arg-type]
        )
        self.bootstrap, self.fleet_params, self.config = bootstrap, fleet_params, config
        self.enable_timing, self.last_timings_ms = False, dict[str, float]()
        self._kernel = create_split_kernel(config.kernel)
        if self._kernel.requires_weights:
            validate_fleet_weights(weights, fleet_params, world)
            self._kernel.prepare(weights, bootstrap, fleet_params)
        self._fleet = create_fleet(bootstrap, fleet_params, fleet_knobs, config.comm)

    def forward(self, t: MoEEpTensors) -> torch.Tensor:
        """Return the outputs of this rank's tokens."""
        x = t.hidden_states
        validate_split_forward_inputs(x, t.topk_ids, t.topk_weights, self.fleet_params)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        knobs = (HandleAlgoKnobUserStream(stream), HandleAlgoKnobTopKWeights(t.topk_weights))
        handle = self._fleet.create_handle(HandleParams(t.topk_ids), knobs)
        try:
            payload = [x] if t.scales is None else [x, t.scales]
            got = self._timed("dispatch", lambda: handle.dispatch(DispatchInputParams(payload)))
            context = SplitKernelContext(
                got.expert_tensors, got.num_tokens, self.fleet_params, got.recv_topk_idx, got.recv_topk_weights
            )
            results = self._timed("compute", lambda: self._kernel.run(context))
            out = torch.empty_like(x)
            out = self._timed("combine", lambda: handle.combine(CombineInputParams(list(results), out))).x
            handle.complete()
        finally:
            handle.destroy()
        return out

    __call__ = forward

    def _timed(self, stage: str, call: Callable[[], Any]) -> Any:
        if not self.enable_timing:
            return call()
        begin = time.perf_counter()
        result = call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.last_timings_ms[stage] = (time.perf_counter() - begin) * 1e3
        return result

    def destroy(self) -> None:
        """Give the transport's memory back; any number of times."""
        self._fleet.destroy()


class MoEEpMegaLayer:
    """A layer in one kernel. The weights that were given are let go once they are in the kernel's form."""

    def __init__(
        self, bootstrap: BootstrapConfig, fleet_params: FleetParams, weights: Any, backend: MegaConfig
    ) -> None:
        ensure_bootstrap_dist_validated(bootstrap)
        self.bootstrap, self.fleet_params, self.config = bootstrap, fleet_params, backend
        self._kernel = create_mega_kernel(backend.megakernel)
        self._kernel.validate_init(bootstrap, fleet_params)
        self._weights, self._transformed = weights, backend.transformed_weights
        if self._transformed is None:
            validate_fleet_weights(weights, fleet_params, bootstrap_ep_world_size(bootstrap))
        else:
            self._weights = None

    @property
    def supports_output_view(self) -> bool:
        """Return True if the output may stay in the kernel's own memory."""
        return self._kernel.supports_output_view

    def warmup(self, t: Optional[MoEEpTensors] = None) -> None:
        """Bring weights into the kernel's form, and run once if tensors are given: a capture may follow."""
        self._transform()
        if t is not None:
            self.forward(t)

    def _transform(self) -> Any:
        if self._transformed is None:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise MoEEpConfigError(
                    "MoEEpMegaLayer: preparation of weights cannot run during CUDA graph capture; call warmup before it"
                )
            self._transformed = self._kernel.transform_weights(self._weights, self.fleet_params)
            self._weights = None
        return self._transformed

    def forward(self, t: MoEEpTensors, *, return_workspace_view: bool = False) -> torch.Tensor:
        """Return the outputs of this rank's tokens, bfloat16."""
        config = self.config
        if return_workspace_view and not self.supports_output_view:
            raise MoEEpConfigError(
                f"MoEEpMegaLayer: return_workspace_view must be False with {self._kernel.kernel_name()}, got True"
            )
        validate_mega_forward_inputs(
            t.hidden_states,
            t.topk_ids,
            t.topk_weights,
            self.fleet_params,
            top_k=config.megakernel.top_k,
            quantize_input=config.quantize_input,
            scales=t.scales,
        )
        if config.quantize_input and t.hidden_states.dtype != torch.bfloat16:
            raise MoEEpConfigError(
                f"MoEEpMegaLayer: hidden_states must be torch.bfloat16 with quantize_input, got {t.hidden_states.dtype}"
            )
        out = torch.empty_like(t.hidden_states, dtype=torch.bfloat16)
        self._kernel.run(t, self._transform(), out, quantize_input=config.quantize_input)
        return out

    __call__ = forward

    def destroy(self) -> None:
        """Let go of the weights; any number of times."""
        self._weights = self._transformed = None


def MoEEpLayer(
    bootstrap: BootstrapConfig,
    fleet_params: FleetParams,
    weights: Any,
    fleet_knobs: Sequence[AlgoKnob] = (),
    backend: Any = "nccl_ep",
) -> Union[MoEEpSplitLayer, MoEEpMegaLayer]:
    """Make the layer of a rank: in one kernel for a :class:`MegaConfig`, else in stages.

    Examples
    --------
    >>> backend = SplitConfig(comm=LocalConfig(), kernel=FusedMoeKernelConfig(moe_config))
    >>> layer = MoEEpLayer(BootstrapConfig(1, 0), FleetParams(8, 64, 128), MoEWeightPack(w13, w2), backend=backend)
    >>> out = layer.forward(MoEEpTensors(x, topk_ids, topk_weights))
    """
    if isinstance(backend, MegaConfig):
        if fleet_knobs:
            warnings.warn("MoEEpLayer: fleet_knobs are ignored by a layer in one kernel", UserWarning, stacklevel=2)
        return MoEEpMegaLayer(bootstrap, fleet_params, weights, backend)
    name = type(backend).__name__
    if is_mega_kernel_config(backend):
        raise TypeError(f"MoEEpLayer: Wrap {name} in MegaConfig(megakernel=...)")
    if is_split_kernel_config(backend):
        raise TypeError(f"MoEEpLayer: Pass split inner kernels via SplitConfig(kernel=...), got {name}")
    return MoEEpSplitLayer(bootstrap, fleet_params, weights, fleet_knobs, backend)
