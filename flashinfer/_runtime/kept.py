# SPDX-License-Identifier: Apache-2.0
"""Choices kept between calls, because a look-up takes 20 us, and a dictionary of results that says when it changes."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple

__all__ = ["Choice", "KeptChoices", "NoChoices", "WatchedResults"]

_MOST_CHOICES = 1 << 14


class Choice(NamedTuple):
    """Choice of ``choose_one``: runner and tactic, whether they are a result (or the default), and a caller's note."""

    runner: Any
    tactic: Any
    is_known: bool
    note: Any = None


class KeptChoices(dict[Any, Any]):
    """Choices by whatever facts of a call they depend on. When there are too many, all are forgotten.

    The tuner replaces the whole dictionary whenever a choice may have become another one. Who chooses gets the
    dictionary first, and keeps the choice there: if results change in between, the choice is lost, not wrong.
    """

    def __setitem__(self, key: Any, choice: Any) -> None:
        if len(self) >= _MOST_CHOICES:
            self.clear()
        super().__setitem__(key, choice)


class NoChoices(KeptChoices):
    """Stands for the choices while ``autotune()`` is open in any thread: each call asks, and nothing is kept."""

    def __setitem__(self, key: Any, choice: Any) -> None:
        pass


class WatchedResults(dict[Any, Any]):
    """Dictionary that calls ``changed`` after every change."""

    def __init__(self, results: Mapping[Any, Any], changed: Callable[[], None]) -> None:
        super().__init__(results)
        self._changed = changed


def _announced(name: str) -> Callable[..., Any]:
    change = getattr(dict, name)

    def announced(self: WatchedResults, *args: Any, **kwargs: Any) -> Any:
        try:
            return change(self, *args, **kwargs)
        finally:
            self._changed()

    return announced


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(WatchedResults, _name, _announced(_name))
