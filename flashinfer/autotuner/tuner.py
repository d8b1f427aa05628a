# SPDX-License-Identifier: Apache-2.0
"""The tuner: what is known about each operator and size, and the trials that find it out."""

from __future__ import annotations

import abc
import logging
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import torch

from ..knobs import knobs
from .files import Fit, read_results, write_results
from .measure import median_ms, refuse_capture
from .profiles import (
    Bucketing,
    OptimizationProfile,
    ProfilingCacheKey,
    Shapes,
    TuningConfig,
    inputs_of,
    nearest_profile,
    profiles_for,
    shapes_of,
)

__all__ = ["AutoTuner", "AutoTunerStatistics", "TunableRunner"]

_FALLBACK = -1
_log = logging.getLogger("flashinfer")


class TunableRunner(abc.ABC):
    """One implementation of an operator. What tells two of a class apart are its attributes, which are hashable."""

    @abc.abstractmethod
    def get_valid_tactics(self, inputs: list[Any], profile: OptimizationProfile) -> Sequence[Any]:
        """Tactics worth a trial on these inputs."""

    @abc.abstractmethod
    def forward(self, inputs: list[Any], tactic: Any = _FALLBACK, do_preparation: bool = False, **kwargs: Any) -> Any:
        """Run with a tactic; -1 is one that always works. ``do_preparation``: once before trials, without timing."""

    def get_cache_key_extras(self, inputs: list[Any]) -> tuple[Any, ...]:
        """What results depend on besides shapes, such as dtypes."""
        return ()

    def __call__(self, inputs: list[Any], **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)


@dataclass
class AutoTunerStatistics:
    """What has happened, by operator."""

    cache_misses: int = 0
    cache_miss_config_collection: dict[str, set[Shapes]] = field(default_factory=lambda: defaultdict(set))
    failed_profiling_count: dict[str, set[Shapes]] = field(default_factory=lambda: defaultdict(set))
    tuned_op_total_configs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tuned_op_successful_configs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed_tactics: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  #: by "op::Runner"


