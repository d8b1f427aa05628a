# SPDX-License-Identifier: Apache-2.0
"""State set by ``autotune``: tuning mode, shared by all threads; bucket overrides and skipped operators, per thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Callable, Iterator, NamedTuple, Optional

from .._runtime.kept import KeptChoices, NoChoices
from .policy import MeasurementPolicy
from .profiles import TuningConfig, with_buckets

__all__ = ["Overrides"]


class _Overrides(NamedTuple):
    """Overrides that ``autotune`` was given for every operator, in one thread."""

    buckets: Optional[tuple[int, ...]] = None
    round_up: Optional[bool] = None
    skip_ops: frozenset[str] = frozenset()
    deadline: float = float("inf")  #: time.monotonic() after which no trial of a bucket begins
    replays: Optional[int] = None  #: replays of a graph in a trial
    policy: MeasurementPolicy = MeasurementPolicy()


class Overrides:
    """The open ``autotune`` contexts. :class:`AutoTuner` reads them before the configuration of an operator."""

    #: Whether results may exist: contexts with ``tune_mode`` were entered, or a file was loaded. Read on fast paths.
    was_used = False

    def __init__(self) -> None:
        super().__init__()
        self._is_tuning_mode = False
        self._open_contexts = 0  # in all threads
        self._active_tuning_contexts = 0  # those with tune_mode
        self._lock = threading.RLock()
        self._threads = threading.local()  # stack of overrides of each thread
        #: Choices that callers keep, until results may have changed or a context begins or ends.
        self.kept = KeptChoices()

    @property
    def is_tuning_mode(self) -> bool:
        """True while unknown sizes are measured."""
        return self._is_tuning_mode

    @is_tuning_mode.setter
    def is_tuning_mode(self, value: bool) -> None:
        self._is_tuning_mode = value
        self._forget_choices()

    def _forget_choices(self) -> None:
        """Let every caller choose anew. Called after each change of what a choice depends on."""
        with self._lock:
            self.kept = NoChoices() if self._open_contexts > 0 or self._is_tuning_mode else KeptChoices()

    def enter(
        self,
        tune_mode: bool,
        buckets: Optional[tuple[int, ...]],
        round_up: Optional[bool],
        skip_ops: frozenset[str],
        deadline: float = float("inf"),
        replays: Optional[int] = None,
    ) -> None:
        """Begin a context, which :meth:`leave` ends. None inherits the value of the enclosing context."""
        stack = self._stack()
        outer = stack[-1]
        stack.append(
            _Overrides(
                outer.buckets if buckets is None else buckets,
                outer.round_up if round_up is None else round_up,
                outer.skip_ops | skip_ops,
                min(outer.deadline, deadline),
                outer.replays if replays is None else replays,
                outer.policy,
            )
        )
        self._count_contexts(+1, tune_mode)
        type(self).was_used |= tune_mode

    @contextlib.contextmanager
    def measuring_by(self, policy: MeasurementPolicy) -> Iterator[None]:
        """Make trials of this thread by a policy for the length of a ``with`` block."""
        stack = self._stack()
        before = stack[-1]
        stack[-1] = before._replace(policy=policy)
        try:
            yield
        finally:
            stack[-1] = before

    def leave(self, tune_mode: bool) -> None:
        self._stack().pop()
        self._count_contexts(-1, tune_mode)

    def _count_contexts(self, change: int, tune_mode: bool) -> None:
        with self._lock:
            self._open_contexts += change
            self._active_tuning_contexts += change * tune_mode
            self.is_tuning_mode = self._active_tuning_contexts > 0

    def _stack(self) -> list[_Overrides]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = [_Overrides()]
        return self._threads.stack

    @property
    def _override_tuning_buckets(self) -> Optional[tuple[int, ...]]:
        return self._stack()[-1].buckets

    @property
    def _override_round_up(self) -> Optional[bool]:
        return self._stack()[-1].round_up

    @property
    def _effective_skip_ops(self) -> frozenset[str]:
        return self._stack()[-1].skip_ops

    @property
    def _policy(self) -> MeasurementPolicy:
        return self._stack()[-1].policy

    @property
    def _replays(self) -> Optional[int]:
        return self._stack()[-1].replays

    @property
    def _deadline(self) -> float:
        return self._stack()[-1].deadline

    def _apply_tuning_overrides(self, tuning_config: TuningConfig) -> TuningConfig:
        overrides = self._stack()[-1]
        return with_buckets(tuning_config, overrides.buckets, overrides.round_up)

    def get_effective_map_to_tuning_buckets(
        self, tuning_config: TuningConfig, spec_idx: int = 0
    ) -> Callable[[int], int]:
        """Return the map from sizes to buckets in effect: the buckets of ``autotune``, else those of the operator."""
        return self._apply_tuning_overrides(tuning_config).dynamic_tensor_specs[spec_idx].map_to_tuning_buckets
