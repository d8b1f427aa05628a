# SPDX-License-Identifier: Apache-2.0
"""Cost model of communication between 2 to 72 GPUs: which protocol at which size, and what it takes.

python3 scripts/model_comm.py             tables in Markdown, as in docs/communication.md
python3 scripts/model_comm.py --svg FILE  the picture of that page

Times are alpha + bytes / beta, in microseconds. Nothing here was measured on several GPUs: the constants are published
figures, named beside them, and only ``single_card`` is compared with runs of ours (tests/comm/test_model_comm.py).
Needs nothing but Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Callable, NamedTuple, Optional, Sequence

KIB, MIB = 1 << 10, 1 << 20

COPY = 4.25e6  #: bytes per us of an H200's memory, measured
NVLINK = 370e3  #: bytes per us and direction that NCCL gets from the 450 GB/s of NVLink 4 (nccl-tests, issue 212)
IN_SWITCH = 275e3  #: bytes per us of an all-reduce that the switch adds, 8 GPUs (nccl, issue 1455)
NETWORK = 45e3  #: bytes per us and GPU of 400 Gb/s InfiniBand, of which 90 % arrive
NETWORK_ALPHA = 12.0  #: us of one message between hosts (10 to 15 published)
DOMAIN = 8  #: GPUs that NVLink joins in a host; 72 in a rack of GB200

ONE_SHOT_ALPHA, TWO_SHOT_ALPHA, MULTIMEM_ALPHA = 3.5, 9.0, 7.5


class Choice(NamedTuple):
    """A protocol, and the microseconds it takes."""

    name: str
    us: float


def one_shot(nbytes: float, ranks: int) -> float:
    """Every rank sends its rows to every other one."""
    return ONE_SHOT_ALPHA + (ranks - 1) * nbytes / NVLINK


def two_shot(nbytes: float, ranks: int) -> float:
    """Every rank sums a part and sends it to all."""
    return TWO_SHOT_ALPHA + 2 * (ranks - 1) / ranks * nbytes / NVLINK


def multimem(nbytes: float, ranks: int) -> float:
    """The switch adds. No gain on fewer than 8 GPUs."""
    return MULTIMEM_ALPHA + nbytes / (IN_SWITCH if ranks >= 8 else IN_SWITCH / 2)


def across_hosts(nbytes: float, ranks: int, domain: int = DOMAIN) -> float:
    """NCCL: a sum inside each host, over the network on a part per GPU, and back."""
    hosts = -(-ranks // domain)
    inside = 2 * (domain - 1) / domain * nbytes / NVLINK + TWO_SHOT_ALPHA
    part = nbytes / domain
    return inside + 2 * NETWORK_ALPHA + 2 * (hosts - 1) / hosts * part / NETWORK


def all_reduce(nbytes: float, ranks: int, domain: int = DOMAIN, has_multicast: bool = False) -> Choice:
    """Return the protocol that takes least."""
    if ranks > domain:
        return Choice("NCCL", across_hosts(nbytes, ranks, domain))
    found = [Choice("one-shot", one_shot(nbytes, ranks)), Choice("two-shot", two_shot(nbytes, ranks))]
    if has_multicast:
        found.append(Choice("multimem", multimem(nbytes, ranks)))
    return min(found, key=lambda choice: choice.us)


def crossing(ranks: int) -> float:
    """Return the bytes from which two steps take less than one."""
    slope = (ranks - 1) * (1 - 2 / ranks) / NVLINK
    return (TWO_SHOT_ALPHA - ONE_SHOT_ALPHA) / slope if slope > 0 else float("inf")


def distinct_ranks(ranks: int, top_k: int) -> float:
    """Return how many ranks the experts of a token are on, on average: experts are drawn evenly."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def exchange(tokens: int, token_bytes: float, ranks: int, top_k: int, domain: int = DOMAIN) -> float:
    """Return the microseconds of a dispatch, or of a combine: tokens leave once per rank that they go to."""
    targets = distinct_ranks(ranks, top_k)
    sent = tokens * token_bytes * targets * (ranks - 1) / ranks
    if ranks <= domain:
        return 4.0 + sent / NVLINK
    outside = (ranks - domain) / max(ranks - 1, 1)
    return NETWORK_ALPHA + max(sent * (1 - outside) / NVLINK, sent * outside / NETWORK)


