# SPDX-License-Identifier: Apache-2.0
"""``@flashinfer_api``: the decorator of every public function, and the API log behind it.

level 0   nothing: the decorated name is the plain function
      1   one line with the API name, before the call
      3   + arguments as they were passed before the call, results after it (shape, stride, dtype, device, ...)
      5   + min, max, mean, NaN and Inf counts; during a capture, a kernel prints them at each replay
     10   + tensor dumps (``flashinfer.dump``); with ``FLASHINFER_DUMP_DIR`` set, from level 1 on

``FLASHINFER_LOGLEVEL`` and the other variables are read once, when this module is imported. What is known about a call
is on disk before the call starts, so it survives a crash inside. A failure of the log never reaches the caller.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, TextIO, TypeVar

import torch

from ._runtime.describe import Statistics, describe, describe_result, tensor_statistics
from ._runtime.experimental import ExperimentalWarning as ExperimentalWarning
from ._runtime.experimental import experimental_auto_backends_allowed as experimental_auto_backends_allowed
from ._runtime.experimental import mark_function
from ._runtime.experimental import require_experimental_auto_backends as require_experimental_auto_backends
from ._runtime.experimental import warn_experimental_backend_once as warn_experimental_backend_once
from ._runtime.knobs import knobs
from .dump import clear_graph_dumps, flush_graph_dumps, graph, replay_from_dump, replay_sequence
from .dump.apis import register_api, wraps
from .dump.writer import ApiCall, CallDump, Dumper, DumpSettings
from .version import __git_commit__, __version__

__all__ = [
    "LogSettings",
    "clear_graph_dumps",
    "ExperimentalWarning",
    "experimental_auto_backends_allowed",
    "flashinfer_api",
    "flashinfer_experimental_api",
    "flush_graph_dumps",
    "make_api_decorator",
    "replay_from_dump",
    "replay_sequence",
    "require_experimental_auto_backends",
    "warn_experimental_backend_once",
]

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("flashinfer.api")

_TRACE_REGISTRY: list[tuple[Callable[..., Any], Any, str]] = []  #: (function, template, label) of every traced API


@dataclass(frozen=True)
class LogSettings:
    """Settings of the decorator, fixed when a function is decorated."""

    level: int = 0
    dest: str = "stdout"
    dump: DumpSettings = field(default_factory=DumpSettings)
    dumps: Optional[bool] = None  #: whether tensors are dumped; None: from level 10 on

    def __post_init__(self) -> None:
        if self.dumps is None:
            object.__setattr__(self, "dumps", self.level >= 10)

    @classmethod
    def from_knobs(cls) -> LogSettings:
        dest = "stderr" if knobs.log_dest == "stdout" and _is_our_command() else knobs.log_dest
        dumps = knobs.log_level >= 10 or (knobs.log_level >= 1 and bool(os.environ.get("FLASHINFER_DUMP_DIR")))
        return cls(knobs.log_level, dest, DumpSettings.from_knobs(), dumps)


def _is_our_command() -> bool:
    """Return True for ``flashinfer ...`` and ``python -m flashinfer...``: scripts parse what these print to stdout."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # sys.argv[0] while Python looks for the module
        program = " ".join(sys.orig_argv).partition(" -m")[2].strip().split(" ")[0].split(".")[0]
    return Path(program).name == "flashinfer"


_HANDLER_NAME = "flashinfer.api destination"


_RULE = "=" * 80
_THIN_RULE = "-" * 80


