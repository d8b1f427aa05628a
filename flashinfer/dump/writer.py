# SPDX-License-Identifier: Apache-2.0
"""Writer of one directory per API call (log level 10): inputs before the call, outputs after it.

    <dir>/<YYYYmmdd_HHMMSS_mmm>_pid<PID>_<api>_call<NNNN>/{inputs.pt, outputs.pt, metadata.jsonl}
    <dir>/session.jsonl                                    every record of every call

A record is one JSON line, written before and after the call. ``input_metadata``, ``output_metadata``, ``tensor_info``
and ``tensor_details`` have the form of :mod:`.flat`; ``encoded`` has what our own replay needs in addition.

Names sort in call order within a process, which is what a sequence replay relies on.
"""

from __future__ import annotations

import fnmatch
import inspect
import logging
import os
import platform
import re
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import torch

from .._runtime.arch import get_default_generators
from .._runtime.knobs import knobs
from . import files, graph
from .apis import public_module
from .call_dump import CallDump
from .codec import Encoder, class_path, describe_layout, host_copies, host_copy, item_key, tensor_bytes
from .flat import describe_value

__all__ = ["ApiCall", "CallDump", "DumpSettings", "Dumper"]

_log = logging.getLogger("flashinfer.api")


@dataclass(frozen=True)
class DumpSettings:
    """Values of the ``FLASHINFER_DUMP_*`` variables."""

    directory: Path = Path("flashinfer_dumps")
    include: str = ""
    exclude: str = ""
    max_count: int = 1000
    max_size_gb: float = 20.0
    safetensors: bool = False

    @classmethod
    def from_knobs(cls) -> DumpSettings:
        return cls(
            directory=knobs.dump_dir,
            include=knobs.dump_include,
            exclude=knobs.dump_exclude,
            max_count=knobs.dump_max_count,
            max_size_gb=knobs.dump_max_size_gb,
            safetensors=knobs.dump_safetensors,
        )

    def selects(self, name: str) -> bool:
        """Return True if the include list (when there is one) names this API and the exclude list does not."""
        return (not self.include.strip() or _matches(name, self.include)) and not _matches(name, self.exclude)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in patterns.split(",") if pattern.strip())


