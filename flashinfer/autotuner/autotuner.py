# SPDX-License-Identifier: Apache-2.0
"""The tuner: known results of each operator and size, and the trials that measure new ones."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any, Callable, Collection, Hashable, Optional, Sequence

import torch

from .._runtime.errors import ArgumentError
from .._runtime.kept import Choice, WatchedResults
from .._runtime.knobs import knobs
from .files import METADATA as _METADATA_KEY
from .files import Results
from .files import classify_metadata as _classify_metadata_mismatches
from .files import collect_metadata as _collect_metadata
from .files import cudnn_backend_version as _get_cudnn_backend_version
from .measure import is_capturing, refuse_capture
from .profiles import (
    OptimizationProfile,
    ProfilingCacheKey,
    Shapes,
    TuningConfig,
    nearest_profile,
    profile_of_bucket,
    profiles_for,
    shapes_of,
    stand_ins_of,
)
from .ranks import mean_over_ranks
from .results import SavedResults
from .runner import FALLBACK, TunableRunner
from .tactics import as_hashable as _tactic_to_json_hashable
from .tactics import from_json as _json_to_tactic
from .tactics import to_json as _tactic_to_json
from .trials import AutoTunerStatistics, Trials

__all__ = [
    "_METADATA_KEY",
    "AutoTuner",
    "AutoTunerStatistics",
    "_classify_metadata_mismatches",
    "_collect_metadata",
    "_get_cudnn_backend_version",
    "_json_to_tactic",
    "_tactic_to_json",
    "_tactic_to_json_hashable",
    "logger",
]

logger = logging.getLogger("flashinfer")

#: Published code imports these from here; the files that define them import this one.
_DEFINED_ELSEWHERE = {
    "ConstraintSpec": "profiles",
    "DynamicDim": "profiles",
    "DynamicTensorSpec": "profiles",
    "StaticDim": "profiles",
    "ValueProfileArena": "batches",
    "autotune": "context",
    "get_autotune_process_group": "ranks",
    "is_in_profile_measurement": "measure",
    "make_bucket_mapper": "buckets",
    "round_to_nearest_bucket": "buckets",
    "set_autotune_process_group": "ranks",
}


def get_config_path(is_module: bool = False) -> str:
    """Return where results that came with the package would be: the path of a file, or the name of a module.

    A published name. This package ships no results: every GPU is measured.
    """
    gpu = re.sub(r"\W+", "_", torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    name = f"v0_1_{gpu}"
    if is_module:
        return f"flashinfer.tuning_configs.{name}"
    return str(Path(__file__).resolve().parent.parent / "tuning_configs" / f"{name}.py")


def load_from_file(key: ProfilingCacheKey) -> tuple[bool, int, Any, Optional[OptimizationProfile]]:
    """Look up a result that came with the package, in the form of :meth:`AutoTuner.search_cache`: there is none."""
    return False, 0, FALLBACK, None


def __getattr__(name: str) -> Any:
    if name in _DEFINED_ELSEWHERE:
        return getattr(importlib.import_module(f".{_DEFINED_ELSEWHERE[name]}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_INFINITE = float("inf")


def _valid_tactics(
    runner: TunableRunner, inputs: Sequence[Any], profile: Callable[[], OptimizationProfile]
) -> Sequence[Any]:
    """Return the tactics of a bucket. Inputs with its sizes hold no values, and take no memory."""
    bucket = profile()
    return runner.get_valid_tactics(stand_ins_of(bucket, inputs), bucket)


def _itself(profile: OptimizationProfile) -> OptimizationProfile:
    return profile


class AutoTuner(Trials, SavedResults):
    """Tuner of tactics; ``AutoTuner.get()`` is the tuner of this process.

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
        super().__init__(warmup, repeat, stream_delay_micro_secs)
        self.profiling_cache = {}
        self._rankings: dict[ProfilingCacheKey, list[Any]] = {}  # tactics, the fastest first

    @classmethod
    def get(cls) -> AutoTuner:
        made = cls._instance
        if made is not None:  # a lock takes longer than the look-up of a kept choice
            return made
        with cls._making:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @property
    def profiling_cache(self) -> dict[ProfilingCacheKey, tuple[Any, Optional[OptimizationProfile]]]:
        """Measured results: tactic, and the profile it was measured with."""
        return self._results

    @profiling_cache.setter
    def profiling_cache(self, results: dict[ProfilingCacheKey, tuple[Any, Optional[OptimizationProfile]]]) -> None:
        self._results = WatchedResults(results, self._forget_choices)
        self._forget_choices()

    def _metadata(self) -> dict[str, str]:
        return _collect_metadata()

    def _measured(self) -> Results:
        return {key.file_key: (key.runner_class_name, tactic) for key, (tactic, _) in self.profiling_cache.items()}

    def _drop_measured(self, keys: Collection[str]) -> None:
        for key in [key for key in self.profiling_cache if key.file_key in keys]:
            del self.profiling_cache[key]

    def _warn(self, text: str, *arguments: Any) -> None:
        logger.warning(text, *arguments)

    # look-up -------------------------------------------------------------------------------------

    _find_nearest_profile_cached = staticmethod(nearest_profile)

    @classmethod
    def _find_nearest_profile(cls, shapes: Sequence[Sequence[int]], tuning_config: TuningConfig) -> Shapes:
        return cls._find_nearest_profile_cached(
            tuple(map(tuple, shapes)), tuple(tuning_config.dynamic_tensor_specs), tuple(tuning_config.constraint_specs)
        )

    @classmethod
    def _get_cache_key(
        cls,
        custom_op: str,
        runner: TunableRunner,
        input_shapes: Sequence[Sequence[int]],
        tuning_config: TuningConfig,
        extras: Sequence[Any] = (),
    ) -> ProfilingCacheKey:
        nearest = cls._find_nearest_profile(input_shapes, tuning_config)
        return ProfilingCacheKey(custom_op, type(runner).__name__, hash(runner), nearest, tuple(extras))

    def _keys(
        self,
        op: str,
        runners: Sequence[TunableRunner],
        shapes: Sequence[Sequence[int]],
        config: TuningConfig,
        inputs: Optional[Sequence[Any]],
    ) -> list[ProfilingCacheKey]:
        nearest = self._find_nearest_profile(shapes, config)  # once: the specs of a look-up are hashed in Python
        keys = []
        for runner in runners:
            extras = () if inputs is None else tuple(runner.get_cache_key_extras(list(inputs)))
            keys.append(ProfilingCacheKey(op, type(runner).__name__, hash(runner), nearest, extras))
        return keys

    def _find(
        self,
        keys: Sequence[ProfilingCacheKey],
        runners: Sequence[TunableRunner],
        inputs: Optional[Sequence[Any]],
        profile: Callable[[], OptimizationProfile],
    ) -> Optional[tuple[int, Any, Optional[OptimizationProfile]]]:
        """Return index of the runner, tactic and profile. Results measured here take precedence over loaded ones.

        ``inputs`` and ``profile`` tell which tactics there are, for a loaded one; without inputs, it is not checked.
        """
        for i, key in enumerate(keys):
            if key in self.profiling_cache:
                return i, *self.profiling_cache[key]
        for i, key in enumerate(keys if self._file_configs else ()):  # the text of a key takes 4 us
            if inputs is None:
                runner, tactic = self._file_configs.get(key.file_key, (None, None))
                found = (tactic,) if runner == key.runner_class_name else None
            else:
                valid = functools.partial(_valid_tactics, runners[i], inputs, profile)
                found = self._loaded(key.file_key, key.runner_class_name, key.custom_op, valid)
            if found is not None:
                return i, found[0], None
        return None

    def search_cache(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        input_shapes: Sequence[Sequence[int]],
        tuning_config: TuningConfig,
        inputs: Optional[Sequence[Any]] = None,
        require_profiling_policy: bool = False,
    ) -> tuple[bool, int, Any, Optional[OptimizationProfile]]:
        """Look up a result: whether there is one, the index of its runner, its tactic and the measured profile.

        The profile is None for results from a file. Without a result: ``(False, 0, -1, None)``. With
        ``require_profiling_policy``, results of files do not count: they do not say how they were measured.
        """
        config = self._apply_tuning_overrides(tuning_config)
        keys = self._keys(custom_op, runners, input_shapes, config, inputs)
        found = self._find(keys, runners, inputs, lambda: profile_of_bucket(input_shapes, config))
        if require_profiling_policy and found is not None and found[2] is None:
            found = None
        return (False, 0, FALLBACK, None) if found is None else (True, *found)

    def choose_one(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        **kwargs: Any,
    ) -> tuple[TunableRunner, Any]:
        """Choose the runner and the tactic for these inputs.

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
        return self._choose(custom_op, runners, tuning_config, inputs, kwargs)[:2]

    def choose_and_keep(
        self,
        facts: Hashable,
        custom_op: str,
        runners: Callable[[], Sequence[TunableRunner]],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        note: Any = None,
    ) -> tuple[TunableRunner, Any]:
        """Return what :meth:`choose_one` returns, in 1 us from the second call on.

        Parameters
        ----------
        facts : Hashable
            All that the runners and the choice depend on: the operator, exact sizes, dtypes, layouts, the device.
            ``kept.get(facts)`` is the :class:`~.kept.Choice` of an earlier call, or None; whoever takes one that is not
            known adds 1 to ``stats.cache_misses``, as a look-up would.
        runners : Callable
            Makes the list of implementations, the default first.
        custom_op, tuning_config, inputs
            As for :meth:`choose_one`.
        note : Any
            Kept with the choice, for the caller.
        """
        kept = self.kept  # before the look-up, see KeptChoices
        choice = kept.get(facts)
        if choice is None:
            choice = kept[facts] = self._choose(custom_op, runners(), tuning_config, inputs, {})._replace(note=note)
        elif not choice.is_known:
            self.stats.cache_misses += 1
        return choice.runner, choice.tactic

    def _choose(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Choice:
        if custom_op in self._effective_skip_ops:
            return Choice(runners[0], FALLBACK, False)
        config, shapes = self._apply_tuning_overrides(tuning_config), shapes_of(inputs)
        keys = self._keys(custom_op, runners, shapes, config, inputs)
        profile = functools.partial(profile_of_bucket, shapes, config)
        found = self._find(keys, runners, inputs, profile)
        if self._may_measure() and not (found is not None and is_capturing()):
            self._tune(custom_op, runners, config, inputs, shapes, kwargs)
            found = self._find(keys, runners, inputs, profile)
        if found is None:
            self.stats.cache_misses += 1
            self.stats.cache_miss_config_collection[custom_op].add(keys[0].nearest_profile)
            return Choice(runners[0], FALLBACK, False)
        return Choice(runners[found[0]], found[1], True)

    def _may_measure(self) -> bool:
        return self.is_tuning_mode and not knobs.autotuner_load_from_file

    def rank_tactics(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        k: int = 1,
        **kwargs: Any,
    ) -> list[Any]:
        """Return the fastest tactics of one runner for these inputs, best first, at most ``k``.

        While tuning and with ``k`` above 1, each tactic is measured once for the bucket of these inputs, even if a
        result is known; :meth:`choose_one` returns the best one from then on. Otherwise the list has one element, the
        tactic that :meth:`choose_one` returns.

        Parameters
        ----------
        custom_op, tuning_config, inputs, **kwargs
            As for :meth:`choose_one`.
        runners : Sequence[TunableRunner]
            One runner.
        k : int
            How many tactics to return, at least 1.
        """
        if len(runners) != 1:
            raise ArgumentError(f"rank_tactics: runners must have 1 element, got {len(runners)}")
        if k < 1:
            raise ArgumentError(f"rank_tactics: k must be at least 1, got {k}")
        if k == 1 or not self._may_measure() or custom_op in self._effective_skip_ops:
            return [self.choose_one(custom_op, runners, tuning_config, inputs, **kwargs)[1]]
        config, shapes = self._apply_tuning_overrides(tuning_config), shapes_of(inputs)
        (key,) = self._keys(custom_op, runners, shapes, config, inputs)
        with self._lock:
            if key not in self._rankings:
                refuse_capture(custom_op)
                profile = profile_of_bucket(shapes, config)
                trials = self._trials(custom_op, runners, config, profile, inputs, kwargs)
                finite = [(ms, tactic) for _, tactic, ms in trials if ms < _INFINITE]
                self._rankings[key] = [tactic for _, tactic in sorted(finite, key=lambda trial: trial[0])]
                if finite:
                    self.profiling_cache[key], self._dirty = (self._rankings[key][0], profile), True
            return self._rankings[key][:k] or [FALLBACK]

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
        """Measure every unknown bucket, the largest first: if its inputs fit in memory, those of smaller ones fit."""
        with self._lock:
            for profile in reversed(profiles_for(shapes, config)):
                keys = self._keys(op, runners, profile.get_opt_shapes(), config, inputs)
                nearest = keys[0].nearest_profile
                if nearest in self.stats.failed_profiling_count[op]:
                    continue
                if self._find(keys, runners, inputs, functools.partial(_itself, profile)) is not None:
                    continue
                if self._is_budget_spent():
                    logger.warning(
                        "autotune: time_budget is spent; using defaults of %s for %s and smaller", op, nearest
                    )
                    return
                refuse_capture(op)
                self.stats.tuned_op_total_configs[op] += 1
                runner, tactic, time_ms = min(
                    self._trials(op, runners, config, profile, inputs, kwargs),
                    key=lambda trial: trial[2],
                    default=(runners[0], FALLBACK, _INFINITE),
                )
                if time_ms == _INFINITE:
                    self.stats.failed_profiling_count[op].add(nearest)
                    logger.warning("autotune: no tactic of %s works for %s; using the default there", op, nearest)
                    continue
                self.profiling_cache[keys[list(runners).index(runner)]] = (tactic, profile)
                self.stats.tuned_op_successful_configs[op] += 1
                self._dirty = True

    def _is_budget_spent(self) -> bool:
        """Tell whether the time budget is over, on any of the ranks that must choose alike."""
        if self._deadline == _INFINITE:
            return False
        return mean_over_ranks(float(time.monotonic() >= self._deadline)) > 0

    # results -------------------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Forget every result."""
        self.profiling_cache.clear()
        self._rankings.clear()
        self._forget_loaded()
        self._published.clear()
        self._dirty = False
        type(self).was_used = self.is_tuning_mode
        self.stats.failed_profiling_count.clear()

    def reset_statistics(self) -> None:
        self.stats = AutoTunerStatistics()
        self._forget_choices()  # sizes of misses are collected when a choice is made, not when a kept one is taken
