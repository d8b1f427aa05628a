# SPDX-License-Identifier: Apache-2.0
"""A layer of experts that chooses among its configured backends, once for each bucket of token counts."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.arch import get_compute_capability
from .._runtime.errors import ArgumentError
from ..autotuner import AutoTuner, TunableRunner, TuningConfig
from .api import MoEActivationPack, MoEConfig, MoEWeightPack
from .runners import _BACKEND_RUNNERS, MoERunner
from .utils import make_hybrid_bucket_mapper

__all__ = ["MoELayer"]


_MOST_WINNERS = 128


class _Call(TunableRunner):
    """One call by one backend, for the autotuner: backends take their weights in different forms."""

    def __init__(self, runner: MoERunner, inputs: list[Any], extras: tuple[Any, ...]) -> None:
        self.runner, self.inputs, self.extras = runner, inputs, extras

    def get_valid_tactics(self, inputs: list[Any], profile: Any) -> Sequence[Any]:
        return self.runner.get_valid_tactics(self.inputs, profile)

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        state = self.runner.launch_state_for(self.inputs)
        return (*self.runner.get_cache_key_extras(self.inputs), *self.extras, state)

    def forward(self, inputs: list[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> torch.Tensor:
        options = self.runner.launch_kwargs_for(self.inputs)
        out: torch.Tensor = self.runner.forward(self.inputs, tactic=tactic, do_preparation=do_preparation, **options)
        return out

    def __hash__(self) -> int:
        return hash(self.extras)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.extras == other.extras


def _call_of(runner: MoERunner, pack: MoEActivationPack, weights: MoEWeightPack, extras: tuple[Any, ...]) -> _Call:
    """Return a call whose class has the name of the runner's class: files of the autotuner name classes."""
    kind = type(type(runner).__name__, (_Call,), {})
    inputs = runner.pack_inputs(pack, weights)
    hook = runner.tuning_config_for(inputs).inputs_pre_hook
    return kind(runner, inputs if hook is None else hook(inputs), (type(runner).__name__, *extras))


