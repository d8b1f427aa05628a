# SPDX-License-Identifier: Apache-2.0
"""``with autotune():`` around the calls that a server will make."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Collection, Iterator, Optional, Sequence, Union

from .._runtime.errors import ArgumentError
from .autotuner import AutoTuner
from .buckets import checked_buckets

__all__ = ["autotune"]

_log = logging.getLogger("flashinfer")


@contextlib.contextmanager
def autotune(
    tune_mode: bool = True,
    cache: Optional[Union[str, os.PathLike[str]]] = None,
    tuning_buckets: Optional[Sequence[int]] = None,
    round_up: Optional[bool] = None,
    skip_ops: Union[str, Collection[str], None] = None,
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
    deadline = float("inf") if time_budget is None else time.monotonic() + time_budget
    tuner, path = AutoTuner.get(), None if cache is None else Path(cache)
    if path is not None:
        tuner._forget_loaded()
        _load(tuner, path)
    tuner.enter(tune_mode, buckets, round_up, skipped, deadline)
    is_done = False
    try:
        yield
        is_done = True
    finally:
        tuner.leave(tune_mode)
        if path is not None and tune_mode and tuner._dirty:
            _save(tuner, path, is_done)


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
