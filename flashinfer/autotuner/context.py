# SPDX-License-Identifier: Apache-2.0
"""``with autotune():`` around the calls that a server will make."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Collection, Iterator, Optional, Sequence, Union

from .buckets import checked_buckets, make_bucket_mapper
from .files import Fit, read_results
from .profiles import Bucketing
from .tuner import AutoTuner

__all__ = ["autotune"]

_log = logging.getLogger("flashinfer")


@contextlib.contextmanager
def autotune(
    tune_mode: bool = True,
    cache: Optional[Union[str, os.PathLike[str]]] = None,
    tuning_buckets: Optional[Sequence[int]] = None,
    round_up: Optional[bool] = None,
    skip_ops: Union[str, Collection[str], None] = None,
) -> Iterator[None]:
    """Measure the tactics of operators that are called inside, for sizes that are not known yet.

    Contexts may be nested and open in several threads; trials are made while any of them has ``tune_mode``.

    Parameters
    ----------
    tune_mode : bool
        False only looks results up.
    cache : Optional[str]
        JSON file of results: read on entry if it exists, written on exit if something new was measured. One of other
        versions or another GPU is neither used nor overwritten.
    tuning_buckets : Optional[Sequence[int]]
        Sizes to try, in this thread, in place of those of each operator.
    round_up : Optional[bool]
        Whether a size between two of ``tuning_buckets`` takes the larger one's result; the smaller one's if not.
    skip_ops : Union[str, Collection[str], None]
        Operators that keep their defaults, in addition to those of contexts around this one.

    Examples
    --------
    >>> with flashinfer.autotune():
    ...     y = flashinfer.rmsnorm(torch.ones(1, 64), torch.ones(64))
    """
    bucketing = Bucketing()
    if tuning_buckets is not None:
        buckets = checked_buckets(tuple(tuning_buckets))
        bucketing = Bucketing(buckets, make_bucket_mapper(buckets, bool(round_up)))
    skipped = frozenset((skip_ops,) if isinstance(skip_ops, str) else skip_ops or ())
    tuner, path, may_write = AutoTuner.get(), None if cache is None else Path(cache), True
    if path is not None and path.exists():
        fit, tuner._from_file = read_results(path)
        may_write = fit is not Fit.NO
    tuner.enter(tune_mode, bucketing, skipped)
    before = len(tuner.profiling_cache)
    try:
        yield
    finally:
        tuner.leave(tune_mode)
        if path is not None and tune_mode and len(tuner.profiling_cache) > before:
            if may_write:
                _save(tuner, path)
            else:
                _log.warning("autotune: %s is of other versions or another GPU; new results are not written", path)


def _save(tuner: AutoTuner, path: Path) -> None:
    """Results hold in this process whether or not they can be kept, and an error inside the context goes first."""
    try:
        tuner.save_configs(path)
    except (OSError, TypeError, ValueError) as error:  # the disk; tactics that JSON has no word for
        _log.warning("autotune: results cannot be written to %s (%s)", path, error)
