# SPDX-License-Identifier: Apache-2.0
"""Put candidates in the place of APIs, and count what happens.

A patched API looks up the definition of each call, which takes some 50 us. APIs that no candidate can be for stay as
they are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import threading
import types
from collections import Counter
from typing import Any, Callable, Iterator, Mapping, Optional, Union

import torch

from ..._runtime.errors import ArgumentError
from ..._runtime.knobs import knobs
from ...fi_trace import api_name
from ..solution import Solution
from ..template import Const, TraceTemplate
from .adapt import adapt_and_call, candidate_parameters, output_dests, returns_list, returns_what
from .calls import bind_namespace, build_extractor_maps, templates_of
from .plans import PlanAdapter, adapter_for, fetch_plan_kwargs, stash_plan_kwargs
from .solutions import Candidate, candidates_of, load

__all__ = ["apply_from_environment", "bump_stat", "disable_apply", "enable_apply", "is_enabled", "stats"]

_log = logging.getLogger("flashinfer")
_KINDS = ("hit", "fallback_no_candidate", "fallback_unwarmed_in_capture", "error")
#: Parameters that say how to compute, not what.
_HOW = {
    *("backend", "enable_pdl", "launch_with_pdl", "workspace_buffer", "out", "lse", "self", "deterministic"),
    *("check_nan", "kv_layout", "use_fp16_qk_reduction", "return_lse"),
}
_MARK = "_trace_apply_original"

_candidates: dict[str, Candidate] = {}
_counts: dict[str, Counter[str]] = {}
_warned: set[tuple[str, str]] = set()
_is_enabled = False
_inside = threading.local()  # a candidate that calls the API it replaces gets the original


def enable_apply(solutions: Optional[Mapping[str, Union[Callable[..., Any], Solution]]] = None) -> int:
    """Replace ops by solutions whose definition has the name of the call's definition.

    A call without a solution runs the original, as does a call with an argument that its definition does not have and
    that the solution does not take: a warning names it. A solution that fails raises.

    Parameters
    ----------
    solutions : Optional[Mapping[str, Union[Callable, Solution]]]
        Functions or solutions by definition name. They take the inputs of the definition by name and return its
        outputs. Default: the JSON files under ``FLASHINFER_TRACE_APPLY_PATH``, whose code is run.

    Returns
    -------
    int
        Number of APIs that were patched. Modules that import one of them later get the replacement too.

    Examples
    --------
    >>> from flashinfer.trace_apply import disable_apply, enable_apply
    >>> enable_apply({"rmsnorm_h4": lambda hidden_states, weight: hidden_states * 0})
    1
    >>> flashinfer.rmsnorm(torch.ones(1, 4), torch.ones(4))
    tensor([[0., 0., 0., 0.]])
    >>> disable_apply()
    """
    global _is_enabled
    if solutions is None:
        path = knobs.trace_apply_path
        if path is None:
            raise ArgumentError("enable_apply: solutions must be given where FLASHINFER_TRACE_APPLY_PATH is not set")
        solutions = load(path)
    chosen = candidates_of(solutions)
    disable_apply()
    _candidates.update(chosen)
    _is_enabled = True
    from ...aot import FAMILIES

    for family in FAMILIES:
        with contextlib.suppress(ModuleNotFoundError):  # api_log_stats is no public module
            importlib.import_module(f"flashinfer.{family}")
    replaced = _replace(_replacement, _stashing)
    unused = [name for name in chosen if not any(_may_be(name, t) for t in _templates())]
    if unused:
        _log.warning("enable_apply: no API has a definition named %s", ", ".join(sorted(unused)))
    return len(replaced)


def apply_from_environment() -> None:
    """Call :func:`enable_apply` as ``FLASHINFER_TRACE_APPLY=1`` asks at import; a failure is a warning."""
    try:
        count = enable_apply()
    except Exception as error:
        _log.warning("FLASHINFER_TRACE_APPLY=1: no op is replaced (%s)", error)
    else:
        _log.info("FLASHINFER_TRACE_APPLY=1: %d APIs may be replaced by solutions of %s", count, knobs.trace_apply_path)


def disable_apply() -> None:
    """Put the original functions back. Counts of :func:`stats` start anew."""
    global _is_enabled
    _is_enabled = False
    _replace(_original, _original)
    _candidates.clear()
    _counts.clear()
    _warned.clear()


def is_enabled() -> bool:
    """Return True between :func:`enable_apply` and :func:`disable_apply`."""
    return _is_enabled


def stats() -> dict[str, dict[str, int]]:
    """Return how often each patched API was called, by outcome.

    ``hit``: the solution ran. ``fallback_no_candidate``: there was none. ``fallback_unwarmed_in_capture``: it had not
    run before a CUDA graph was captured, where nothing can be compiled. ``error``: it raised.
    """
    return {api: {kind: counts[kind] for kind in _KINDS} for api, counts in _counts.items()}


def bump_stat(fi_api: str, kind: str, amount: int = 1) -> None:
    """Count an outcome of a call of an API, besides those that replacements count."""
    if kind not in _KINDS:
        raise ArgumentError(f"bump_stat: kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    _counts.setdefault(fi_api, Counter())[kind] += amount


def _templates() -> Iterator[TraceTemplate]:
    from ...fi_trace import traced_functions

    for function in traced_functions.values():
        yield from templates_of(getattr(function, "_trace_template", None))


def _may_be(name: str, template: TraceTemplate) -> bool:
    """Return True if a definition of the template can have the name."""
    has_sizes = any(isinstance(kind, Const) and kind.abbrev != "" for kind in template.axes.values())
    return name.startswith(f"{template.prefix}_") if has_sizes else name == template.prefix


def _original(function: Callable[..., Any]) -> Optional[Callable[..., Any]]:
    return getattr(function, _MARK, None)


def _replace(new_api: Callable[[Any], Any], new_plan: Callable[[Any], Any]) -> set[int]:
    """Replace functions in all modules, and methods of our classes; return the ids of the APIs that were replaced."""
    replaced: dict[int, Any] = {}
    made: dict[int, Any] = {}

    def renew(owner: Any, name: str, thing: Any) -> None:
        if type(thing) is not types.FunctionType:
            return
        is_api = hasattr(thing, "_trace_template")
        if not is_api and name != "plan":
            return
        if id(thing) not in made:
            made[id(thing)] = new_api(thing) if is_api else new_plan(thing)
        if made[id(thing)] is not None:
            setattr(owner, name, made[id(thing)])
            if is_api:
                replaced[id(thing)] = thing

    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        for name, thing in list(names.items()) if isinstance(names, dict) else ():
            # type(), not isinstance(): that asks the object, and some objects of torch warn or import on any question.
            if type(thing) is types.FunctionType:
                renew(module, name, thing)
            elif (
                issubclass(type(thing), type)
                and module_name.startswith("flashinfer.")
                and thing.__module__ == module_name
            ):
                for member, value in list(vars(thing).items()):
                    renew(thing, member, value)
    return set(replaced)


def _stashing(plan: Callable[..., Any]) -> Optional[Callable[..., Any]]:
    """Return a ``plan()`` that keeps its arguments, for wrappers whose definitions need them."""
    if adapter_for(f"{api_name(plan).rpartition('.')[0]}.run") is None or hasattr(plan, _MARK):
        return None

    @functools.wraps(plan)
    def stashing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plan(self, *args, **kwargs)
        stash_plan_kwargs(self, bind_namespace(plan, (self, *args), kwargs))
        return result

    setattr(stashing, _MARK, plan)
    return stashing


def _replacement(original: Callable[..., Any]) -> Optional[Callable[..., Any]]:
    """Return what stands for an API; None if no candidate can be for it, or if its results cannot be described."""
    spec: Any = getattr(original, "_trace_template", None)
    templates = templates_of(spec)
    if hasattr(original, _MARK) or not any(_may_be(name, t) for t in templates for name in _candidates):
        return None
    count = returns_what(original)
    if count and any(count != len(template.outputs) for template in templates):
        _log.warning("enable_apply: %s returns %d values, which its definitions lack", api_name(original), count)
        return None
    replacement = _Replacement(original, spec, templates, count == 0)
    call = functools.wraps(original)(lambda *args, **kwargs: replacement(args, kwargs))
    setattr(call, _MARK, original)
    return call


class _Replacement:
    """An API with candidates."""

    def __init__(
        self, original: Callable[..., Any], spec: Any, templates: tuple[TraceTemplate, ...], is_inplace: bool
    ) -> None:
        self._original, self._spec, self._is_inplace = original, spec, is_inplace
        self._returns_list = returns_list(original)
        self._api = api_name(original)
        self._plans: Optional[PlanAdapter] = adapter_for(self._api)
        self._axes = build_extractor_maps(templates)
        self._dests = {id(template): output_dests(template) for template in templates}
        self._defaults = {p.name: p.default for p in inspect.signature(original).parameters.values()}
        self._counts = _counts.setdefault(self._api, Counter())

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or getattr(_inside, "is_so", False):
            return self._original(*args, **kwargs)
        found = self._find(args, kwargs)
        if isinstance(found, str):
            self._counts[found] += 1
            return self._original(*args, **kwargs)
        candidate, template, namespace = found
        _inside.is_so = True
        try:
            result = adapt_and_call(
                template=template,
                fn=candidate.load(),
                namespace=namespace,
                dps=candidate.dps,
                is_inplace=self._is_inplace,
                dests=self._dests[id(template)],
                positional=candidate.positional,
            )
        except BaseException:
            self._counts["error"] += 1
            raise
        finally:
            _inside.is_so = False
        candidate.is_warm = True
        self._counts["hit"] += 1
        if self._returns_list:
            return [result] if isinstance(result, torch.Tensor) else list(result)
        return result

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Union[str, tuple[Candidate, TraceTemplate, dict[str, Any]]]:
        """Return the candidate, its template and the arguments by name; or why there is none."""
        try:
            namespace = bind_namespace(self._original, args, kwargs)
            plan = fetch_plan_kwargs(namespace.get("self")) if self._plans is not None else None
            if self._plans is not None and plan is not None:
                namespace = self._plans.merge(plan, namespace)
            template = self._spec if isinstance(self._spec, TraceTemplate) else self._spec(**namespace)
            name = template.definition_name(self._axes[template.prefix](namespace))
        except (TypeError, ArgumentError):  # a wrong call: the original says what is wrong
            return "fallback_no_candidate"
        candidate = _candidates.get(name)
        if candidate is None:
            return "fallback_no_candidate"
        if not candidate.is_warm and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "fallback_unwarmed_in_capture"
        obstacle = self._obstacle(candidate, template, namespace, plan)
        if obstacle is not None:
            if (name, obstacle) not in _warned:
                _warned.add((name, obstacle))
                _log.warning("trace_apply: %s: %s; the original runs", name, obstacle)
            return "fallback_no_candidate"
        return candidate, template, namespace

    def _obstacle(
        self, candidate: Candidate, template: TraceTemplate, namespace: dict[str, Any], plan: Optional[dict[str, Any]]
    ) -> Optional[str]:
        """Return the argument that a definition lacks and the candidate does not take, or None."""
        taken = () if candidate.positional else candidate_parameters(candidate.load())
        if self._plans is not None:
            if plan is None:
                return "the wrapper was planned before enable_apply()"
            obstacle = self._plans.obstacle(plan, namespace, taken)
            if obstacle is not None:
                return obstacle
        if namespace.get("return_lse") and "lse" not in template.outputs:
            return "return_lse=True asks for an output that the definition lacks"
        known = {*template.parameters(), *template.inputs, *template.axes, *_HOW, *taken}
        known |= {str(getattr(spec, "dtype_from", None)) for spec in template.outputs.values()}
        for name, default in self._defaults.items():
            value = namespace.get(name, default)
            if name not in known and default is not inspect.Parameter.empty and not _is_same(value, default):
                return f"{name}={value} is no input of the definition and the candidate does not take it"
        return None


def _is_same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return not isinstance(value, torch.Tensor) and not isinstance(default, torch.Tensor) and bool(value == default)
