# SPDX-License-Identifier: Apache-2.0
"""Timeline of an instrumented kernel, from the 64-bit entries it wrote to a file that https://ui.perfetto.dev opens.

Buffer: ``uint64``, little endian.

    entry 0        bits 0-31 number of blocks, bits 32-63 number of groups (threads that report together) per block
    other entries  bits 0-31 tag, bits 32-63 the low half of the global timer in ns; all zero where nothing was written
    tag            bits 0-1 event type, 2-11 event index, 12-23 block * groups + group, 24-31 SM
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any, NamedTuple, Sequence, Union

import torch

from .._runtime.errors import ArgumentError

__all__ = ["EventType", "Tag", "decode_tag", "export_to_perfetto_trace"]

_TIMER_RANGE = 1 << 32


class EventType(enum.Enum):
    """Kind of an entry: begin of an event, end of an event, or an instant."""

    kBegin = 0
    kEnd = 1
    kInstant = 2


class Tag(NamedTuple):
    """Fields of an entry's tag."""

    block_idx: int
    group_idx: int
    event_idx: int
    event_type: int
    sm_id: int


def decode_tag(tag: int, num_blocks: int, num_groups: int) -> Tag:
    """Take a 32-bit tag apart; ``event_type`` is the value of an :class:`EventType`.

    Examples
    --------
    >>> from flashinfer.profiler import decode_tag
    >>> decode_tag((3 << 12) | (5 << 2) | 1, num_blocks=4, num_groups=2)[:4]  # block, group, event, type
    (1, 1, 5, 1)
    """
    block_group = (tag >> 12) & 0xFFF
    fields = Tag(block_group // num_groups, block_group % num_groups, (tag >> 2) & 0x3FF, tag & 0x3, (tag >> 24) & 0xFF)
    if fields.block_idx >= num_blocks:
        raise ArgumentError(f"decode_tag: the block of tag {tag:#x} must be below {num_blocks}, got {fields.block_idx}")
    return fields


def _since_first(timers: list[int]) -> list[int]:
    """Return nanoseconds after the earliest entry. The 32-bit timer wraps at 4.3 s; a launch takes less than half."""
    if not timers:
        return []
    anchor = timers[0]
    half = _TIMER_RANGE // 2
    offsets = [(t - anchor + half) % _TIMER_RANGE - half for t in timers]
    first = min(offsets)
    return [offset - first for offset in offsets]


_PHASE = {EventType.kBegin.value: "B", EventType.kEnd.value: "E", EventType.kInstant.value: "i"}


def _event(tag: Tag, time_ns: int, num_groups: int, event_names: Sequence[str]) -> dict[str, Any]:
    if tag.event_type not in _PHASE or tag.event_idx >= len(event_names):
        raise ArgumentError(
            f"export_to_perfetto_trace: an entry must have an event below {len(event_names)} (event_names) and a type "
            f"in {sorted(_PHASE)}, got event {tag.event_idx} of type {tag.event_type}"
        )
    event = {
        "name": event_names[tag.event_idx],
        "ph": _PHASE[tag.event_type],
        "ts": time_ns / 1e3,  # the format counts in microseconds
        "pid": tag.sm_id,
        "tid": tag.block_idx * num_groups + tag.group_idx,
    }
    if event["ph"] == "i":
        event["s"] = "t"  # drawn on its own thread's row
    return event


def export_to_perfetto_trace(
    profiler_buffer: torch.Tensor, event_names: Sequence[str], file_name: Union[str, Path]
) -> None:
    """Write the entries of ``profiler_buffer`` as a trace in JSON: one process per SM, one row per block and group.

    Parameters
    ----------
    profiler_buffer : torch.Tensor
        1-D ``uint64`` (or ``int64``) on any device, in the layout this module describes.
    event_names : sequence of str
        Name of each event index.
    file_name : str or Path
        Where to write. Entries keep their order within a row; times start at the earliest entry.

    Examples
    --------
    >>> import json, tempfile
    >>> header = 1 | 1 << 32  # one block, one group; entries follow: tag in the low half, time in the high half
    >>> begin, end = 0 | 100 << 32, 1 | 350 << 32  # event 0 of SM 0 begins at 100 ns and ends at 350 ns
    >>> buffer = torch.tensor([header, begin, end])
    >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
    ...     flashinfer.profiler.export_to_perfetto_trace(buffer, ["load"], file.name)
    ...     events = json.load(open(file.name))["traceEvents"]
    >>> [(event["name"], event["ph"]) for event in events if event["ph"] != "M"]
    [('load', 'B'), ('load', 'E')]
    """
    if profiler_buffer.ndim != 1 or profiler_buffer.dtype not in (torch.uint64, torch.int64):
        raise ArgumentError(
            f"export_to_perfetto_trace: profiler_buffer must be 1-D uint64, got {profiler_buffer.ndim}-D "
            f"{profiler_buffer.dtype}"
        )
    words = [word % (1 << 64) for word in profiler_buffer.view(torch.int64).tolist()]
    if not words or not (words[0] >> 32 and words[0] % _TIMER_RANGE):
        raise ArgumentError(
            "export_to_perfetto_trace: profiler_buffer must have a header of block and group counts, got none"
        )
    num_blocks, num_groups = words[0] % _TIMER_RANGE, words[0] >> 32
    entries = [word for word in words[1:] if word]
    tags = [decode_tag(word % _TIMER_RANGE, num_blocks, num_groups) for word in entries]
    times = _since_first([word >> 32 for word in entries])

    rows = sorted({(tag.sm_id, tag.block_idx, tag.group_idx) for tag in tags})
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": sm, "args": {"name": f"SM {sm}"}}
        for sm in sorted({r[0] for r in rows})
    ]
    events += [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": sm,
            "tid": block * num_groups + group,
            "args": {"name": f"block {block} group {group}"},
        }
        for sm, block, group in rows
    ]
    events += [_event(tag, ns, num_groups, event_names) for tag, ns in zip(tags, times, strict=True)]
    with open(file_name, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)