class _Lines(logging.Formatter):
    """Format a record as time and text, with a rule above the record if it asks for one, or as text alone."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "timeless", False):
            return record.getMessage()
        text = super().format(record)
        return f"{_RULE}\n{text}" if getattr(record, "ruled", False) else text


class _Destination(logging.Handler):
    """stdout, stderr or an appended file, opened at the first line and again after a fork (``%i``: process id)."""

    def __init__(self, dest: str) -> None:
        super().__init__()
        self.set_name(_HANDLER_NAME)
        self.dest = dest
        self._file: Optional[TextIO] = None
        self._pid = 0
        self._broken = False
        self.setFormatter(_Lines("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = self._stream()
            stream.write(self.format(record) + "\n")
            stream.flush()
            if stream is self._file:
                with contextlib.suppress(OSError):  # a pipe or /dev/null cannot be synced
                    os.fsync(stream.fileno())
        except Exception as error:
            if not self._broken and sys.stderr is not None:
                self._broken = True
                print(f"flashinfer.api: cannot log to {self.dest} ({error}); the calls go on unlogged", file=sys.stderr)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def _stream(self) -> TextIO:
        if self.dest in ("stdout", "stderr"):
            return getattr(sys, self.dest)  # looked up each time: programs and tests replace it
        if self._file is None or self._pid != os.getpid():
            self._pid = os.getpid()
            path = Path(self.dest.replace("%i", str(self._pid))).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        return self._file


def _set_destination(dest: str) -> None:
    """Point the logger at ``dest``; handlers added by the user stay.

    The name marks our handler, because one of an earlier import of this module is of another class.
    """
    for handler in [h for h in _log.handlers if h.get_name() == _HANDLER_NAME]:
        _log.removeHandler(handler)
        handler.close()
    _log.addHandler(_Destination(dest))
    _log.setLevel(logging.INFO)
    _log.propagate = False


@contextlib.contextmanager
def _harmless(what: str) -> Iterator[None]:
    """Turn a failure of the log into a line of the log."""
    try:
        yield
    except Exception as error:
        _log.warning("%s failed: %s: %s", what, type(error).__name__, error)


class _ApiLog:
    """The log of all functions decorated with one set of settings."""

    def __init__(self, settings: LogSettings) -> None:
        self.settings = settings
        self._dumper = Dumper(settings.dump) if settings.dumps else None
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._banner_due = True

    def wrap(self, func: F) -> F:
        if hasattr(func, "_trace_template"):
            from .fi_trace import dumping_when_asked

            func = dumping_when_asked(func)
        if self.settings.level <= 0:
            return func
        signature: Optional[inspect.Signature] = None
        with _harmless("reading the signature"):
            signature = inspect.signature(func)

        @functools.wraps(func)
        def logged(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # values do not exist yet, and the log would break the graph
                return func(*args, **kwargs)
            call, dump = None, None
            with _harmless("logging the call"):
                call = self._new_call(func, logged, args, kwargs)
                dump = self._before(call, signature)
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                with _harmless("logging the exception"):
                    self._failed(call, dump, error)
                raise
            with _harmless("logging the result"):
                self._after(call, dump, result)
            return result

        return logged  # type: ignore[return-value]

    def _new_call(self, func: Any, logged: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ApiCall:
        owner = args[0] if args and _is_method_of(logged, args[0]) else None
        name = func.__name__ if owner is None else f"{type(owner).__name__}.{func.__name__}"
        passed = args if owner is None else args[1:]
        return ApiCall(name, func, next(self._counters[name]), owner, passed, kwargs, graph.is_capturing())

    def _before(self, call: ApiCall, signature: Optional[inspect.Signature]) -> Optional[CallDump]:
        if self._banner_due:
            self._banner_due = False
            _log.info(_banner())
        head = f"FlashInfer API Call: {call.name} (call {call.sequence})"
        if not self._is_detailed(call):
            _log.info(head)
        else:
            lines = [head, _THIN_RULE, *self._describe_arguments(call, signature)]
            _log.info("\n".join(lines), extra={"ruled": True})
        if self._dumper is None or not self.settings.dump.selects(call.name):
            return None
        with _harmless("the dump of the inputs"):
            dump = self._dumper.begin(call)
            if dump is not None:
                _log.info("%s dumped to %s", call.name, dump.directory)
            return dump
        return None

    def _after(self, call: Optional[ApiCall], dump: Optional[CallDump], result: Any) -> None:
        if call is not None and self._is_detailed(call):
            self._log_result(call, result)
        if self._dumper is not None and dump is not None:
            self._dumper.end(dump, result)

    def _log_result(self, call: ApiCall, result: Any) -> None:
        statistics = self._statistics(call)
        lines = [f"{call.name} returned (call {call.sequence})", "Output value:", *describe_result(result, statistics)]
        if result is None and self.settings.level >= 5:  # the function wrote its results to its arguments
            lines += ["Arguments after the call:", *self._describe_passed(call)]
        _log.info("\n".join(lines))

    def _failed(self, call: Optional[ApiCall], dump: Optional[CallDump], error: Exception) -> None:
        if call is not None and self._is_detailed(call):
            _log.info("%s raised (call %d): %s: %s", call.name, call.sequence, type(error).__name__, error)
        if self._dumper is not None and dump is not None:
            self._dumper.fail(dump, error)

    def _is_detailed(self, call: ApiCall) -> bool:
        return self.settings.level >= 3 and self.settings.dump.selects(call.name)

    def _statistics(self, call: ApiCall) -> Optional[Statistics]:
        if self.settings.level < 5:
            return None
        return _captured_statistics if call.is_capturing else tensor_statistics

    def _describe_arguments(self, call: ApiCall, signature: Optional[inspect.Signature]) -> list[str]:
        """Describe the arguments in the way they were passed, and the defaults of parameters that were not passed."""
        lines = self._describe_passed(call)
        defaults = _defaults(call, signature)
        if defaults:
            lines.append("Default parameters (not explicitly provided):")
        for name, value in defaults.items():
            lines += describe(f"{name}= [DEFAULT]", value)
        return lines

    def _describe_passed(self, call: ApiCall) -> list[str]:
        statistics = self._statistics(call)
        lines = ["Positional input arguments:"] if call.passed else []
        for i, value in enumerate(call.passed):
            lines += describe(f"arg[{i}]:", value, statistics)
        if call.kwargs:
            lines.append("Keyword input arguments:")
        for name, value in call.kwargs.items():
            lines += describe(f"{name}=", value, statistics)
        return lines


@functools.cache
def _get_api_log_stats_kernel() -> Optional[Callable[[torch.Tensor, int], None]]:
    """Load the kernel that prints statistics of a tensor on the device; ``None`` where the kernel cannot be built."""
    with _harmless("loading the kernel for statistics inside CUDA graphs"):
        from ._runtime.api_log_stats import load_stats_kernel

        return load_stats_kernel()
    return None


def _captured_statistics(tensor: torch.Tensor) -> str:
    from ._runtime.api_log_stats import deferred_statistics

    return deferred_statistics(tensor, _get_api_log_stats_kernel())


def _defaults(call: ApiCall, signature: Optional[inspect.Signature]) -> dict[str, Any]:
    """Return the defaults of parameters that were not passed; empty for a call that does not fit the signature."""
    if signature is None:
        return {}
    try:
        given = signature.bind(*call.passed, **call.kwargs).arguments
    except TypeError:
        return {}
    left_out = {name: parameter.default for name, parameter in signature.parameters.items() if name not in given}
    return {name: default for name, default in left_out.items() if default is not inspect.Parameter.empty}


def _is_method_of(logged: Callable[..., Any], owner: object) -> bool:
    """Return True if the class of ``owner``, or a base of that class, defines ``logged`` as a method."""
    return any(wraps(vars(cls).get(logged.__name__), logged) for cls in type(owner).__mro__)


def _banner() -> str:
    """Describe versions and devices. GPUs are named only if CUDA is initialised, because asking would initialise it."""
    lines = ["flashinfer API log"]
    lines.append(f"  flashinfer {__version__}, pid {os.getpid()}, Python {sys.version.split()[0]}")
    with _harmless("the torch version"):
        lines.append(f"  torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {_cudnn_version()}")
    with _harmless("the list of GPUs"):
        count = torch.cuda.device_count()
        lines.append(f"  GPUs: {count}")
        for index in range(count if torch.cuda.is_initialized() else 0):
            major, minor = torch.cuda.get_device_capability(index)
            lines.append(f"    {index}: {torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    return "\n".join(lines)


def _cudnn_version() -> Optional[int]:
    return torch.backends.cudnn.version() if torch.cuda.is_initialized() else None


def _restore_cuda_graph_hooks() -> None:
    """Restore the methods of ``torch.cuda.CUDAGraph`` that level 10 has wrapped."""
    graph.restore_graph_hooks()


def make_api_decorator(settings: LogSettings) -> Callable[..., Any]:
    """Return a decorator like :func:`flashinfer_api` with explicit settings; the last one made sets the destination."""
    _set_destination(settings.dest)
    log = _ApiLog(settings)
    if settings.level >= 5:  # now: neither building nor opening a module is legal during a capture
        _get_api_log_stats_kernel()
    if settings.level >= 10:
        graph.install_graph_hooks()
        _log.warning(
            "FLASHINFER_LOGLEVEL=%d writes every argument and result of the API to %s: model weights and user data "
            "included, readable by whoever can read that directory",
            settings.level,
            settings.dump.directory,
        )

    def decorator(func: Optional[F] = None, *, trace: Any = None) -> Any:
        if func is None:
            return functools.partial(decorator, trace=trace)
        register_api(func)
        if trace is not None:
            from .fi_trace import attach_fi_trace, registry_entries

            attach_fi_trace(func, trace)
            _TRACE_REGISTRY.extend(registry_entries(func, trace))
        return log.wrap(func)

    return decorator


_settings = LogSettings.from_knobs()
_decorate = make_api_decorator(_settings)
if _settings.level > 0:  # so that a program that calls no API shows that its log is on
    _log.info("FlashInfer %s (commit %s)", __version__, __git_commit__[:8], extra={"timeless": True})


def flashinfer_api(func: Optional[Callable[..., Any]] = None, *, trace: Any = None) -> Any:
    """Mark a public function: log its calls, attach its trace template.

    Usable bare or with arguments. With the log off, a function without a template is returned as it is.

    Parameters
    ----------
    func : callable
        The function, when used without parentheses.
    trace : TraceTemplate or callable, optional
        Template attached as ``func.fi_trace``; see ``flashinfer.fi_trace``.

    Examples
    --------
    >>> @flashinfer_api
    ... def twice(x):
    ...     return 2 * x
    >>> twice(4)
    8
    """
    return _decorate(func, trace=trace)


def flashinfer_experimental_api(func: Any = None, *, trace: Any = None, feature: Optional[str] = None) -> Any:
    """Decorate a public function that may change: as ``flashinfer_api``, with a warning at the first call."""
    if func is None:
        return functools.partial(flashinfer_experimental_api, trace=trace, feature=feature)
    return flashinfer_api(mark_function(func, feature), trace=trace)
