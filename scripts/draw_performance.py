# SPDX-License-Identifier: Apache-2.0
"""Draw charts of benchmarks/results/h200.json: docs/performance/attention.svg and docs/headline.svg.

python scripts/draw_performance.py            check that the pictures are current
python scripts/draw_performance.py --write    write them

A case is drawn with its latest run. The published time is that of FlashInfer 0.7.2 on the same card, which the file
holds as ``speedup`` (published time over ours).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, Optional

from draw_kernels import DARK, Picture

ROOT = Path(__file__).resolve().parent.parent
OURS, PUBLISHED = "#2a7f62", "#c8c8c8"
LABELS, BARS, ROW = 250, 470, 26  #: widths of the two columns, and the height of a case


class Case(NamedTuple):
    """A measured case: rates of ours and of the published package, in TB/s or TFLOP/s."""

    name: str
    ours: float
    published: Optional[float]


class Group(NamedTuple):
    """Cases of one family, the unit of their rates, and what the card reaches in it."""

    title: str
    prefix: str
    unit: str  #: key of the rate in the file
    limit: float
    limit_name: str


def read() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())


def latest(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the result of each case in the last run that has it."""
    return {result["case"]: result for run in record["runs"] for result in run["results"]}


def groups(record: dict[str, Any]) -> list[Group]:
    copy, product = record["ceilings"]["copy_tb_s_1GB"], record["ceilings"]["bf16_matmul_8192_tflops"]
    read_limit = (copy, f"copy {copy:g} TB/s")
    product_limit = (product, f"product {product:g} TFLOP/s")
    return [
        Group("Decode (TB/s of keys and values)", "decode/", "tb_s", *read_limit),
        Group("Prefill (TFLOP/s)", "prefill/", "tflops", *product_limit),
        Group("MLA decode (TFLOP/s)", "mla/", "tflops", *product_limit),
        Group("Cascade (TB/s)", "cascade/", "tb_s", *read_limit),
    ]


def cases_of(group: Group, results: dict[str, dict[str, Any]]) -> list[Case]:
    found = []
    for name, result in results.items():
        if name.startswith(group.prefix) and group.unit in result:
            rate, speedup = result[group.unit], result.get("speedup")
            found.append(Case(name.removeprefix(group.prefix), rate, rate / speedup if speedup else None))
    return sorted(found)


def bar(p: Picture, y: float, height: float, width: float, colour: str, words: str) -> None:
    p.parts.append(f'<rect x="{LABELS}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>')
    p.parts.append(
        f'<text x="{LABELS + width + 4:.1f}" y="{y + height - 1.5:g}" font-size="9" fill="{DARK}">{words}</text>'
    )


def line(p: Picture, x: float, y: float, height: float) -> None:
    where = f'x1="{x:.1f}" x2="{x:.1f}" y1="{y:g}" y2="{y + height:g}"'
    p.parts.append(f'<line {where} stroke="{DARK}" stroke-dasharray="4 3"/>')


def attention() -> str:
    """Draw all attention cases, two bars each, and the limit of the card as a dashed line."""
    record = read()
    results = latest(record)
    panels = [(group, cases_of(group, results)) for group in groups(record)]
    height = 52 + sum(40 + ROW * len(cases) for _, cases in panels)
    p = Picture(LABELS + BARS + 80, height)
    p.text(16, 22, f"{record['device'].partition(',')[0]}: attention, medians from a cold L2", weight="bold")
    p.box(16, 31, 12, 10, OURS)
    p.text(33, 40, "this package")
    p.box(126, 31, 12, 10, PUBLISHED)
    p.text(143, 40, "published package, same card; none where it was not measured")
    y = 62.0
    for group, cases in panels:
        scale = BARS / (group.limit * 1.06)
        p.text(16, y + 6, group.title, weight="bold")
        p.text(LABELS + group.limit * scale, y + 6, group.limit_name, anchor="end")
        y += 14
        for i, case in enumerate(cases):
            top = y + ROW * i
            p.text(LABELS - 8, top + 14, case.name, anchor="end")
            bar(p, top + 2, 10, case.ours * scale, OURS, f"{case.ours:.3g}")
            if case.published is not None:
                bar(p, top + 13, 9, case.published * scale, PUBLISHED, f"{case.published:.3g}")
        line(p, LABELS + group.limit * scale, y, ROW * len(cases))
        y += ROW * len(cases) + 26
    return p.finish()


#: Cases of the README, with their names in words: large and small gains, and one loss.
HEADLINE = {
    "prefill/ragged_1x8k_causal_32x8": "prefill, 8k causal",
    "prefill/paged_mixed_2x2k_62decode_32x8": "prefill and decode in one batch",
    "decode/bs64_kv4k_gqa32x8": "decode, 64 x 4k",
    "decode/bs64_skew4k_gqa32x8": "decode, uneven lengths",
    "decode/bs64_kv4k_gqa32x8_fp8kv": "decode, fp8 cache",
    "mla/decode_bs64_kv4k_h128": "MLA decode, 128 heads",
    "cascade/shared8k_64x512_32x8": "shared prefix of 8k",
    "sampling/top_p_bs64": "top-p sampling, 64 x 128k",
    "norm/rmsnorm_16kx4k": "rmsnorm, 16k x 4k",
}


def headline() -> str:
    """Draw how many times faster than the published package a few calls are."""
    record = read()
    results = latest(record)
    p = Picture(LABELS + BARS + 80, 70 + 22 * len(HEADLINE))
    p.text(16, 22, f"{record['device'].partition(',')[0]}: published time over ours (1: equal)", weight="bold")
    scale = BARS / 5.0
    for i, (name, words) in enumerate(HEADLINE.items()):
        y = 38 + 22 * i
        factor = results[name]["speedup"]
        p.text(LABELS - 8, y + 12, words, anchor="end")
        bar(p, y, 15, factor * scale, OURS if factor >= 1 else PUBLISHED, f"{factor:.2f}")
    line(p, LABELS + scale, 32, 22 * len(HEADLINE) + 4)
    p.text(16, 58 + 22 * len(HEADLINE), "All cases: docs/performance. Made by scripts/draw_performance.py.")
    return p.finish()


PICTURES = {"docs/performance/attention.svg": attention, "docs/headline.svg": headline}


def main() -> None:
    for name, draw in PICTURES.items():
        path, text = ROOT / name, draw()
        if sys.argv[1:] == ["--write"]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{name} is not current; run python scripts/draw_performance.py --write")


if __name__ == "__main__":
    main()
