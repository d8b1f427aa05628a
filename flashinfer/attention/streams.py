# SPDX-License-Identifier: Apache-2.0
"""Order of the calls on one wrapper that come from several CUDA streams, and memory that CUDA graphs read.

A plan lies in device memory that its wrapper owns. ``plan`` writes to this memory on the caller's stream, ``run`` reads
it on the caller's stream, and kernels keep counters in it. One stream executes all of this in order. When a call comes
from another stream than the last call, that stream first waits for an event on the last one (:func:`enter`). The device
waits, the host does not. Calls from one stream compare two numbers and record no event. The stream of the last call is
kept in the wrapper's lock (``_lock``, locks.py), which every call reads anyway.

Two cases are left to the caller, because a wrapper does not see them: wrappers that share a float workspace must run on
one stream, and a CUDA graph must be replayed on the stream that ``plan`` is called on.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Protocol

import torch

__all__ = [
    "LastStream",
    "cuda",
    "enter",
    "follow_streams",
    "hold_for_graph",
    "keep_until_read",
    "made_for_all_streams",
    "on_current_stream",
    "raw_stream",
]

cuda: Any = torch.cuda


def _stream_handle(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


#: Handle of the current stream of a CUDA device. The public function takes 20 times as long.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)

_held: dict[int, torch.Tensor] = {}  # tensors that CUDA graphs read; they live until the process ends


class LastStream(Protocol):
    """Attributes of a wrapper's lock that say where the last call on the wrapper ran."""

    cuda_index: Any  #: index of the CUDA device; None on the CPU, where calls need no order
    stream: Any  #: handle of the stream of the last call
    stream_object: Any  #: torch.cuda.Stream of the last call


def follow_streams(last: LastStream, device: torch.device) -> None:
    """Store the current stream: the allocator may return memory that earlier work of this stream still reads."""
    if device.type == "cuda":
        last.stream_object = cuda.current_stream(device)
        last.cuda_index = last.stream_object.device_index
        last.stream = raw_stream(last.cuda_index)


def _has_streams(value: Any) -> bool:
    """Return True for wrappers: objects that own device memory and a lock."""
    return hasattr(getattr(value, "__dict__", {}).get("_lock"), "stream_object")


def keep_until_read(tensor: torch.Tensor, stream: Any) -> None:
    """Tell the allocator that ``stream`` reads a tensor, whose memory it must not reuse before that has happened."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


def _parts(value: Any) -> Iterator[Any]:
    """Return the tensors and the wrappers that ``value`` consists of."""
    if isinstance(value, torch.Tensor) or _has_streams(value):
        yield value
    elif type(value) in (list, tuple):
        for part in value:
            yield from _parts(part)
    elif type(value) is dict:
        yield from _parts(list(value.values()))


def enter(owner: Any) -> None:
    """Make the current stream wait for the last call on ``owner``, and keep the owner's memory until it was read.

    The wait includes all work of the other stream so far. A stream that is captured cannot wait for work outside its
    graph: capture begins after a synchronisation, and :func:`hold_for_graph` keeps the memory.
    """
    last: LastStream = owner._lock
    with cuda.device(last.cuda_index):
        stream = cuda.current_stream()
        if cuda.is_current_stream_capturing():
            return
        with cuda.stream(last.stream_object):
            is_captured = cuda.is_current_stream_capturing()
        # Another thread may capture the last stream: an event recorded there would pull this stream into the capture.
        if not is_captured:
            stream.wait_event(last.stream_object.record_event())
        last.stream, last.stream_object = raw_stream(last.cuda_index), stream
        for part in _parts(list(vars(owner).values())):
            if isinstance(part, torch.Tensor):
                keep_until_read(part, stream)
            elif part._lock.cuda_index is not None and part._lock.stream != last.stream:
                enter(part)


def on_current_stream(owner: Any) -> None:
    """Call :func:`enter` if the current stream is another one than that of the last call."""
    last: LastStream = owner._lock
    if last.cuda_index is not None and raw_stream(last.cuda_index) != last.stream:
        enter(owner)


def made_for_all_streams(make: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, bool]:
    """Return ``make()``, and True if any stream may read the result from now on.

    The tensor is made on a stream of its own, for which the host waits: the current stream may be busy for long. During
    a capture nothing may be waited for; the tensor then belongs to the graph, and the second result is False.
    """
    if device.type != "cuda":
        return make(), True
    with cuda.device(device):
        if cuda.is_current_stream_capturing():
            return make(), False
        stream = cuda.Stream()
        with cuda.stream(stream):
            made = make()
        stream.synchronize()
    return made, True


def hold_for_graph(owner: Any) -> None:
    """Keep the device memory of ``owner``, except the caller's float workspace, for the graph that is being captured.

    The end of a graph cannot be observed from here, so the memory is never freed: 8 MiB for each captured wrapper.
    """
    scratch = vars(owner).get("_float_workspace_buffer")
    for part in _parts(list(vars(owner).values())):
        if not isinstance(part, torch.Tensor):
            hold_for_graph(part)
        elif part.is_cuda and part is not scratch:
            _held[id(part)] = part