class AutoTuner:
    """The tuner of this process is ``AutoTuner.get()``.

    Parameters
    ----------
    warmup, repeat : int
        Calls before, and in, a measurement.
    stream_delay_micro_secs : int
        How long the GPU is kept busy while the calls of a measurement are enqueued.
    """

    _instance: Optional[AutoTuner] = None
    _making = threading.Lock()

    def __init__(self, warmup: int = 3, repeat: int = 10, stream_delay_micro_secs: int = 5000) -> None:
        self.warmup, self.repeat, self.stream_delay_micro_secs = warmup, repeat, stream_delay_micro_secs
        self.profiling_cache: dict[ProfilingCacheKey, tuple[str, Any]] = {}  #: runner class and tactic
        self.stats = AutoTunerStatistics()
        self._from_file: dict[str, tuple[str, Any]] = {}
        self._lock = threading.RLock()
        self._tuning = 0  # contexts that are open, in all threads
        self._threads = threading.local()  # stacks of what `autotune` was given there

    @classmethod
    def get(cls) -> AutoTuner:
        with cls._making:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @property
    def is_tuning_mode(self) -> bool:
        return self._tuning > 0

    # what `autotune` sets ------------------------------------------------------------------------

    def enter(self, tune_mode: bool, bucketing: Bucketing, skip_ops: frozenset[str]) -> None:
        """Begin a context, which :meth:`leave` ends."""
        stack = self._stack()
        outer_bucketing, outer_skipped = stack[-1]
        stack.append((bucketing if bucketing.mapper else outer_bucketing, outer_skipped | skip_ops))
        with self._lock:
            self._tuning += tune_mode

    def leave(self, tune_mode: bool) -> None:
        self._stack().pop()
        with self._lock:
            self._tuning -= tune_mode

    def _stack(self) -> list[tuple[Bucketing, frozenset[str]]]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = [(Bucketing(), frozenset())]
        return self._threads.stack

    @property
    def _bucketing(self) -> Bucketing:
        return self._stack()[-1][0]

    def get_effective_map_to_tuning_buckets(
        self, tuning_config: TuningConfig, spec_idx: int = 0
    ) -> Callable[[int], int]:
        """What maps sizes to buckets here: the buckets of ``autotune``, else those of the operator."""
        return self._bucketing.map(tuning_config.dynamic_tensor_specs[spec_idx])

    # look-up -------------------------------------------------------------------------------------

    def _key(
        self, op: str, runner: TunableRunner, nearest: Shapes, inputs: Optional[Sequence[Any]]
    ) -> ProfilingCacheKey:
        extras = tuple(runner.get_cache_key_extras(list(inputs))) if inputs is not None else ()
        return ProfilingCacheKey(op, type(runner).__name__, hash(runner), nearest, extras)

    def _find(
        self, op: str, runners: Sequence[TunableRunner], nearest: Shapes, inputs: Optional[Sequence[Any]]
    ) -> Optional[tuple[int, Any]]:
        keys = [self._key(op, runner, nearest, inputs) for runner in runners]
        for known in (self.profiling_cache.get, lambda key: self._from_file.get(key.file_key)):
            for i, key in enumerate(keys):
                result = known(key)
                if result is not None and result[0] == key.runner_class_name:
                    return i, result[1]
        return None

    def search_cache(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        input_shapes: Sequence[Sequence[int]],
        tuning_config: TuningConfig,
        inputs: Optional[Sequence[Any]] = None,
    ) -> tuple[bool, int, Any, Shapes]:
        """Whether there is a result, the number of its runner, its tactic, and the profile that was looked for."""
        nearest = nearest_profile(input_shapes, tuning_config, self._bucketing)
        found = self._find(custom_op, runners, nearest, inputs)
        return (False, 0, _FALLBACK, nearest) if found is None else (True, *found, nearest)

    def choose_one(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        **kwargs: Any,
    ) -> tuple[TunableRunner, Any]:
        """The runner and the tactic for these inputs.

        Parameters
        ----------
        custom_op : str
            Name of the operator.
        runners : Sequence[TunableRunner]
            Its implementations; the first one, with tactic -1, is taken if nothing is known.
        tuning_config : TuningConfig
            Which sizes vary.
        inputs : Sequence[Any]
            Tensors and whatever else ``forward`` takes in its list.
        **kwargs
            What else ``forward`` takes.

        Returns
        -------
        Tuple[TunableRunner, Any]
        """
        if custom_op in self._stack()[-1][1]:
            return runners[0], _FALLBACK
        shapes = shapes_of(inputs)
        if self.is_tuning_mode and not knobs.autotuner_load_from_file:
            self._tune(custom_op, runners, tuning_config, inputs, shapes, kwargs)
        is_known, i, tactic, nearest = self.search_cache(custom_op, runners, shapes, tuning_config, inputs)
        if not is_known:
            self.stats.cache_misses += 1
            self.stats.cache_miss_config_collection[custom_op].add(nearest)
        return runners[i], tactic

    # trials --------------------------------------------------------------------------------------

    def _tune(
        self,
        op: str,
        runners: Sequence[TunableRunner],
        config: TuningConfig,
        inputs: Sequence[Any],
        shapes: Shapes,
        kwargs: dict[str, Any],
    ) -> None:
        """Measure every bucket that is not known yet."""
        with self._lock:
            for profile in profiles_for(shapes, config, self._bucketing):
                nearest = nearest_profile(profile.get_opt_shapes(), config, self._bucketing)
                if nearest in self.stats.failed_profiling_count[op]:
                    continue
                if self._find(op, runners, nearest, inputs) is not None:
                    continue
                refuse_capture(op)
                self.stats.tuned_op_total_configs[op] += 1
                best = self._best(op, runners, config, profile, inputs, kwargs)
                if best is None:
                    self.stats.failed_profiling_count[op].add(nearest)
                    _log.warning("autotune: no tactic of %s works for %s; using the default there", op, nearest)
                    continue
                runner, tactic = best
                self.profiling_cache[self._key(op, runner, nearest, inputs)] = (type(runner).__name__, tactic)
                self.stats.tuned_op_successful_configs[op] += 1

    def _best(
        self,
        op: str,
        runners: Sequence[TunableRunner],
        config: TuningConfig,
        profile: OptimizationProfile,
        inputs: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Optional[tuple[TunableRunner, Any]]:
        """The fastest runner and tactic; None if all fail, or if there is no memory for a trial."""
        best, least = None, float("inf")
        try:
            tensors = inputs_of(profile, inputs)
            if config.inputs_pre_hook is not None:
                tensors = config.inputs_pre_hook(tensors)
        except torch.OutOfMemoryError:
            return None
        for runner in runners:
            tactics = list(runner.get_valid_tactics(tensors, profile))
            if tactics:
                runner(tensors, tactic=_FALLBACK, do_preparation=True, **kwargs)
            for tactic in tactics:
                try:
                    time_ms = self._time(runner, tensors, tactic, config, kwargs)
                except Exception as error:  # whatever it is, this tactic is not to be taken
                    self.stats.failed_tactics[f"{op}::{type(runner).__name__}"].append(tactic)
                    _log.info("autotune: tactic %s of %s fails (%s); leaving it out", tactic, op, error)
                    continue
                if time_ms < least:
                    best, least = (runner, tactic), time_ms
        return best

    def _time(
        self, runner: TunableRunner, tensors: list[Any], tactic: Any, config: TuningConfig, kwargs: dict[str, Any]
    ) -> float:
        return median_ms(
            lambda: runner(tensors, tactic=tactic, **kwargs),
            tensors,
            warmup=self.warmup,
            repeat=self.repeat,
            delay_us=self.stream_delay_micro_secs,
            is_cold=config.use_cold_l2_cache,
            use_cuda_graph=config.use_cuda_graph,
        )

    # results -------------------------------------------------------------------------------------

    def save_configs(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write what was measured and what was loaded, through a temporary file."""
        results = {**self._from_file, **{key.file_key: value for key, value in self.profiling_cache.items()}}
        write_results(Path(path), results)

    def load_configs(self, path: Union[str, os.PathLike[str]]) -> bool:
        """Take the results of a file in place of those loaded before; False if they are not for this machine."""
        fit, self._from_file = read_results(Path(path))
        return fit is Fit.YES

    def clear_cache(self) -> None:
        """Forget every result."""
        self.profiling_cache.clear()
        self._from_file.clear()
        self.stats.failed_profiling_count.clear()

    def reset_statistics(self) -> None:
        self.stats = AutoTunerStatistics()
