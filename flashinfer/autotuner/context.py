# SPDX-License-Identifier: Apache-2.0
"""``with autotune():`` around the calls that a server will make, and ``autotune_v2``, whose results processes share."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Collection, Iterator, Optional, Sequence, Union

from .._runtime.errors import ArgumentError
from .autotuner import AutoTuner
from .buckets import checked_buckets
from .policy import MeasurementPolicy
from .store import ResultStore, get_default_cache_root

__all__ = ["autotune", "autotune_v2", "autotune_v2_reload"]

_log = logging.getLogger("flashinfer")


@contextlib.contextmanager
def autotune(
    tune_mode: bool = True,
    cache: Optional[Union[str, os.PathLike[str]]] = None,
    tuning_buckets: Optional[Sequence[int]] = None,
    round_up: Optional[bool] = None,
    skip_ops: Union[str, Collection[str], None] = None,
    cuda_graph_profile_replays: Optional[int] = None,
    time_budget: Optional[float] = None,
) -> Iterator[None]:
    """Measure the tactics of operators that are called inside, for sizes that are not known yet.

    Contexts may be nested and open in several threads; trials are made while any of them has ``tune_mode``.

    Parameters
    ----------
    tune_mode : bool
        False only looks results up.
    cache : Optional[str]
        JSON file of results: read on entry if it exists, in place of all results that were loaded before. With
        ``tune_mode``, results that no file has yet are merged into it on exit. One of other versions or another GPU is
        neither used nor overwritten.
    tuning_buckets : Optional[Sequence[int]]
        Sizes to try, in this thread, in place of those of each operator. None: as the context around.
    round_up : Optional[bool]
        Whether a size between two buckets takes the larger one's result. False: the smaller one's of
        ``tuning_buckets``; the buckets of an operator map sizes as it says. None: as the context around.
    skip_ops : Union[str, Collection[str], None]
        Operators that keep their defaults, in addition to those of contexts around this one.
    cuda_graph_profile_replays : Optional[int]
        Replays per trial of operators that are measured as graphs, in this thread. None: as for other operators.
    time_budget : Optional[float]
        Seconds after which no further size is measured in this thread: what is known then is used, and defaults for the
        rest. A size that was begun is finished. None: no limit but that of the context around.

    Examples
    --------
    >>> with flashinfer.autotune():
    ...     y = flashinfer.rmsnorm(torch.ones(1, 64), torch.ones(64))
    """
    buckets = None if tuning_buckets is None else checked_buckets(tuple(tuning_buckets))
    skipped = frozenset((skip_ops,) if isinstance(skip_ops, str) else skip_ops or ())
    if time_budget is not None and not time_budget >= 0:
        raise ArgumentError(f"autotune: time_budget must be 0 seconds or more, got {time_budget}")
    if cuda_graph_profile_replays is not None and not (
        isinstance(cuda_graph_profile_replays, int) and cuda_graph_profile_replays >= 1
    ):
        raise ArgumentError(
            f"autotune: cuda_graph_profile_replays must be 1 or more, got {cuda_graph_profile_replays!r}"
        )
    deadline = float("inf") if time_budget is None else time.monotonic() + time_budget
    tuner, path = AutoTuner.get(), None if cache is None else Path(cache)
    if path is not None:
        tuner._forget_loaded()
        _load(tuner, path)
    tuner.enter(tune_mode, buckets, round_up, skipped, deadline, cuda_graph_profile_replays)
    is_done = False
    try:
        yield
        is_done = True
    finally:
        tuner.leave(tune_mode)
        if path is not None and tune_mode and tuner._dirty:
            _save(tuner, path, is_done)


_inside = threading.local()


@contextlib.contextmanager
def autotune_v2(
    mode: str = "tune",
    persistent_cache: bool = True,
    cache_root: Optional[Union[str, os.PathLike[str]]] = None,
    measurement_policy: Optional[MeasurementPolicy] = None,
    *,
    tuning_buckets: Optional[Sequence[int]] = None,
    round_up: Optional[bool] = None,
    skip_ops: Union[str, Collection[str], None] = None,
    time_budget: Optional[float] = None,
) -> Iterator[None]:
    """Tune as :func:`autotune` does, with results in a store that processes share instead of in a file.

    The store has a file for each result and a folder for each environment (versions, GPU, policy), so that processes,
    and machines with a common file system, may write to it at the same time. The first result published for a size
    stays. The results of the store are used until another one is opened.

    Parameters
    ----------
    mode : str
        ``"tune"`` measures sizes that are not known yet; ``"replay"`` (or ``"lookup"``) only looks results up.
    persistent_cache : bool
        False neither reads nor writes a store.
    cache_root : Optional[str]
        Folder of the store; default: ``FLASHINFER_AUTOTUNE_CACHE_DIR``, else ``FLASHINFER_AUTOTUNE_DIR``, else
        ``autotune`` in the cache directory.
    measurement_policy : Optional[MeasurementPolicy]
        How trials are made. Results of different policies do not mix in a store.
    tuning_buckets, round_up, skip_ops, time_budget
        As for :func:`autotune`.

    Examples
    --------
    >>> with flashinfer.autotune_v2(persistent_cache=False):
    ...     y = flashinfer.rmsnorm(torch.ones(1, 64), torch.ones(64))
    """
    if mode not in ("tune", "replay", "lookup"):
        raise ArgumentError(f"autotune_v2: mode must be 'tune' or 'replay', got {mode!r}")
    if not isinstance(persistent_cache, bool):
        raise TypeError(f"autotune_v2: persistent_cache must be a bool, got {persistent_cache!r}")
    if measurement_policy is not None and not isinstance(measurement_policy, MeasurementPolicy):
        raise TypeError(f"autotune_v2: measurement_policy must be a MeasurementPolicy, got {measurement_policy!r}")
    if getattr(_inside, "is_open", False):
        raise RuntimeError("autotune_v2: nested autotune_v2 contexts are unsupported: end the one around this first")
    tuner, tunes = AutoTuner.get(), mode == "tune"
    policy = measurement_policy or MeasurementPolicy()
    store = None
    if persistent_cache:
        root = get_default_cache_root() if cache_root is None else Path(os.path.expanduser(cache_root)).absolute()
        store = tuner.open_store(root, policy.manifest_fields())
    _inside.is_open = True
    try:
        with (
            autotune(tunes, None, tuning_buckets, round_up, skip_ops, time_budget=time_budget),
            tuner.measuring_by(policy),
        ):
            yield
    finally:
        _inside.is_open = False
        if store is not None and tunes:
            _publish(tuner, store)


def autotune_v2_reload() -> None:
    """Read the stores that ``autotune_v2`` has opened again: their results replace those measured in this process.

    Processes that have measured the same sizes choose alike after each has left its context and called this.

    Examples
    --------
    >>> flashinfer.autotune_v2_reload()  # after the contexts of all ranks, and a barrier
    """
    AutoTuner.get().reload_stores()


def _publish(tuner: AutoTuner, store: ResultStore) -> None:
    """Add what was measured to a store. A failure is a warning: the results are used in this process."""
    try:
        store.publish(tuner._measured(), tuner._refused)
    except (OSError, TypeError, ValueError) as error:  # a disk error, a bad name, a tactic that JSON cannot express
        _log.warning("autotune_v2: results cannot be written to %s (%s)", store.folder, error)


def _load(tuner: AutoTuner, path: Path) -> None:
    """Load a file of results. If the file cannot be read, log a warning and go on; saving replaces the file."""
    try:
        tuner.load_configs(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("autotune: %s cannot be read (%s); tuning without it", path, error)


def _save(tuner: AutoTuner, path: Path, is_done: bool) -> None:
    """Save the results. A failure is a warning, but conflicting records are an error if the block raised none."""
    try:
        tuner.save_configs(path)
    except (OSError, TypeError, ValueError) as error:  # a disk error, or a tactic that JSON cannot express
        _log.warning("autotune: results cannot be written to %s (%s)", path, error)
    except RuntimeError as error:  # records of a file that has changed since it was read
        if is_done:
            raise
        _log.warning("autotune: results cannot be written to %s (%s)", path, error)
