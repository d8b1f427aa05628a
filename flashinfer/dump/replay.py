# SPDX-License-Identifier: Apache-2.0
"""Runs dumped calls again and compares the results.

A dump names the function to call, and a dump may come from someone else. Only functions decorated with
``@flashinfer_api`` are called, only modules of this package are imported, tensors load without pickled code, and C++
source of a variant (``jit_args`` of a constructor) is compiled only with ``allow_code=True``. What remains possible
without it: the call builds modules of this package, allocates what the recorded sizes ask for, and runs kernels that
trust index values (page tables, offsets), which can end the process or touch memory next to the tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
from pathlib import Path
from typing import Any, Callable, Mapping, MutableMapping, Optional, Union

import torch

from ..describe import describe_tensor
from ..errors import ArgumentError
from . import files
from .codec import class_path, decode, load_class, with_layout

__all__ = ["register_api", "replay_from_dump", "replay_main", "replay_sequence", "wraps"]

_log = logging.getLogger("flashinfer.api")
_TOLERANCE = 1e-3  # relative and absolute
_apis: dict[tuple[str, str], Callable[..., Any]] = {}
_CODE = ("jit_args", "jit_kwargs")  # parameters whose text ends up in C++ that is compiled and loaded

# (process id, object id) in the recording process -> the rebuilt object
ObjectRegistry = MutableMapping[tuple[int, int], Any]


def register_api(func: Callable[..., Any]) -> None:
    """Make ``func`` replayable; the decorator calls this for every public function."""
    _apis[func.__module__, func.__qualname__] = func


def wraps(candidate: Any, func: Callable[..., Any]) -> bool:
    """Whether ``candidate`` is ``func`` or a ``functools.wraps`` chain around it."""
    while candidate is not None and candidate is not func:
        candidate = getattr(candidate, "__wrapped__", None)
    return candidate is func


def replay_from_dump(
    dump_dir: Union[str, Path],
    compare_outputs: bool = False,
    device: Union[str, torch.device] = "cuda",
    run: bool = False,
    object_registry: Optional[ObjectRegistry] = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Load one dump and, if asked, call the function again.

    Parameters
    ----------
    dump_dir : str or Path
        Directory of one call.
    compare_outputs : bool
        Load the recorded outputs; with ``run`` also compare them (tolerance 1e-3 relative and absolute).
    device : str or torch.device
        Where the tensors go. Tensors that were on the host stay there when others of the same call were not.
        Without CUDA, ``"cuda"`` means the devices recorded in the dump.
    run : bool
        Call the function.
    object_registry : dict, optional
        Objects whose methods are replayed, keyed by (process id, object id); replaying an ``__init__`` adds one.
    allow_code : bool
        Compile and run C++ source that the dump holds (``jit_args``). Only for dumps of your own.

    Returns
    -------
    dict
        ``args``, ``kwargs``, ``metadata``; with ``compare_outputs`` ``expected_tensors``; with ``run``
        ``execution_result`` or ``execution_error``; with both ``comparison_match`` (absent when the dump has no
        outputs) and ``comparison_details``, one line per difference.
    """
    registry = {} if object_registry is None else object_registry
    return _Replay(Path(dump_dir), _target(device), registry, allow_code).result(compare_outputs, run)


def replay_sequence(
    root_dir: Union[str, Path], device: Union[str, torch.device] = "cuda", allow_code: bool = False
) -> list[dict[str, Any]]:
    """Replay and compare every dump under ``root_dir`` in call order, rebuilding the objects the calls belong to.

    Parameters
    ----------
    root_dir : str or Path
        Directory of a session.
    device, allow_code
        As for :func:`replay_from_dump`.

    Returns
    -------
    list of dict
        Results of :func:`replay_from_dump`, each with its ``dump_dir``.
    """
    target = _target(device)
    registry: ObjectRegistry = {}
    results = []
    for directory in sorted(path.parent for path in Path(root_dir).glob(f"*/{files.METADATA}")):
        try:
            result = _Replay(directory, target, registry, allow_code).result(compare_outputs=True, run=True)
        except Exception as error:  # one broken dump must not hide the others
            result = {"metadata": {}, "execution_error": f"{type(error).__name__}: {error}"}
        results.append({**result, "dump_dir": str(directory)})
    return results


def replay_main(
    directory: Union[str, Path], device: Union[str, torch.device] = "cuda", allow_code: bool = False
) -> int:
    """The ``replay`` command: one line per dump; returns 0 if all agree, 1 if one does not, 2 if there is none."""
    root = Path(directory)
    if (root / files.METADATA).exists():
        result = replay_from_dump(root, compare_outputs=True, device=device, run=True, allow_code=allow_code)
        results = [{**result, "dump_dir": str(root)}]
    else:
        results = replay_sequence(root, device, allow_code)
    if not results:
        print(f"replay: {root} has no dumps, expected directories with a {files.METADATA}")
        return 2
    failures = 0
    width = max(len(str(result["metadata"].get("function_name", "?"))) for result in results)
    print(f"{'outcome':<10} {'api':<{width}} call  directory")
    for result in results:
        outcome, reasons = _outcome(result)
        failures += bool(reasons)
        metadata = result["metadata"]
        api, call = metadata.get("function_name", "?"), metadata.get("call_sequence", "?")
        print(f"{outcome:<10} {api:<{width}} {call:>4}  {Path(result['dump_dir']).name}")
        for line in reasons:
            print(f"{'':<10} {line}")
    print(f"{len(results)} replayed, {failures} failed")
    return 1 if failures else 0


