# SPDX-License-Identifier: Apache-2.0
"""Picture of where a step's time goes, from the record of ``bench_serve.py --profile --json RECORD``.

    python benchmarks/serve_picture.py RECORD [RECORD ...] OUT.svg

A case has two bars on one scale: groups of kernels with the gaps between them, and below it the host's phases. What is
left of the longer one is time in which the other side waited.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any, Optional, Sequence

COLOURS = {
    "attention": "#2a7f62",
    "products": "#3478c8",
    "experts, not their products": "#7a5ca8",
    "recurrent layers": "#b8860b",
    "norms, RoPE, pages, activation": "#6aa84f",
    "sampling": "#c27ba0",
    "copies": "#76a5af",
    "gaps": "#d64541",
    "wait for tokens": "#e8e8e8",
}
OTHERS = "#999999"
WIDTH, LEFT, BAR, ROW = 960, 200, 18, 64


def parts_of(profile: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return the bars of a case: microseconds by part."""
    bars = []
    if "device_us" in profile:
        bars.append(("GPU", {**profile["device_us"], "gaps": profile["gaps_us"]}))
    return [*bars, ("host", profile["host_us"])]


def cases_of(records: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return (title, profile) of each profiled case."""
    return [
        (f"{record['model']}, {record['weights']}: {case}", figures["profile"])
        for record in records
        for case, figures in record["cases"].items()
        if "profile" in figures
    ]


def bar(parts: dict[str, float], y: float, scale: float) -> list[str]:
    """Draw parts one after the other; those that are wide enough have their time written in them."""
    lines, x = [], float(LEFT)
    for name, us in parts.items():
        width = us * scale
        fill, text = COLOURS.get(name, OTHERS), f"{escape(name)}: {us:,.0f} us"
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}"'
        lines.append(f'<rect {place} fill="{fill}"><title>{text}</title></rect>')
        if width > 46:
            shade, place = "#333" if name == "wait for tokens" else "#fff", f'x="{x + width / 2:.1f}" y="{y + 13:.1f}"'
            lines.append(f'<text {place} fill="{shade}" text-anchor="middle">{us:,.0f}</text>')
        x += width
    return lines


def draw(records: Sequence[dict[str, Any]]) -> str:
    """Return the picture as SVG. Each case has a scale of its own: its longer bar takes the whole width."""
    cases = cases_of(records)
    if not cases:
        raise ValueError("no case of the records has a profile, expected those of bench_serve.py --profile --json")
    lines, used = [], set()
    for number, (title, profile) in enumerate(cases):
        bars, top = parts_of(profile), 8 + number * ROW
        scale = (WIDTH - LEFT - 10) / max(sum(parts.values()) for _, parts in bars)
        lines.append(f'<text x="4" y="{top + 12}" font-weight="bold">{escape(title)}</text>')
        for i, (side, parts) in enumerate(bars):
            y = top + 18 + i * (BAR + 2)
            label = f"{side}, {sum(parts.values()):,.0f} us a step"
            lines += [f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label}</text>', *bar(parts, y, scale)]
            used |= set(parts)
    height = 8 + len(cases) * ROW
    names = [name for name in COLOURS if name in used] + sorted(used - set(COLOURS))
    for i, name in enumerate(names):
        x, y = 4 + i % 4 * WIDTH // 4, height + 6 + i // 4 * 18
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS.get(name, OTHERS)}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 10}">{escape(name)}</text>')
    height += 6 + -(-len(names) // 4) * 18 + 4
    style = 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *lines, "</svg>", ""])


def main(argv: Optional[Sequence[str]] = None) -> None:
    *records, out = map(Path, sys.argv[1:] if argv is None else argv)
    if not records or out.suffix != ".svg":
        raise SystemExit("usage: serve_picture.py RECORD.json [RECORD.json ...] OUT.svg")
    try:
        out.write_text(draw([json.loads(path.read_text()) for path in records]))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"serve_picture: {error}") from error


if __name__ == "__main__":
    main()
