# SPDX-License-Identifier: Apache-2.0
"""Replay of dumped calls and comparison of the results.

A dump names the function to call, and a dump may come from someone else. Only functions decorated with
``@flashinfer_api`` are called, only modules of this package are imported, tensors load without pickled code, and C++
source of a variant (``jit_args`` of a constructor) is compiled only with ``allow_code=True``. Tables of addresses are
filled anew from the matrices that the dump holds, or refused. What remains possible
without it: the call builds modules of this package, allocates what the recorded sizes ask for, and runs kernels that
trust index values (page tables, offsets), which can end the process or touch memory next to the tensors.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable, Mapping, MutableMapping, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from . import files, flat
from .apis import find_api, first_logged_init, refill_tables, refuse_code, unspecified_places, wraps
from .codec import class_path, decode, load_class, with_layout
from .compare import Unrecorded, compare

__all__ = ["replay_from_dump", "replay_main", "replay_sequence"]

_log = logging.getLogger("flashinfer.api")

# (process id, object id) in the recording process -> the rebuilt object
ObjectRegistry = MutableMapping[tuple[int, int], Any]


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

    Raises
    ------
    FileNotFoundError
        If there is no such directory, or no ``metadata.jsonl`` in it.
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
        Results of :func:`replay_from_dump`, each with its ``dump_dir``; ``error`` and ``dump_dir`` of a dump that
        cannot be read.

    Raises
    ------
    FileNotFoundError
        If there is no such directory.
    """
    if not Path(root_dir).is_dir():
        raise FileNotFoundError(f"replay: {root_dir} must be a directory with the dumps of a session, got no directory")
    target = _target(device)
    registry: ObjectRegistry = {}
    results = []
    for directory in sorted(path.parent for path in Path(root_dir).glob(f"*/{files.METADATA}")):
        try:
            result = _Replay(directory, target, registry, allow_code).result(compare_outputs=True, run=True)
        except Exception as error:  # one broken dump must not hide the others
            result = {"error": f"{type(error).__name__}: {error}"}
        results.append({**result, "dump_dir": str(directory)})
    return results


def replay_main(
    directory: Union[str, Path], device: Union[str, torch.device] = "cuda", allow_code: bool = False
) -> int:
    """Run the ``replay`` command: one line per dump; returns 0 if all agree, 1 if one does not, 2 if there is none."""
    root = Path(directory)
    if (root / files.METADATA).exists():
        print(f"Replaying single dump from {root}")
        result = replay_from_dump(root, compare_outputs=True, device=device, run=True, allow_code=allow_code)
        results = [{**result, "dump_dir": str(root)}]
    else:
        print(f"Replaying session from {root}")
        results = replay_sequence(root, device, allow_code)
    if not results:
        print(f"replay: {root} must have directories with a {files.METADATA}, got no dumps")
        return 2
    failures = 0
    for result in results:
        outcome, reasons = _outcome(result)
        failures += bool(reasons)
        print(f"{outcome:<8}  {Path(result['dump_dir']).name}")
        for line in reasons:
            print(f"{'':<8}  {line}")
    print(f"Summary: {len(results) - failures} passed, {failures} failed/mismatch")
    return 1 if failures else 0


