# SPDX-License-Identifier: Apache-2.0
"""Choices kept between calls: facts of a call -> what was chosen for them -> launch.

A checked call of a GEMM takes Python 9 to 15 us, a kept launch 2 to 4 (Xeon of 2.5 GHz); a look-up of the tuner takes
20. ``KeptLaunches`` has what an API chose for calls of the same facts, ``KeptChoices`` what the tuner did.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Callable, Mapping, NamedTuple, Optional, TypeVar

from . import arch
from .knobs import knobs
from .probes import probes

__all__ = ["Choice", "KeptChoices", "KeptLaunches", "NoChoices", "WatchedResults", "kept_parts", "one_launch"]

F = TypeVar("F", bound=Callable[..., Any])

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


# A probe that a serving engine has replaced is asked by the checks, in each call.
_BODY = """
if _probes.get_compute_capability is _own_capability and _probes.device_support_pdl is _own_pdl:
    try:
        _launch = _known({facts})
        if _launch is not None:
            _result = _launch({passed})
            if _result is not None:
                return _result
    except Exception:
        pass
"""
_NAMES: dict[str, Any] = {
    "_probes": probes,
    "_own_capability": arch.get_compute_capability,
    "_own_pdl": arch.device_support_pdl,
}
_log = logging.getLogger("flashinfer.api")
_CALLS_ARE_LOGGED = 3  #: level from which the log has arguments, and the choices made for them


class KeptLaunches(KeptChoices):
    """Launches of one API by the facts of its calls; as a decorator below ``@flashinfer_api``, looks them up.

    A call of unknown facts runs the function: its checks, its choice, and ``keep``. A call of known facts takes the
    launch that was kept and no check. The function runs as well when a launch returns None (it does not take these
    operands) or raises: the checks find the words for what is wrong.

    Parameters
    ----------
    facts : str
        Expression over the parameters of the API: all that the checks and the choice depend on, except what native code
        or the launch itself refuses. It runs in each call.
    passed : str
        Arguments of a launch, expressions over the same parameters.
    **names
        What else the expressions read.
    """

    def __init__(self, facts: str, passed: str, **names: Any) -> None:
        super().__init__()
        self.names = names
        self.facts, self.passed, self.name = f"({facts})", passed, ""

    def __call__(self, func: F) -> F:
        function = inspect.unwrap(func)
        self.parameters = tuple(inspect.signature(function).parameters)
        self.name = function.__name__
        self.facts_of = eval(f"lambda {', '.join(self.parameters)}: {self.facts}", dict(self.names))
        func._kept_launches = self  # type: ignore[attr-defined]
        return func

    def keep(self, launch: Optional[Callable[..., Any]], reason: str, *args: Any) -> None:
        """Keep the launch for the facts of ``args``, all arguments of the call; None: nothing can be kept.

        Level 3 of the API log has a line for each launch, with the reason of the choice.
        """
        if launch is None or not (
            probes.get_compute_capability is arch.get_compute_capability
            and probes.device_support_pdl is arch.device_support_pdl
        ):
            return
        facts = self.facts_of(*args)
        self[facts] = launch
        if knobs.log_level >= _CALLS_ARE_LOGGED:
            _log.info("%s %s -> %s (%s)", self.name, facts, launch.__name__.strip("_"), reason)

    def keep_call(self, launch: Optional[Callable[..., Any]], reason: str, arguments: Mapping[str, Any]) -> None:
        """Do the same for an API of many parameters, whose ``locals()`` are the arguments by name."""
        self.keep(launch, reason, *(arguments[name] for name in self.parameters))


def one_launch(launch: Callable[..., Any]) -> KeptLaunches:
    """Return a decorator that tries ``launch`` in each call, for an API without a choice; None from it: not this call.

    The parameters of ``launch`` are some of those of the API.
    """
    kept = KeptLaunches("0", passed=", ".join(inspect.signature(launch).parameters))
    kept[0] = launch
    return kept


def kept_parts(func: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return statements for :func:`wrap_with` that take a kept launch of ``func``, and the names that they use.

    There is no wrapper of its own, because passing the 36 arguments of ``cutlass_fused_moe`` on takes 0.6 us.
    """
    kept: Optional[KeptLaunches] = func.__dict__.get("_kept_launches")
    if kept is None:
        return "", {}
    body = _BODY.replace("{facts}", kept.facts).replace("{passed}", kept.passed)
    return body, {**_NAMES, **kept.names, "_known": kept.get}


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