@dataclass
class ApiCall:
    """One call in flight. ``args`` excludes ``owner``, the object whose method is called."""

    name: str
    func: Callable[..., Any]
    sequence: int
    owner: Optional[object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_capturing: bool

    @property
    def passed(self) -> tuple[Any, ...]:
        """Return the positional arguments as the function gets them."""
        return self.args if self.owner is None else (self.owner, *self.args)


class Dumper:
    """Applies the caps and writes the files. One per decorator; safe to use from several threads."""

    def __init__(self, settings: DumpSettings) -> None:
        self.settings = settings
        self._root = settings.directory.absolute()  # the program may change its directory later
        self._lock = threading.Lock()
        self._count = self._bytes = self._last_ms = 0
        self._format: Optional[str] = None

    def begin(self, call: ApiCall) -> Optional[CallDump]:
        """Save the inputs; ``None`` when a cap drops this dump. During a capture only references are kept."""
        encoder = Encoder(has_states=not call.is_capturing)
        first = 0 if call.owner is None else 1
        args = [encoder.encode(value, f"arg_{i}") for i, value in enumerate(call.args, first)]
        kwargs = {name: encoder.encode(value, f"kwarg_{name}") for name, value in call.kwargs.items()}
        if (generator := _default_generator(call, encoder.tensors)) is not None:
            kwargs["generator"] = {**encoder.encode(generator, "kwarg_generator"), "is_default": True}
        inputs = encoder.tensors
        size = 0 if call.is_capturing else _unique_bytes(inputs)
        if not self._admit(call.name) or not self.reserve(size, call.name):
            return None

        directory, timestamp = self._new_directory(call)
        values = {f"arg_{i}": value for i, value in enumerate(call.passed)}
        values |= {f"kwarg_{name}": value for name, value in call.kwargs.items()}
        record = {
            "function_name": call.name,
            "module": public_module(call.func),
            "qualname": call.func.__qualname__,
            "defining_module": call.func.__module__,
            "call_sequence": call.sequence,
            "timestamp": timestamp,
            "process_id": os.getpid(),
            "input_metadata": _flat(values, encoder, call.is_capturing),
            "output_metadata": {},
            "tensor_info": _tensor_info(inputs, {}),
            "tensor_details": {key: describe_layout(tensor) for key, tensor in inputs.items()},
            "tensor_format": self.tensor_format,
            "function_signature": _signature_text(call.func),
            "versions": _versions(),
            "execution_status": "graph_capture_pending_flush" if call.is_capturing else "inputs_saved",
            "graph_capture": call.is_capturing,
            "dump_dir": str(directory),
            "encoded": {"args": args, "kwargs": kwargs, "banks": encoder.banks},
        }
        if call.owner is not None:
            record |= {"self_id": id(call.owner), "self_class": class_path(type(call.owner))}
        dump = CallDump(directory, record, inputs, encoder.aliases)
        if not call.is_capturing:
            dump.before = host_copies(inputs)
            files.save_tensors(directory, "inputs", dump.before | encoder.states, self.tensor_format)
        self.write_record(dump)
        return dump

    def end(self, dump: CallDump, result: Any) -> None:
        """Save the results and every argument the call changed (destination-passing and in-place functions)."""
        encoder = Encoder(has_states=not dump.record["graph_capture"])
        encoded = encoder.encode(result, "result")
        outputs = dict(encoder.tensors)
        owners = {id(tensor): key for key, tensor in dump.inputs.items() if key not in dump.aliases}
        aliases = {key: owners[id(tensor)] for key, tensor in outputs.items() if id(tensor) in owners}
        mutated: list[str] = []
        dump.record["encoded"] |= {"result": encoded, "mutated": mutated, "result_aliases": aliases}
        dump.record["output_metadata"] = _flat(_results(result), encoder, dump.record["graph_capture"])
        if dump.record["graph_capture"]:
            self._describe_outputs(dump, outputs)
            self.write_record(dump)
            graph.hold(self, dump, outputs)
            return
        saved = host_copies(outputs)
        for key, tensor in dump.inputs.items():
            if key not in aliases.values() and key not in dump.aliases:
                after = host_copy(tensor)
                if not _same_bytes(dump.before[key], after):
                    outputs[key], saved[key] = tensor, after
                    mutated.append(key)
        self._describe_outputs(dump, outputs)
        dump.record["execution_status"] = "completed"
        fits = self.reserve(_unique_bytes(outputs), dump.record["function_name"])
        dump.record["outputs_saved"] = fits
        if fits:
            files.save_tensors(dump.directory, "outputs", saved | encoder.states, self.tensor_format)
        self.write_record(dump)

    def fail(self, dump: CallDump, error: BaseException) -> None:
        """Record that the call raised: the state stays ``inputs_saved``, with the reason."""
        dump.record["error"] = f"{type(error).__name__}: {error}"
        self.write_record(dump)

    def write_record(self, dump: CallDump) -> None:
        files.append_record(dump.directory / files.METADATA, dump.record)
        files.append_record(self._root / files.SESSION, dump.record)

    @property
    def tensor_format(self) -> str:
        if self._format is None:
            self._format = files.tensor_format(self.settings.safetensors)
        return self._format

    def reserve(self, size: int, name: str) -> bool:
        """Count ``size`` bytes against the cap; past it, warn and refuse."""
        limit = self.settings.max_size_gb * 1e9
        with self._lock:
            fits = self._bytes + size <= limit
            self._bytes += size if fits else 0
        if not fits:
            cap = f"FLASHINFER_DUMP_MAX_SIZE_GB={self.settings.max_size_gb}"
            _warn(f"dump of {name} dropped: {size} bytes would pass {cap}")
        return fits

    def _admit(self, name: str) -> bool:
        with self._lock:
            fits = self._count < self.settings.max_count
            self._count += fits
        if not fits:
            _warn(f"dump of {name} dropped: FLASHINFER_DUMP_MAX_COUNT={self.settings.max_count} is reached")
        return fits

    def _new_directory(self, call: ApiCall) -> tuple[Path, str]:
        # Two calls in one millisecond would sort by API name: plan() after run(). Each call gets its own millisecond.
        with self._lock:
            self._last_ms = moment = max(time.time_ns() // 1_000_000, self._last_ms + 1)
        clock = time.localtime(moment // 1000)
        stamp = f"{time.strftime('%Y%m%d_%H%M%S', clock)}_{moment % 1000:03d}"
        api = re.sub(r"[^\w.-]", "_", call.name)
        directory = self._root / f"{stamp}_pid{os.getpid()}_{api}_call{call.sequence:04d}"
        directory.mkdir(parents=True)
        return directory, stamp

    @staticmethod
    def _describe_outputs(dump: CallDump, outputs: Mapping[str, torch.Tensor]) -> None:
        dump.record["tensor_info"] = _tensor_info(dump.inputs, outputs)
        dump.record["tensor_details"] |= {key: describe_layout(tensor) for key, tensor in outputs.items()}


def _unique_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors.values()}.values())


def _flat(values: Mapping[str, Any], encoder: Encoder, is_capturing: bool) -> dict[str, Any]:
    """Return the entries of values that are not tensors."""
    return {
        key: describe_value(value, key, encoder.keys, may_read=not is_capturing)
        for key, value in values.items()
        if not isinstance(value, torch.Tensor)
    }


def _results(result: Any) -> dict[str, Any]:
    if isinstance(result, (list, tuple)):
        return {item_key("result", i): value for i, value in enumerate(result)}
    return {"result": result}


def _tensor_info(inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    sizes = {name: sum(map(tensor_bytes, group.values())) for name, group in (("input", inputs), ("output", outputs))}
    sizes["total"] = sizes["input"] + sizes["output"]
    info: dict[str, Any] = {"input_tensor_keys": list(inputs), "output_tensor_keys": list(outputs)}
    for name, size in sizes.items():
        info |= {f"{name}_size_bytes": size, f"{name}_size_mb": size / 2**20}
    return info


def _default_generator(call: ApiCall, tensors: Mapping[str, torch.Tensor]) -> Optional[torch.Generator]:
    """Return torch's default generator if the call draws from it: it has a parameter ``generator`` and got None."""
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    if call.is_capturing or device.type not in ("cpu", "cuda") or call.kwargs.get("generator") is not None:
        return None
    try:
        parameters = list(inspect.signature(call.func).parameters)
    except (TypeError, ValueError):
        return None
    passed = len(call.args) + (call.owner is not None)
    return get_default_generators(device) if "generator" in parameters[passed:] else None


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bitwise, so that NaN equals itself and packed dtypes can be compared."""
    if left.shape != right.shape or left.layout is not torch.strided:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))


def _signature_text(func: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(func))
    except (TypeError, ValueError):
        return "(...)"


def _versions() -> dict[str, Optional[str]]:
    from ..version import __version__

    return {
        "flashinfer": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _warn(text: str) -> None:
    _log.warning(text)
    warnings.warn(text, RuntimeWarning, stacklevel=2)
