# SPDX-License-Identifier: Apache-2.0
"""Trials: their inputs, the time of each tactic, and statistics."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional, Sequence

import torch

from .._runtime.knobs import knobs
from . import blocklist as tactics_blocklist
from .batches import input_lists
from .measure import median_ms
from .overrides import Overrides
from .profiles import OptimizationProfile, Shapes, TuningConfig, inputs_of, profiles_for, shapes_of
from .ranks import get_autotune_process_group, mean_over_ranks
from .runner import FALLBACK, TunableRunner
from .tactics import as_hashable

__all__ = ["AutoTunerStatistics", "Trials"]

_INFINITE = float("inf")
_log = logging.getLogger("flashinfer")


@dataclass
class AutoTunerStatistics:
    """Counters of tuning, by operator."""

    cache_misses: int = 0
    cache_miss_config_collection: dict[str, set[Shapes]] = field(default_factory=lambda: defaultdict(set))
    failed_profiling_count: dict[str, set[Shapes]] = field(default_factory=lambda: defaultdict(set))
    tuned_op_total_configs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tuned_op_successful_configs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed_tactics: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))  #: keys are "op::Runner"


class Trials(Overrides):
    """Measurements. :class:`AutoTuner` decides which are made and keeps the results.

    Parameters
    ----------
    warmup, repeat, stream_delay_micro_secs
        As for :class:`AutoTuner`.
    """

    def __init__(self, warmup: int, repeat: int, stream_delay_micro_secs: int) -> None:
        super().__init__()
        self.warmup, self.repeat, self.stream_delay_micro_secs = warmup, repeat, stream_delay_micro_secs
        self.stats = AutoTunerStatistics()
        self._blocklist = tactics_blocklist.TacticsBlocklist()
        if knobs.tactics_blocklist:
            self._load_blocklist(knobs.tactics_blocklist)

    def _load_blocklist(self, path: str) -> None:
        """Load the blocklist. A list that cannot be read is a warning, not an error."""
        try:
            self._blocklist.load(path)
        except (OSError, ValueError) as error:
            _log.warning("autotune: FLASHINFER_TACTICS_BLOCKLIST is %s, which cannot be read (%s)", path, error)

    def _generate_optimization_profiles(
        self, tuning_config: TuningConfig, inputs: Sequence[Any]
    ) -> list[OptimizationProfile]:
        return profiles_for(shapes_of(inputs), self._apply_tuning_overrides(tuning_config))

    def _prepare_input_tensors(self, profile: OptimizationProfile, inputs: Sequence[Any]) -> list[Any]:
        return inputs_of(profile, inputs)

    def _trials(
        self,
        op: str,
        runners: Sequence[TunableRunner],
        config: TuningConfig,
        profile: OptimizationProfile,
        inputs: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Iterator[tuple[TunableRunner, Any, float]]:
        """Yield the milliseconds of each tactic, infinite if the tactic fails.

        A rank that fails, or has no memory for the inputs, still takes part in the reductions of the other ranks.
        """
        obstacle: Optional[Exception] = None
        tensors, lists = list(inputs), [list(inputs)]
        try:
            tensors = self._prepare_input_tensors(profile, inputs)
            config, lists = self.prepare_tactic_profile(tensors, config)
            tensors = lists[0]
        except torch.OutOfMemoryError as error:
            if get_autotune_process_group() is None:
                return
            obstacle = error
        for runner in runners:
            tactics = self._blocklist.filter(op, runner, runner.get_valid_tactics(tensors, profile))
            unusable = obstacle or (
                self._prepare_runner(runner, tensors, tactics, profile, kwargs) if tactics else None
            )
            for tactic in tactics:
                try:
                    if unusable is not None:
                        mean_over_ranks(_INFINITE)
                        raise unusable
                    time_ms = self.profile_tactic(runner, tensors, tactic, config, lists, **kwargs)
                except Exception as failure:  # any failure excludes this tactic
                    name = f"{op}::{type(runner).__name__}"
                    self.stats.failed_tactics[name].add(as_hashable(tactic))
                    _log.info("autotune: tactic %s of %s fails (%s); leaving it out", tactic, op, failure)
                    time_ms = _INFINITE
                yield runner, tactic, time_ms

    @staticmethod
    def _prepare_runner(
        runner: TunableRunner,
        tensors: list[Any],
        tactics: Sequence[Any],
        profile: OptimizationProfile,
        kwargs: dict[str, Any],
    ) -> Optional[Exception]:
        try:
            runner.precompile_tactics(tensors, tactics, profile, **kwargs)
            runner(tensors, tactic=FALLBACK, do_preparation=True, **kwargs)
        except Exception as error:
            return error
        return None

    def prepare_tactic_profile(
        self, inputs: Sequence[Any], tuning_config: TuningConfig
    ) -> tuple[TuningConfig, list[list[Any]]]:
        """Prepare what all tactics of a bucket are measured with: the configuration in effect and lists of inputs.

        ``inputs_pre_hook`` is called here. Timed calls take the lists in turn. The first list holds the inputs; with
        ``use_cold_l2_cache`` the others hold copies. With ``profile_arena_input_indices`` there is one list per timed
        call, with copies of these inputs at different addresses.
        """
        config = self._apply_tuning_overrides(tuning_config)
        prepared = list(inputs)
        if config.inputs_pre_hook is not None:
            prepared = list(config.inputs_pre_hook(prepared))
        return config, self._prepare_input_tensors_with_batches(prepared, config)

    def _prepare_input_tensors_with_batches(
        self, inputs: Sequence[Any], tuning_config: TuningConfig
    ) -> list[list[Any]]:
        return input_lists(inputs, tuning_config, self.repeat, self._get_l2_cache_size_in_bytes)

    def _get_l2_cache_size_in_bytes(self, device: Any = None) -> int:
        from ..testing.cold_cache import get_l2_cache_size

        return get_l2_cache_size(device)

    def profile_tactic(
        self,
        runner: TunableRunner,
        inputs: Sequence[Any],
        tactic: Any,
        tuning_config: TuningConfig,
        input_batches: Optional[Sequence[list[Any]]] = None,
        **kwargs: Any,
    ) -> float:
        """Measure one tactic in milliseconds; with a process group, return the mean over the ranks.

        Parameters
        ----------
        runner, tactic
            What is measured.
        inputs : Sequence[Any]
            What it is called with, unless there are ``input_batches``.
        tuning_config, input_batches
            As :meth:`prepare_tactic_profile` returns them.
        **kwargs
            What else ``forward`` takes.
        """
        try:
            time_ms = self._profile_single_kernel(
                runner, inputs, tactic, tuning_config, input_tensor_batches=input_batches, **kwargs
            )
        except Exception:
            mean_over_ranks(_INFINITE)
            raise
        return mean_over_ranks(time_ms)

    def _profile_single_kernel(
        self,
        runner: TunableRunner,
        inputs: Sequence[Any],
        tactic: Any,
        tuning_config: TuningConfig,
        input_tensor_batches: Optional[Sequence[list[Any]]] = None,
        **kwargs: Any,
    ) -> float:
        """Measure one tactic in milliseconds. Programs replace this method to simulate times: every trial calls it."""
        policy = self._policy
        uses_graph = tuning_config.use_cuda_graph if policy.use_cuda_graph is None else policy.use_cuda_graph
        return median_ms(
            lambda one: runner(one, tactic=tactic, **kwargs),
            input_tensor_batches or [list(inputs)],
            warmup=self.warmup,
            repeat=(uses_graph and self._replays) or self.repeat,
            delay_us=0 if policy.timer == "events_no_delay" else self.stream_delay_micro_secs,
            is_cold=tuning_config.use_cold_l2_cache if policy.cold_l2 is None else policy.cold_l2,
            use_cuda_graph=uses_graph,
            uses_events=policy.timer in ("events", "events_no_delay"),
        )