class MoELayer:
    """Experts behind one call: ``layer(activations, weights)`` returns ``(num_tokens, hidden_size)`` bfloat16.

    Parameters
    ----------
    config : MoEConfig
        Sizes, number format, and the backends to choose from, best first.
    device : Optional[Union[torch.device, str]]
        Where calls run. Default: the current CUDA device; the CPU on a machine without one.

    Attributes
    ----------
    config : MoEConfig
        The configuration.
    runners : list[MoERunner]
        The backends that can serve it here, built.

    Notes
    -----
    The backend of a call is chosen once for each bucket of token counts (that of
    :func:`flashinfer.fused_moe.utils.map_to_hybrid_bucket`) and each way of giving the experts: the fastest inside
    ``flashinfer.autotune()``, else the fastest of an earlier run of it, else the first whose weights were prepared.

    Examples
    --------
    >>> backend = BackendOptions((CutlassBf16Config(),))
    >>> config = MoEConfig(RoutingConfig(8, 2), QuantConfig(), ExpertConfig(64), backend=backend)
    >>> layer, weights = MoELayer(config, "cpu"), MoEWeightPack()
    >>> sizes = dict(num_local_experts=8, hidden_size=64, intermediate_size=64)
    >>> weights.prepare_for("cutlass_bf16", CutlassBf16Config.prepare_weights(w1, w2, **sizes))
    >>> y = layer(MoEActivationPack(x, None, topk_ids, topk_weights), weights)
    """

    def __init__(self, config: MoEConfig, device: Optional[Union[torch.device, str]] = None) -> None:
        self.config = config
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.runners: list[MoERunner] = self._build_runners()
        self._bucket_of = make_hybrid_bucket_mapper(config.execution.tune_max_num_tokens)
        self._winners: dict[tuple[Any, ...], tuple[MoERunner, Any]] = {}
        self._last: Optional[MoERunner] = None

    def _build_runners(self) -> list[MoERunner]:
        is_cpu = self.device.type == "cpu"
        arch = 0
        if not is_cpu:
            major, minor = get_compute_capability(self.device)
            arch = major * 10 + minor
        built, reasons, is_refused = [], [], False
        for backend in self.config.backend:
            name = type(backend).__name__
            is_supported = getattr(backend, "runs_on_cpu", False) if is_cpu else backend.supported(arch)
            runner_class = _BACKEND_RUNNERS.get(type(backend))
            if not is_supported or runner_class is None:
                lacks = getattr(backend, "lacks", None)
                where = "the CPU" if is_cpu else f"SM{arch}"
                if is_supported:
                    lacks = "a runner, and none is registered"
                reasons.append(f"{name} needs {lacks}" if lacks else f"{name} does not run on {where}")
                continue
            try:
                runner = runner_class(self.config, self.device)  # type: ignore[call-arg]
                runner.check_support()
                runner.build()
            except Exception as error:  # what a backend cannot do leaves the others
                reasons.append(f"{runner_class.__name__}: {str(error).removeprefix(f'{runner_class.__name__}: ')}")
                is_refused |= isinstance(error, NotImplementedError)
                continue
            built.append(runner)
        if not built:
            text = "; ".join(reasons) or "config.backend has no candidates"
            error_type = NotImplementedError if is_refused else RuntimeError  # the first is a kind of the second
            raise error_type(
                f"MoELayer: none of the configured backends can serve the configuration. Backends rejected this "
                f"configuration: {text}"
            )
        return built

    @property
    def winner_backend(self) -> Optional[str]:
        """Key of the backend that served the last call; None before the first."""
        return None if self._last is None else self._last.backend_key

    def reset_winner(self) -> None:
        """Forget the choices: the next call of each bucket chooses again."""
        self._winners.clear()
        self._last = None

    def refresh_backends(self) -> None:
        """Make the runners anew, after a change of the backends that are registered, and forget the choices."""
        self.runners = self._build_runners()
        self.reset_winner()

    def _eligible(self, pack: MoEActivationPack, weights: MoEWeightPack) -> list[MoERunner]:
        """Return the runners that can compute a call."""
        mode = pack.routing_input_mode
        able = [runner for runner in self.runners if mode in runner.supported_routing_modes]
        if not able:
            keys = ", ".join(runner.backend_key for runner in self.runners)
            raise NotImplementedError(
                f"MoELayer: no backend can support routing_input_mode {mode.name}: routing_input_mode must be one that "
                f"{keys} serve, got {mode.name}"
            )
        ready = [runner for runner in able if runner.accepts(pack, weights)]
        if not ready:
            able[0].pack_inputs(pack, weights)  # names what is wrong, such as a KeyError with what was prepared
            raise NotImplementedError(f"MoELayer: act_pack must be one that a backend accepts, got {pack}")
        return ready

    def _select_winner(
        self, act_pack: MoEActivationPack, weight_pack: MoEWeightPack, runners: Sequence[MoERunner]
    ) -> tuple[MoERunner, Any]:
        """Return the runner of a call and its tactic: kept for each bucket, mode and set of runners, or chosen anew."""
        mode = act_pack.routing_input_mode
        key = (self._bucket_of(act_pack.num_tokens), mode, tuple(map(id, runners)))
        tuner = AutoTuner.get()
        if key in self._winners and not tuner.is_tuning_mode:
            return self._winners[key]
        if len(runners) == 1 and not AutoTuner.was_used:
            chosen: tuple[MoERunner, Any] = (runners[0], -1)
        else:
            extras = (key[0], mode.name)
            calls = [_call_of(runner, act_pack, weight_pack, extras) for runner in runners]
            call, tactic = tuner.choose_one("flashinfer::MoELayer", calls, TuningConfig(), [])
            chosen = next((runner, tactic) for runner, one in zip(runners, calls, strict=True) if one is call)
        if len(self._winners) >= _MOST_WINNERS and key not in self._winners:
            self._winners.pop(next(iter(self._winners)))
        self._winners[key] = chosen
        return chosen

    def __call__(self, act_pack: MoEActivationPack, weight_pack: MoEWeightPack) -> torch.Tensor:
        """Return the output of the layer for a pack of tokens."""
        limit = self.config.execution.tune_max_num_tokens
        if act_pack.num_tokens > limit:
            raise ArgumentError(
                f"MoELayer: number of tokens must be at most the planned number: num_tokens={act_pack.num_tokens} "
                f"exceeds tune_max_num_tokens={limit}"
            )
        if act_pack.hidden_states_q.device.type != self.device.type:
            raise ArgumentError(
                f"MoELayer: hidden_states_q must be on {self.device}, got {act_pack.hidden_states_q.device}"
            )
        runner, tactic = self._select_winner(act_pack, weight_pack, self._eligible(act_pack, weight_pack))
        self._last = runner
        inputs = runner.pack_inputs(act_pack, weight_pack)
        out: torch.Tensor = runner.forward(inputs, tactic=tactic, **runner.launch_kwargs_for(inputs))
        return out