def single_card(nbytes: float, ranks: int) -> float:
    """Return the microseconds of one-shot with all ranks as streams of one GPU, which have no link between them: each
    word of each pair of ranks is written, read and reset in one memory. The launch and the time of each rank are fitted
    to three runs on an H200 (allreduce_us of benchmarks/results/h200.json)."""
    return 3.2 + 0.92 * ranks + 3 * ranks * ranks * nbytes / COPY


SIZES = (16 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 8 * MIB)


def name_of(nbytes: float) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / KIB:g} KiB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def all_reduce_table() -> str:
    rows = []
    for ranks in (2, 4, 8, 16, 72):
        found = [all_reduce(size, ranks) for size in SIZES]
        rows.append([str(ranks), *(f"{choice.name} {choice.us:.3g}" for choice in found)])
    return table(["GPUs", *map(name_of, SIZES)], rows)


def exchange_table() -> str:
    rows = []
    for ranks in (2, 4, 8, 16, 64):
        times = [
            exchange(n, size, ranks, 8) for n in (1, 128) for size in (7168 + 288, 2 * 7168)
        ]  # fp8 with scales, bfloat16
        rows.append([str(ranks), *(f"{us:.3g}" for us in times)])
    head = ["GPUs", "dispatch, 1 token", "combine, 1 token", "dispatch, 128", "combine, 128"]
    return table(head, rows)


def picture() -> str:
    """Return an SVG: microseconds over bytes, both logarithmic, a curve per protocol for 8 GPUs."""
    import math

    width, height, left, bottom = 640, 360, 60, 40
    low, high, least, most = math.log2(4 * KIB), math.log2(16 * MIB), math.log2(2), math.log2(512)

    def at(nbytes: float, us: float) -> str:
        x = left + (math.log2(nbytes) - low) / (high - low) * (width - left - 10)
        y = height - bottom - (math.log2(us) - least) / (most - least) * (height - bottom - 10)
        return f"{x:.1f},{y:.1f}"

    curves: list[tuple[str, str, Callable[[float, int], float]]] = [
        ("one-shot", "#1f77b4", one_shot),
        ("two-shot", "#d62728", two_shot),
        ("multimem", "#2ca02c", multimem),
    ]
    sizes = [2 ** (low + i * (high - low) / 48) for i in range(49)]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for size in (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB):
        x = at(size, 2).split(",")[0]
        parts.append(f'<line x1="{x}" y1="10" x2="{x}" y2="{height - bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{height - 22}" font-size="12" text-anchor="middle">{name_of(size)}</text>')
    for us in (2, 8, 32, 128, 512):
        y = at(4 * KIB, us).split(",")[1]
        parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 10}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" font-size="12" text-anchor="end">{us} us</text>')
    for i, (name, colour, function) in enumerate(curves):
        points = " ".join(at(size, function(size, 8)) for size in sizes)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 12}" y="{28 + 18 * i}" font-size="13" fill="{colour}">{name}, 8 GPUs</text>')
    middle = (left + width) // 2
    parts.append(f'<text x="{middle}" y="{height - 5}" font-size="12" text-anchor="middle">model, not measured</text>')
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture instead")
    arguments = parser.parse_args(argv)
    if arguments.svg is not None:
        arguments.svg.write_text(picture())
        return
    print("all-reduce, us (model):\n")
    print(all_reduce_table())
    print("\ndispatch in fp8 and combine in bfloat16 of 7168 columns, 8 experts per token, us (model):\n")
    print(exchange_table())


if __name__ == "__main__":
    main()
