# SPDX-License-Identifier: Apache-2.0
"""Dumps of calls made while a CUDA graph is captured.

Reading tensors is illegal during a capture, and the kernels have not run yet. So a captured call is held as references
to its tensors, and each replay of the graph (seen through hooks on ``torch.cuda.CUDAGraph``) writes a snapshot of them
to ``<call directory>/graph_flushes/flush_XXXX``; the newest one is in the call directory too. The references also keep
the graph's memory pool from handing the same memory to a later op. A snapshot is taken after the replay: an argument
changed in place shows its new value.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import threading
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any, Callable, Optional

import torch

from . import files
from .call_dump import CallDump, Recorder
from .codec import host_copies, tensor_bytes

__all__ = [
    "clear_graph_dumps",
    "flush_graph_dumps",
    "hold",
    "install_graph_hooks",
    "is_capturing",
    "restore_graph_hooks",
]

_log = logging.getLogger("flashinfer.api")


def is_capturing() -> bool:
    """Return True if the current stream is being captured; never initialises CUDA."""
    try:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a broken context captures nothing; let the call itself report it
        return False


@dataclass
class _HeldCall:
    dumper: Recorder
    dump: CallDump
    outputs: dict[str, torch.Tensor]
    graph: Callable[[], Any]  # weak reference; returns None for a capture no hook saw
    flushes: int = 0
    replays_seen: int = 0  # 0 at a flush: nothing may have run yet, and the snapshot may hold no useful values


_GROUPS = 2  # inputs and outputs of a call
_held: list[_HeldCall] = []
_lock = threading.RLock()  # re-entrant: the SIGTERM handler may interrupt a flush of the same thread
_captures = threading.local()  # .stack: graphs this thread is capturing


def hold(dumper: Recorder, dump: CallDump, outputs: dict[str, torch.Tensor]) -> None:
    """Keep the tensors of a captured call until its graph is deleted or :func:`clear_graph_dumps`."""
    stack = getattr(_captures, "stack", [])
    reference = weakref.ref(stack[-1], _forget) if stack else lambda: None
    with _lock:
        _held.append(_HeldCall(dumper, dump, outputs, reference))
    _install_exit_hooks()


def _forget(reference: Any) -> None:
    with _lock:
        _held[:] = [call for call in _held if call.graph is not reference]


def flush_graph_dumps(synchronize: bool = True) -> int:
    """Write a snapshot of every captured call held.

    Parameters
    ----------
    synchronize : bool
        Wait for the device first. Pass ``False`` only after a synchronisation of your own.

    Returns
    -------
    int
        Files of tensors written, inputs and outputs of each call; 0 while a capture is under way.
    """
    return _flush(lambda call: True, synchronize)


def clear_graph_dumps() -> int:
    """Drop all held tensors (their memory returns to the graphs' pools); returns 2 for each call, as a flush does."""
    with _lock:
        count = _GROUPS * len(_held)
        _held.clear()
    return count


def _flush(selects: Callable[[_HeldCall], bool], synchronize: bool = True) -> int:
    if is_capturing():
        _log.warning("graph dumps not flushed: a CUDA graph is being captured")
        return 0
    with _lock:
        calls = [call for call in _held if selects(call)]
        if calls and synchronize and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return _GROUPS * sum(_snapshot(call) for call in calls)


def _flush_replayed(graph: Any) -> None:
    with _lock:
        for call in _held:
            call.replays_seen += call.graph() is graph
    _flush(lambda call: call.graph() is graph)


@torch.no_grad()
def _snapshot(call: _HeldCall) -> bool:
    dump = call.dump
    size = sum(tensor_bytes(t) for group in (dump.inputs, call.outputs) for t in group.values())
    if not call.dumper.reserve(size, dump.record["function_name"]):
        return False
    call.flushes += 1
    directory = dump.directory / "graph_flushes" / f"flush_{call.flushes:04d}"
    directory.mkdir(parents=True)
    for stem, tensors in (("inputs", dump.inputs), ("outputs", call.outputs)):
        files.save_tensors(directory, stem, host_copies(tensors), dump.record["tensor_format"])
        files.publish(directory, dump.directory, stem)
    dump.record |= {
        "execution_status": "completed",
        "outputs_saved": True,
        "replays_seen": call.replays_seen,
        "graph_capture_flushed": True,
        "graph_capture_flush_index": call.flushes,
        "graph_capture_snapshot_dir": str(directory),
    }
    base = {"graph_capture_base_dump_dir": str(dump.directory), "dump_dir": str(directory)}
    files.append_record(directory / files.METADATA, {**dump.record, **base})
    call.dumper.write_record(dump)
    return True


def install_graph_hooks(graph_class: Any = torch.cuda.CUDAGraph) -> None:
    """Wrap ``capture_begin``, ``capture_end`` and ``replay`` of the class; hooks of an earlier import are replaced."""
    restore_graph_hooks(graph_class)
    begin, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        _captures.stack = [*getattr(_captures, "stack", []), self]
        return result

    @functools.wraps(end)
    def capture_end(self: Any) -> Any:
        _captures.stack = [graph for graph in getattr(_captures, "stack", []) if graph is not self]
        return end(self)

    @functools.wraps(replay)
    def replay_and_flush(self: Any) -> Any:
        result = replay(self)
        try:
            # A replay inside another capture only adds a child graph: nothing has run yet.
            if not is_capturing():
                _flush_replayed(self)
        except Exception as error:
            _log.warning("graph dumps not flushed after a replay: %s: %s", type(error).__name__, error)
        return result

    hooks = {"capture_begin": capture_begin, "capture_end": capture_end, "replay": replay_and_flush}
    for name, hook in hooks.items():
        setattr(graph_class, name, hook)
    graph_class._flashinfer_hooks = hooks


def restore_graph_hooks(graph_class: Any = torch.cuda.CUDAGraph) -> None:
    """Restore the original methods of the class. A method that other code has wrapped since stays wrapped."""
    for name, hook in vars(graph_class).get("_flashinfer_hooks", {}).items():
        if getattr(graph_class, name) is hook:
            setattr(graph_class, name, hook.__wrapped__)
    graph_class._flashinfer_hooks = {}


@functools.cache
def _install_exit_hooks() -> None:
    atexit.register(_flush_at_exit)
    try:
        previous = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, functools.partial(_on_sigterm, previous))
    except ValueError:  # not the main thread: only a normal exit flushes
        _log.warning("graph dumps: no SIGTERM flush, because the first capture ran outside the main thread")


def _flush_at_exit() -> None:
    """Write snapshots that no replay hook has written; errors here do not keep the process from ending."""
    try:
        _flush(lambda call: call.flushes == 0)
    except Exception as error:
        _log.warning("graph dumps not flushed at exit: %s: %s", type(error).__name__, error)


def _on_sigterm(previous: Any, number: int, frame: Optional[FrameType]) -> None:
    _flush_at_exit()
    if callable(previous):
        previous(number, frame)
    elif previous != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
