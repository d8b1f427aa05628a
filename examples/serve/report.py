# SPDX-License-Identifier: Apache-2.0
"""Report of ``examples/serve``: a table of speeds, and a timeline of the requests in the batch."""

from __future__ import annotations

import statistics
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch

COLOURS = {"waiting": (205, 205, 205), "prefill": (230, 126, 34), "decode": (52, 120, 200)}


@dataclass(frozen=True)
class Step:
    """One forward pass: start and end time, and the number of tokens of each request."""

    kind: str  #: "prefill" or "decode"
    start: float
    end: float
    chunks: tuple[tuple[Any, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.chunks)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads, {torch.backends.cpu.get_cpu_capability()}"


def speed(steps: Sequence[Step], kind: str) -> str:
    """Return the tokens per second of all steps of a kind. Time between steps does not count."""
    chosen = [step for step in steps if step.kind == kind]
    tokens, seconds = sum(step.num_tokens for step in chosen), sum(step.end - step.start for step in chosen)
    if not chosen:
        return "no such step"
    return f"{tokens / seconds:,.0f} tokens/s ({tokens} in {seconds:.2f} s, {len(chosen)} steps)"


def table(steps: Sequence[Step], requests: Sequence[Any], facts: Mapping[str, str]) -> str:
    """Return the report: ``facts`` first, then figures of the steps and requests."""
    first = [1e3 * (request.first_token_at - request.arrival) for request in requests]
    decode_rows = [len(step.chunks) for step in steps if step.kind == "decode"]
    rows = {
        **facts,
        "requests": f"{len(requests)} in {max(request.finished_at for request in requests):.2f} s",
        "prefill": speed(steps, "prefill"),
        "decode": speed(steps, "decode"),
        "requests per decode step": f"{statistics.mean(decode_rows):.1f}" if decode_rows else "no such step",
        "time to first token": f"median {statistics.median(first):.1f} ms, worst {max(first):.1f} ms",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def spans(steps: Sequence[Step], requests: Sequence[Any]) -> Iterator[tuple[int, str, float, float]]:
    """Yield the bars of the timeline: (number of the request, activity, start, end)."""
    number = {id(request): i for i, request in enumerate(requests)}
    seen = set()
    for step in steps:
        for request, _ in step.chunks:
            if id(request) not in seen:
                seen.add(id(request))
                yield number[id(request)], "waiting", request.arrival, step.start
            yield number[id(request)], step.kind, step.start, step.end


def batch_sizes(steps: Sequence[Step], requests: Sequence[Any]) -> tuple[list[int], list[float]]:
    """Return batch sizes, and the times between which each size lasted. The size is 0 while there is no work."""
    sizes, times = [], []
    for step in steps:
        sizes.append(len(step.chunks))
        times.append(step.start)
        if all(request.finished_at <= step.end or request.arrival > step.end for request in requests):
            sizes.append(0)
            times.append(step.end)
    return sizes[:-1], times  # the loop appends a 0 after the last step, which has no end time


def token_rates(steps: Sequence[Step], num_bins: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return generated tokens per second in bins of equal length, and the times between them.

    Each request of a step gains a token at the end of the step; a chunk of a longer prompt is counted too.
    """
    ends = [step.end for step in steps]
    counts, edges = np.histogram(ends, num_bins, (0.0, max(ends)), weights=[len(step.chunks) for step in steps])
    return counts / (edges[1] - edges[0]), edges


def write_timeline(path: Path, steps: Sequence[Step], requests: Sequence[Any]) -> None:
    """Write a PNG: time on the x axis, one bar per request, coloured by activity."""
    try:
        import matplotlib
    except ImportError:
        write_png(path, paint(list(spans(steps, requests)), len(requests)))
    else:
        matplotlib.use("Agg")
        plot(path, steps, requests)


def plot(path: Path, steps: Sequence[Step], requests: Sequence[Any]) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, (bars, load, rate) = pyplot.subplots(
        3, 1, sharex=True, figsize=(11, 3.2 + 0.18 * len(requests)), height_ratios=[3, 1, 1], layout="constrained"
    )
    colours = {kind: "#{:02x}{:02x}{:02x}".format(*rgb) for kind, rgb in COLOURS.items()}
    for number, kind, start, end in spans(steps, requests):
        bars.broken_barh([(start, end - start)], (number - 0.4, 0.8), color=colours[kind], linewidth=0)
    bars.set(ylabel="request", title="what each request was doing")
    bars.invert_yaxis()
    bars.legend(handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()], loc="lower left")
    load.stairs(*batch_sizes(steps, requests), fill=True, color="0.6")
    load.set(ylabel="batch size")
    rate.stairs(*token_rates(steps), fill=True, color=colours["decode"])
    rate.set(xlabel="seconds", ylabel="tokens/s")
    figure.savefig(path, dpi=110, format="png")  # always PNG, whatever the suffix of the file
    pyplot.close(figure)


def paint(
    bars: Sequence[tuple[int, str, float, float]], num_rows: int, width: int = 1100, height: int = 14
) -> np.ndarray:
    """Draw the bars as pixels ``(height, width, 3)``, uint8, for machines without matplotlib."""
    image = np.full((num_rows * height, width, 3), 255, np.uint8)
    end_of_time = max((end for *_, end in bars), default=1.0)
    for number, kind, start, end in bars:
        left = int(start / end_of_time * (width - 1))
        right = int(end / end_of_time * (width - 1)) + 1  # a bar is at least a pixel wide
        image[number * height + 2 : (number + 1) * height - 2, left:right] = COLOURS[kind]
    return image


def write_png(path: Path, image: np.ndarray) -> None:
    """Write an RGB image ``(height, width, 3)`` of uint8 as PNG: signature, header, a block of compressed rows, end."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter, 0 for none
    rows[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB, nothing interlaced
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + chunk(b"IEND", b"")
    )
