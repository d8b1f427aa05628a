# SPDX-License-Identifier: Apache-2.0
"""Devices and backends that an API supports: ``@supported_compute_capability`` and ``@backend_requirement``.

A *check* has the parameters of its API, returns True, or raises ``ValueError`` saying what is wrong. It carries the
capabilities it is valid for; ``arch.CPU`` stands for the host:

    @supported_compute_capability([CPU, *TURING_ON])
    def _check_clamp(x, lo, hi):
        if lo > hi:
            raise ArgumentError(f"clamp: lo is {lo}, expected at most hi = {hi}")
        return True

    @backend_requirement(backend_checks={}, common_check=_check_clamp)
    def clamp(x, lo, hi): ...

An API with several implementations gives one check per backend name and has a parameter ``backend``. A check without
the decorator inherits the capabilities of the common check; when that has none either, every device is let through.

Cost of a checked call: 0.6 us on top of the function and its check, 0.1 us with ``skip_check=True`` (CPython 3.11).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NoReturn, Optional, TypeVar

import torch

from .arch import CPU
from .codegen_wrapper import traced_as_constant, wrap_with
from .errors import ArgumentError, BackendSupportedError
from .experimental import experimental_auto_backends_allowed, warn_experimental_backend_once
from .explain_error import explain_kinds
from .probes import probes

__all__ = ["backend_requirement", "supported_compute_capability"]

F = TypeVar("F", bound=Callable[..., Any])
Capabilities = Optional[frozenset[int]]  # None: nothing was declared, everything is accepted


def supported_compute_capability(supported_ccs: Iterable[int]) -> Callable[[F], F]:
    """Declare the compute capabilities (``major * 10 + minor``, or ``arch.CPU``) a check is valid for.

    The function gets ``is_compute_capability_supported(cc)`` and is otherwise left as it is.
    """
    if not isinstance(supported_ccs, Iterable):
        raise TypeError(
            f"supported_compute_capability: supported_ccs must be an iterable of integers, got {supported_ccs!r}"
        )
    ccs = list(supported_ccs)
    for i, cc in enumerate(ccs):
        if type(cc) is not int:  # bool is an int by inheritance only
            raise TypeError(
                f"supported_compute_capability: supported_ccs[{i}] must be an integer such as 90, got "
                f"{type(cc).__name__} {cc!r}"
            )
    declared = frozenset(ccs)

    def decorate(func: F) -> F:
        func._supported_ccs = declared  # type: ignore[attr-defined]
        func.is_compute_capability_supported = declared.__contains__  # type: ignore[attr-defined]
        return func

    return decorate


class SuitableBackends(Sequence[str]):
    """Backends that ``backend="auto"`` found for the call in progress, best first; afterwards, those of the last call.

    Reads like a list. Each thread and each asyncio task sees its own calls, and a nested call does not change the list
    of the outer call.
    """

    def __init__(self) -> None:
        state: contextvars.ContextVar[tuple[tuple[str, ...], bool]] = contextvars.ContextVar(
            "suitable_auto_backends", default=((), False)
        )

        # Constants for torch.compile, which cannot trace a ContextVar.
        @traced_as_constant
        def current() -> tuple[str, ...]:
            return state.get()[0]

        @traced_as_constant
        def begin(names: Sequence[str]) -> tuple[tuple[str, ...], bool]:
            before = state.get()
            state.set((tuple(names), True))
            return before

        @traced_as_constant
        def end(before: tuple[tuple[str, ...], bool]) -> None:
            state.set(before if before[1] else (state.get()[0], False))

        def note(names: tuple[str, ...]) -> None:
            """Publish what a kept launch knows of its call, which is over; not for code that torch.compile traces."""
            known, is_in_progress = state.get()
            if known != names and not is_in_progress:
                state.set((names, False))

        self.current, self.begin, self.end, self.note = current, begin, end, note

    def __getitem__(self, index: Any) -> Any:
        return list(self.current())[index]

    def __len__(self) -> int:
        return len(self.current())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self.current()) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self.current()))


def _accepts(ccs: Capabilities, cc: Optional[int]) -> bool:
    return ccs is None or cc is None or cc in ccs


def _spell(cc: Optional[int]) -> str:
    return "cpu" if cc == CPU else str(cc)


class _Requirement:
    """Requirements of one decorated API; the first four methods become methods of the API."""

    def __init__(
        self,
        func: Callable[..., Any],
        backend_checks: dict[str, Callable[..., bool]],
        common_check: Optional[Callable[..., bool]],
        heuristic_func: Optional[Callable[..., Sequence[str]]],
    ) -> None:
        self.func, self.name = func, func.__name__
        self.backend_checks, self.common_check, self.heuristic_func = backend_checks, common_check, heuristic_func
        self.common_ccs: Capabilities = getattr(common_check, "_supported_ccs", None)
        self.ccs: dict[str, Capabilities] = {
            name: getattr(check, "_supported_ccs", self.common_ccs) for name, check in backend_checks.items()
        }
        all_ccs = list(self.ccs.values()) or [self.common_ccs]
        self.runs_on_cpu = any(_accepts(ccs, CPU) for ccs in all_ccs)
        self.is_restricted = any(ccs is not None for ccs in all_ccs)
        self.suitable = SuitableBackends()
        self.experimental = frozenset(n for n, check in backend_checks.items() if getattr(check, "is_experimental", 0))

    def is_backend_supported(self, backend: str, cc: Optional[int] = None) -> bool:
        """Return True if the function has ``backend`` and ``backend`` runs on capability ``cc`` (None: any)."""
        if not self.backend_checks:
            raise ArgumentError(f"Invalid is_backend_supported call: no backend choices for {self.name}")
        return backend in self.ccs and _accepts(self.ccs[backend], cc)

    def is_compute_capability_supported(self, cc: int) -> bool:
        """Return True if the function, through any of its backends, runs on compute capability ``cc``."""
        if self.backend_checks:
            return any(_accepts(ccs, cc) for ccs in self.ccs.values())
        if self.common_ccs is None:
            check = getattr(self.common_check, "__name__", self.name)
            raise ArgumentError(
                f"Invalid is_compute_capability_supported call: {check} does not have is_compute_capability_supported "
                "decorator"
            )
        return cc in self.common_ccs

    def has_backend(self, backend: str) -> bool:
        """Return True if ``backend`` is one of the names the function knows."""
        return backend in self.backend_checks

    def has_backend_choices(self) -> bool:
        """Return True if the caller can choose a backend."""
        return bool(self.backend_checks)

    def capability(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[int]:
        """Return the capability of the first tensor's device; None without tensors or if no check restricts devices."""
        if not self.is_restricted:
            return None
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                if self.runs_on_cpu and value.is_cpu:
                    return CPU
                try:
                    major, minor = probes.get_compute_capability(value.device)
                except ArgumentError:
                    bound = inspect.signature(self.func).bind(*args, **kwargs).arguments
                    which = next((name for name, argument in bound.items() if argument is value), "a tensor")
                    expected = "the CPU or a CUDA device" if self.runs_on_cpu else "a CUDA device"
                    raise ArgumentError(f"{self.name}: {which} must be on {expected}, got {value.device}") from None
                return major * 10 + minor
        return None

    def check_common(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.common_check is not None and not self.common_check(*args, **kwargs):
            raise ArgumentError(f"Problem size is not supported for {self.name}")

    def check_plain(self, *args: Any, **kwargs: Any) -> None:
        """Validate a call of an API without backends."""
        if self.common_check is None:
            raise ArgumentError(
                f"Invalid @backend_requirement decorator usage: no backend choices and no common_check for {self.name}"
            )
        cc = self.capability(args, kwargs)
        if not _accepts(self.common_ccs, cc):
            raise BackendSupportedError(f"{self.name} does not support compute capability {_spell(cc)}")
        self.check_common(args, kwargs)

    def check_named(self, backend: str, /, *args: Any, **kwargs: Any) -> None:
        """Validate a call that names its backend."""
        if backend not in self.ccs:
            cc = None
            with contextlib.suppress(ArgumentError):  # the name is wrong on any device
                cc = self.capability(args, kwargs)
            self.refuse(backend, cc)
        cc = self.capability(args, kwargs)
        if not _accepts(self.ccs[backend], cc):
            self.refuse(backend, cc)
        self.check_common(args, kwargs)
        if backend in self.experimental:
            warn_experimental_backend_once(self.name, backend)
        if not self.backend_checks[backend](*args, **kwargs):
            raise ArgumentError(f"Problem size is not supported for {self.name} with backend '{backend}'")

    def refuse(self, backend: str, cc: Optional[int]) -> NoReturn:
        usable = ", ".join(name for name, ccs in self.ccs.items() if _accepts(ccs, cc)) or "none"
        where = "" if cc is None else f" with capability {_spell(cc)}"
        raise BackendSupportedError(f"{self.name} does not support backend '{backend}'{where}; usable here: {usable}")

    def run_auto(self, skip_check: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call with ``backend="auto"``: find suitable backends, order them, publish the list, run the body."""
        cc = self.capability(args, kwargs)
        if not skip_check:
            self.check_common(args, kwargs)
        left_out = () if not self.experimental or experimental_auto_backends_allowed() else self.experimental
        names: Sequence[str] = [
            name
            for name, ccs in self.ccs.items()
            if name not in left_out and _accepts(ccs, cc) and self.suits(name, args, kwargs)
        ]
        if names and self.heuristic_func is not None:
            names = self.heuristic_func(names, *args, **kwargs)
        if not names:
            raise BackendSupportedError(f"No suitable auto backends found for {self.name}")
        if names[0] in self.experimental:
            warn_experimental_backend_once(self.name, names[0], automatic=True)
        before = self.suitable.begin(names)
        try:
            return self.func(*args, **kwargs)
        finally:
            self.suitable.end(before)

    def suits(self, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            return bool(self.backend_checks[backend](*args, **kwargs))
        except ValueError:
            return False


_CHECK = """
try:
    if not skip_check:
        _check_plain({arguments})
    return _func({arguments})
except Exception as error:
    _explain(error, {arguments})
    raise
"""

_CHECK_BACKEND = """
try:
    if backend == "auto":
        return _run_auto(skip_check, {arguments})
    if not skip_check:
        _check_named(backend, {arguments})
    return _func({arguments})
except Exception as error:
    _explain(error, {arguments})
    raise
"""


def backend_requirement(
    backend_checks: dict[str, Callable[..., bool]],
    common_check: Optional[Callable[..., bool]] = None,
    heuristic_func: Optional[Callable[..., Sequence[str]]] = None,
) -> Callable[[F], F]:
    """Check device, backend and arguments before every call of an API.

    Parameters
    ----------
    backend_checks : Dict[str, Callable]
        One check per value of the API's parameter ``backend``; empty for an API with one implementation.
    common_check : Optional[Callable]
        Check that holds for every backend.
    heuristic_func : Optional[Callable]
        ``heuristic_func(suitable_backends, *args)`` orders what passed for "auto", best first, and may drop some.
        Default: the order of ``backend_checks``.

    Returns
    -------
    Callable
        A decorator. The decorated function also takes ``skip_check=False`` (True leaves out all checks; "auto" still
        looks for backends). It answers ``is_backend_supported(backend, cc=None)``, ``has_backend(backend)``,
        ``is_compute_capability_supported(cc)``, ``has_backend_choices()``; its body reads ``suitable_auto_backends``.
        A refused backend or capability raises ``BackendSupportedError``, refused arguments raise ``ValueError``.
    """

    def decorate(func: F) -> F:
        requirement = _Requirement(func, backend_checks, common_check, heuristic_func)
        explained = {"_explain": functools.partial(explain_kinds, func.__name__, func)}
        if backend_checks:
            if "backend" not in inspect.signature(func).parameters:
                raise TypeError(f"backend_requirement: {func.__name__} has backend checks but no parameter 'backend'")
            names: dict[str, Any] = {"_check_named": requirement.check_named, "_run_auto": requirement.run_auto}
            wrapper: Any = wrap_with(func, _CHECK_BACKEND, names | explained, extra={"skip_check": False})
        else:
            names = {"_check_plain": requirement.check_plain}
            wrapper = wrap_with(func, _CHECK, names | explained, extra={"skip_check": False})
        wrapper.is_backend_supported = requirement.is_backend_supported
        wrapper.is_compute_capability_supported = requirement.is_compute_capability_supported
        wrapper.has_backend = requirement.has_backend
        wrapper.has_backend_choices = requirement.has_backend_choices
        wrapper.suitable_auto_backends = requirement.suitable
        wrapper.experimental_backends = requirement.experimental
        return wrapper

    return decorate