def _outcome(result: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return a word for the table and the reasons of a failure."""
    error, match = result.get("error") or result.get("execution_error"), result.get("comparison_match")
    if match:
        return ("Passed", []) if error is None else ("Passed (raised the same error)", [])
    if error is not None:
        return "Error", [error]
    return ("Passed (no outputs to compare)", []) if match is None else ("Mismatch", result["comparison_details"])


def _target(device: Union[str, torch.device]) -> Optional[torch.device]:
    """Parse the device of replayed tensors; ``None`` stands for the recorded devices."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ArgumentError(f"replay: device must be cpu or cuda, got {str(device)!r}") from None
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
        self.directory = directory
        self.registry = registry
        self._allow_code = allow_code
        self._target = target
        self._missing: list[Unrecorded] = []
        self._unspecified: tuple[int, ...] = ()
        if self.metadata.get("execution_status") == "graph_capture_pending_flush":
            raise RuntimeError(f"replay: {directory} must have a snapshot, got a CUDA graph that was never flushed")
        details = self.metadata.get("tensor_details") or {}
        loaded = self._load("inputs", "input_tensor_keys")
        self._all_on_host = all(_device_of(details.get(key)).type == "cpu" for key in loaded)
        self.tensors = {key: self._restore(tensor, details.get(key)) for key, tensor in loaded.items()}
        encoded = self.metadata.get("encoded")
        if encoded is None:
            self.args, self.kwargs = flat.arguments_of(self.metadata, self.tensors, self._not_held)
        else:
            self.args = [self._decode(value) for value in encoded["args"]]
            self.kwargs = {name: self._decode(value) for name, value in encoded["kwargs"].items()}

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
                f"replay: {self._missing[0]} must be a value or an object of an earlier dump, got one unknown here"
            )
        func, args = find_api(self.metadata), list(self.args)
        if "self_id" in self.metadata:
            if self._is_nested_init(func):
                return None  # the __init__ of the subclass has made this call
            args.insert(0, self._owner(func))
        if not self._allow_code:
            refuse_code(func, args, self.kwargs)
        refill_tables(func, args, self.kwargs, self._banks())
        self._unspecified = unspecified_places(func)
        value = func(*args, **self.kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an asynchronous fault belongs to this call
        return value

    def _banks(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return the matrices of each table of addresses, by ``id`` of the table and by row."""
        recorded = (self.metadata.get("encoded") or {}).get("banks") or {}
        return {
            id(self.tensors[table]): {int(row): self.tensors[key] for row, key in rows.items()}
            for table, rows in recorded.items()
        }

    def _is_nested_init(self, func: Callable[..., Any]) -> bool:
        """Return True if this call was made by the ``__init__`` of a subclass that has its own dump."""
        if func.__name__ != "__init__":
            return False
        cls = load_class(self._owner_path(func))
        return type(self.registry.get(self._owner_key())) is cls and func is not first_logged_init(cls)

    def _owner_key(self) -> tuple[int, int]:
        return self.metadata.get("process_id", 0), self.metadata["self_id"]

    def _owner_path(self, func: Callable[..., Any]) -> str:
        """Return the class of the object; records written by other tools name the class in ``Wrapper.run`` only."""
        return self.metadata.get("self_class") or f"{func.__module__}:{func.__qualname__.rpartition('.')[0]}"

    def _owner(self, func: Callable[..., Any]) -> Any:
        key, path = self._owner_key(), self._owner_path(func)
        if func.__name__ == "__init__":
            cls = load_class(path)
            if not any(wraps(vars(base).get("__init__"), func) for base in cls.__mro__):
                raise RuntimeError(f"replay: the record must name a class with {func.__qualname__}, got {path}")
            # Ids are reused after an object dies: the first logged __init__ starts a new one, a base's continues.
            if key not in self.registry or func is first_logged_init(cls):
                self.registry[key] = cls.__new__(cls)
        known = self.registry.get(key)
        if known is None or path not in map(class_path, type(known).__mro__):  # the id belonged to another object
            raise RuntimeError(
                f"replay: the {path} of this call must have a dump of its __init__ before, got one unknown here"
            )
        return known

    def _load(self, stem: str, keys: str) -> dict[str, torch.Tensor]:
        info = self.metadata.get("tensor_info") or {}
        if info.get(keys) == [] and not files.has_tensors(self.directory, stem):
            return {}
        return files.load_tensors(self.directory, stem)

    def _restore(self, tensor: torch.Tensor, details: Optional[Mapping[str, Any]]) -> torch.Tensor:
        """Copy the tensor to its device, with the recorded strides if there are any."""
        known = details or {}
        stride = known["stride"] if "stride" in known else tensor.contiguous().stride()
        return with_layout(tensor, tensor.shape, stride, self._place(_device_of(details)))

    def _expected(self) -> Optional[dict[str, torch.Tensor]]:
        saved = self.metadata.get("outputs_saved", files.has_tensors(self.directory, "outputs"))
        return files.load_tensors(self.directory, "outputs") if saved else None

    def _differences(self, expected: Optional[dict[str, torch.Tensor]], value: Any) -> Optional[list[str]]:
        """Compare with the recorded results; ``None`` if there is nothing to compare with."""
        if expected is None:
            return None
        recorded = self.metadata.get("encoded")
        if recorded is None:
            wanted = flat.result_of(self.metadata, expected, self._not_held)
            return compare(self._specified(wanted), self._specified(value), "result")
        if self.metadata["graph_capture"] and (recorded["result_aliases"] or not expected):
            return None  # the snapshot was taken after the call, so its inputs may hold results
        lines = compare(self._specified(self._decode(recorded["result"], expected)), self._specified(value), "result")
        for key in recorded["mutated"]:
            lines += compare(expected[key], self.tensors[key], key)
        return lines

    def _specified(self, result: Any) -> Any:
        """Return a result with None in place of parts whose values have no meaning."""
        if not (self._unspecified and isinstance(result, (list, tuple))):
            return result
        return [None if i in self._unspecified else part for i, part in enumerate(result)]

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
        return self._not_held(encoded["argument"], encoded.get("class") or f"{encoded['type']} on {encoded['device']}")

    def _not_held(self, argument: str, what: str) -> Unrecorded:
        self._missing.append(Unrecorded(f"{argument} ({what})"))
        return self._missing[-1]


def _device_of(details: Optional[Mapping[str, Any]]) -> torch.device:
    return torch.device((details or {}).get("device") or "cpu")