def _outcome(result: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A word for the table and the reasons of a failure."""
    error, match = result.get("execution_error"), result.get("comparison_match")
    if match:
        return ("match", []) if error is None else ("same error", [])
    if error is not None:
        return "ERROR", [error]
    return ("ran", []) if match is None else ("MISMATCH", result["comparison_details"])


def _target(device: Union[str, torch.device]) -> Optional[torch.device]:
    """Where replayed tensors go; ``None`` stands for the recorded devices."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ArgumentError(f"replay: device is {str(device)!r}, expected cpu or cuda") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        _log.warning("replay: CUDA is not available, using the devices recorded in the dump (CPU for CUDA ones)")
        return None
    return wanted


class _Replay:
    """One dump being replayed."""

    def __init__(
        self, directory: Path, target: Optional[torch.device], registry: ObjectRegistry, allow_code: bool
    ) -> None:
        self.metadata = files.read_record(directory)
        self.directory = directory / self.metadata.get("snapshot", ".")
        self.registry = registry
        self._allow_code = allow_code
        self._target = target
        self._missing: list[_Unrecorded] = []
        details = self.metadata["tensor_details"]["inputs"]
        self._all_on_host = all(torch.device(info["device"]).type == "cpu" for info in details.values())
        if self.metadata["execution_status"] == "graph_capture_pending_flush":
            raise RuntimeError(f"replay: {directory} is of a CUDA graph that was never flushed, expected a snapshot")
        self.tensors = {}
        for key, tensor in files.load_tensors(self.directory, "inputs").items():
            device = self._place(torch.device(details[key]["device"]))
            self.tensors[key] = with_layout(tensor, tensor.shape, details[key]["stride"], device)
        inputs = self.metadata["input_metadata"]
        self.args = [self._decode(value) for value in inputs["args"]]
        self.kwargs = {name: self._decode(value) for name, value in inputs["kwargs"].items()}

    def result(self, compare_outputs: bool, run: bool) -> dict[str, Any]:
        result: dict[str, Any] = {"args": self.args, "kwargs": self.kwargs, "metadata": self.metadata}
        expected = self._expected() if compare_outputs else None
        if expected is not None:
            result["expected_tensors"] = expected
        if run:
            try:
                result["execution_result"] = value = self._call()
            except Exception as error:
                result["execution_error"] = text = f"{type(error).__name__}: {error}"
                if compare_outputs and "error" in self.metadata:
                    result["comparison_match"] = text == self.metadata["error"]
                    result["comparison_details"] = [f"raised {text}, recorded {self.metadata['error']}"]
            else:
                differences = self._differences(expected, value) if compare_outputs else None
                if differences is not None:
                    result |= {"comparison_match": not differences, "comparison_details": differences}
        return result

    def _call(self) -> Any:
        if self._missing:
            raise RuntimeError(
                f"replay: {self._missing[0]} is unknown, expected a value or an object of an earlier dump"
            )
        func, args = self._function(), list(self.args)
        if "self_id" in self.metadata:
            if self._is_nested_init(func):
                return None  # the replay of the subclass has called it
            args.insert(0, self._owner(func))
        if not self._allow_code:
            _refuse_code(func, args, self.kwargs)
        value = func(*args, **self.kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an asynchronous fault belongs to this call
        return value

    def _function(self) -> Callable[..., Any]:
        module, qualname = self.metadata["module"], self.metadata["qualname"]
        if module == "flashinfer" or module.startswith("flashinfer."):
            importlib.import_module(module)
        if (module, qualname) not in _apis:
            raise RuntimeError(f"replay: {module}.{qualname} is no known API, expected a function with @flashinfer_api")
        return _apis[module, qualname]

    def _is_nested_init(self, func: Callable[..., Any]) -> bool:
        """Whether the ``__init__`` of a subclass, of which there is a dump too, has made this call."""
        if func.__name__ != "__init__":
            return False
        key, cls = (self.metadata["process_id"], self.metadata["self_id"]), load_class(self.metadata["self_class"])
        return type(self.registry.get(key)) is cls and func is not _first_logged_init(cls)

    def _owner(self, func: Callable[..., Any]) -> Any:
        key, path = (self.metadata["process_id"], self.metadata["self_id"]), self.metadata["self_class"]
        if func.__name__ == "__init__":
            cls = load_class(path)
            if not any(wraps(vars(base).get("__init__"), func) for base in cls.__mro__):
                raise RuntimeError(f"replay: {path} is recorded, expected a class with {func.__qualname__}")
            # Ids are reused after an object dies: the first logged __init__ starts a new one, a base's continues.
            if key not in self.registry or func is _first_logged_init(cls):
                self.registry[key] = cls.__new__(cls)
        known = self.registry.get(key)
        if known is None or path not in map(class_path, type(known).__mro__):  # of another object that had this id
            raise RuntimeError(f"replay: the {path} of this call is unknown, expected a dump of its __init__ before")
        return known

    def _expected(self) -> Optional[dict[str, torch.Tensor]]:
        return files.load_tensors(self.directory, "outputs") if self.metadata.get("outputs_saved") else None

    def _differences(self, expected: Optional[dict[str, torch.Tensor]], value: Any) -> Optional[list[str]]:
        """``None`` when there is nothing to compare with."""
        if expected is None:
            return None
        recorded = self.metadata["output_metadata"]
        if self.metadata["graph_capture"] and (recorded["result_aliases"] or not expected):
            return None  # the snapshot holds destinations as they were after the call, also among the inputs
        lines = _compare(self._decode(recorded["result"], expected), value, "result")
        for key in recorded["mutated"]:
            lines += _compare(expected[key], self.tensors[key], key)
        return lines

    def _decode(self, encoded: Mapping[str, Any], tensors: Optional[Mapping[str, torch.Tensor]] = None) -> Any:
        return decode(encoded, self.tensors if tensors is None else tensors, self._place, self._find_object)

    def _place(self, recorded: torch.device) -> torch.device:
        if self._target is None:
            return torch.device("cpu")
        return self._target if recorded.type != "cpu" or self._all_on_host else recorded

    def _find_object(self, encoded: Mapping[str, Any]) -> Any:
        known = self.registry.get((self.metadata["process_id"], encoded.get("id", 0)))
        if known is not None:
            return known
        kind = encoded.get("class") or f"{encoded['type']} on {encoded['device']}"
        self._missing.append(_Unrecorded(f"{encoded['argument']} ({kind})"))
        return self._missing[-1]


def _first_logged_init(cls: type) -> Optional[Callable[..., Any]]:
    """The ``__init__`` whose dump is the first of an object of ``cls``: that of the class, or of the next base."""
    names = ((base.__module__, f"{base.__qualname__}.__init__") for base in cls.__mro__)
    return next((_apis[name] for name in names if name in _apis), None)


def _refuse_code(func: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a parameter that holds C++ source is given."""
    values = dict(kwargs)
    with contextlib.suppress(TypeError):  # the call itself says what does not fit
        values |= inspect.signature(func).bind_partial(*args).arguments
    for name in _CODE:
        if values.get(name) is not None:
            raise RuntimeError(
                f"replay: {name} of {func.__qualname__} holds C++ source that would be compiled and run, expected none "
                "(if you trust where it comes from: allow_code=True, or flashinfer replay --allow-code)"
            )


class _Unrecorded:
    """Stands for an object that a dump cannot hold, such as a communicator."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


def _compare(expected: Any, actual: Any, path: str) -> list[str]:
    """One line per difference; objects a dump cannot hold are passed over."""
    if isinstance(expected, _Unrecorded):
        return []
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _compare_tensors(expected, actual.detach().cpu(), path)
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        return [line for key in expected for line in _compare(expected[key], actual[key], f"{path}[{key!r}]")]
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for i, (left, right) in pairs for line in _compare(left, right, f"{path}[{i}]")]
    same = type(expected) is type(actual) and (expected == actual or (expected != expected and actual != actual))
    with contextlib.suppress(TypeError):
        same = same or math.isclose(expected, actual, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return [] if same else [f"{path} is {_show(actual)}, recorded {_show(expected)}"]


def _show(value: Any) -> str:
    return describe_tensor(value) if isinstance(value, torch.Tensor) else repr(value)


def _compare_tensors(expected: torch.Tensor, actual: torch.Tensor, path: str) -> list[str]:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        ours, theirs = ((tuple(t.shape), t.dtype) for t in (actual, expected))
        return [f"{path} is {ours}, recorded {theirs}"]
    if not expected.is_floating_point() or (expected.element_size() == 1 and "float8" not in str(expected.dtype)):
        # Integers and packed formats (two fp4 in a byte) must agree exactly.
        left, right = (t.contiguous().view(torch.uint8) if t.is_floating_point() else t for t in (expected, actual))
        wrong = (left != right).sum().item()
        return [f"{path} differs in {wrong} of {expected.numel()} elements"] if wrong else []
    left, right = expected.double(), actual.double()
    close = torch.isclose(right, left, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    if close.all():
        return []
    worst = (left - right)[~close].abs().max().item()
    wrong = close.numel() - int(close.sum())
    return [f"{path} differs in {wrong} of {close.numel()} elements, largest difference {worst:.4g}"]
