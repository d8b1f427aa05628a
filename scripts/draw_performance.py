# SPDX-License-Identifier: Apache-2.0
"""Draw charts of benchmarks/results/h200.json: those of docs/performance, docs/headline.svg, and figures of the README.

python scripts/draw_performance.py            check that the pictures are current
python scripts/draw_performance.py --write    write them

A case is drawn with its latest run. The published time is that of FlashInfer 0.7.2 on the same card, or of a peer where
FlashInfer has no such call; the file holds it as ``speedup`` (published time over ours).
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from draw_kernels import DARK, Picture

ROOT = Path(__file__).resolve().parent.parent
OURS, PUBLISHED = "#2a7f62", "#c8c8c8"
LABELS, BARS, ROW = 250, 470, 26  #: widths of the two columns, and the height of a case


class Case(NamedTuple):
    """A measured case: rates, or times, of ours and of the published package."""

    name: str
    ours: float
    published: Optional[float]


class Group(NamedTuple):
    """Cases of one family, the key of their rates in the file, and what the card reaches in it (0: not known)."""

    title: str
    prefix: str
    unit: str
    limit: float = 0.0
    limit_name: str = ""
    accept: Callable[[dict[str, Any]], bool] = lambda result: True


def read() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())


def latest(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the result of each case in the last run that has it."""
    return {result["case"]: result for run in record["runs"] for result in run["results"]}


def copy_limit(record: dict[str, Any]) -> tuple[float, str]:
    rate = record["ceilings"]["copy_tb_s_1GB"]
    return rate, f"copy {rate:g} TB/s"


def product_limit(record: dict[str, Any], is_fp8: bool = False) -> tuple[float, str]:
    rate = record["ceilings"]["bf16_matmul_8192_tflops"]
    return (2 * rate, f"twice bf16 {2 * rate:g} TFLOP/s") if is_fp8 else (rate, f"product {rate:g} TFLOP/s")


def attention(record: dict[str, Any]) -> list[Group]:
    return [
        Group("Decode (TB/s of keys and values)", "decode/", "tb_s", *copy_limit(record)),
        Group("Prefill (TFLOP/s)", "prefill/", "tflops", *product_limit(record)),
        Group("MLA decode (TFLOP/s)", "mla/", "tflops", *product_limit(record)),
        Group("Cascade (TB/s)", "cascade/", "tb_s", *copy_limit(record)),
    ]


def products(record: dict[str, Any], prefix: str, what: str) -> list[Group]:
    """Return cases of matrix products by what bounds them, the limit of which they are nearer to."""

    def is_fp8(result: dict[str, Any]) -> bool:
        return "fp8" in result["case"]

    def is_read(result: dict[str, Any]) -> bool:
        fraction = result["tflops"] / product_limit(record, is_fp8(result))[0]
        return result.get("tb_s", 0) / copy_limit(record)[0] > fraction

    def computes(fp8: bool) -> Callable[[dict[str, Any]], bool]:
        return lambda result: is_fp8(result) is fp8 and not is_read(result)

    return [
        Group(f"{what} of bf16 (TFLOP/s)", prefix, "tflops", *product_limit(record), computes(False)),
        Group(f"{what} of fp8 (TFLOP/s)", prefix, "tflops", *product_limit(record, True), computes(True)),
        Group(f"{what} bound by reading weights (TB/s)", prefix, "tb_s", *copy_limit(record), is_read),
    ]


def gemm(record: dict[str, Any]) -> list[Group]:
    return products(record, "gemm/", "Products")


def moe(record: dict[str, Any]) -> list[Group]:
    return products(record, "moe/", "Layers")


def rows(record: dict[str, Any]) -> list[Group]:
    titles = {"norm/": "Norms", "activation/": "Activations", "rope/": "Rotary embedding", "page/": "Paged cache"}
    return [Group(f"{title} (TB/s)", prefix, "tb_s", *copy_limit(record)) for prefix, title in titles.items()]


def sampling(record: dict[str, Any]) -> list[Group]:
    def of_rows(end: str) -> Callable[[dict[str, Any]], bool]:
        return lambda result: result["case"].endswith(end)

    return [
        Group(f"{n} row{'s' * (n > 1)} of 128256 (us, shorter is faster)", "sampling/", "us", accept=of_rows(f"_bs{n}"))
        for n in (1, 64, 512)
    ]


def cases_of(group: Group, results: dict[str, dict[str, Any]]) -> list[Case]:
    found = []
    for name, result in results.items():
        if name.startswith(group.prefix) and group.unit in result and group.accept(result):
            value, speedup = result[group.unit], result.get("speedup")
            factor = speedup if group.unit == "us" or not speedup else 1 / speedup
            found.append(Case(name.removeprefix(group.prefix), value, value * factor if factor else None))
    return sorted(found)


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def bar(p: Picture, y: float, height: float, width: float, colour: str, words: str) -> None:
    p.parts.append(f'<rect x="{LABELS}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>')
    p.parts.append(
        f'<text x="{LABELS + width + 4:.1f}" y="{y + height - 1.5:g}" font-size="9" fill="{DARK}">{words}</text>'
    )


def line(p: Picture, x: float, y: float, height: float) -> None:
    where = f'x1="{x:.1f}" x2="{x:.1f}" y1="{y:g}" y2="{y + height:g}"'
    p.parts.append(f'<line {where} stroke="{DARK}" stroke-dasharray="4 3"/>')


def chart(title: str, groups: Callable[[dict[str, Any]], list[Group]]) -> str:
    """Draw all cases of some groups, two bars each, and the limit of the card as a dashed line."""
    record = read()
    results = latest(record)
    panels = [(group, cases) for group in groups(record) if (cases := cases_of(group, results))]
    height = 52 + sum(40 + ROW * len(cases) for _, cases in panels)
    p = Picture(LABELS + BARS + 80, height)
    p.text(16, 22, f"{record['device'].partition(',')[0]}: {title}, medians from a cold L2", weight="bold")
    p.box(16, 31, 12, 10, OURS)
    p.text(33, 40, "this package")
    p.box(126, 31, 12, 10, PUBLISHED)
    p.text(143, 40, "published package, or a peer where it has none; same card")
    y = 62.0
    for group, cases in panels:
        scale = BARS / (1.06 * max(group.limit, *(max(case.ours, case.published or 0) for case in cases), 0))
        p.text(16, y + 6, group.title, weight="bold")
        if group.limit:
            p.text(LABELS + group.limit * scale, y + 6, group.limit_name, anchor="end")
        y += 14
        for i, case in enumerate(cases):
            top = y + ROW * i
            p.text(LABELS - 8, top + 14, case.name, anchor="end")
            bar(p, top + 2, 10, case.ours * scale, OURS, short(case.ours))
            if case.published is not None:
                bar(p, top + 13, 9, case.published * scale, PUBLISHED, short(case.published))
        if group.limit:
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


#: The case that the README tells in words.
TOLD = "prefill/ragged_1x8k_causal_32x8"
_FIGURES = re.compile(r"(<!-- figures: scripts/draw_performance.py -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def figures() -> str:
    """Return the README with the figures of its first screen, from the same results as the charts."""
    record = read()
    result = latest(record)[TOLD]
    ours, limit = result["tflops"], record["ceilings"]["bf16_matmul_8192_tflops"]
    text = (
        "On an H200, causal prefill of 8k tokens (32 query heads, 8 key heads, head dimension 128, bf16) runs at\n"
        f"**{ours:.0f} TFLOP/s**: {ours / result['speedup']:.0f} is the published figure, and {limit:.0f} what a plain "
        "8192 x 8192 x 8192 product reaches on\nthe card. All attention cases, the slower ones among them, are "
        "[in one chart](docs/performance/attention.md); figures of\nevery run are in "
        "[h200.json](benchmarks/results/h200.json).\n"
    )
    return _FIGURES.sub(lambda found: found[1] + text + found[2], (ROOT / "README.md").read_text())


CHARTS = {
    "attention": ("attention", attention),
    "gemm": ("matrix products", gemm),
    "moe": ("layers of experts", moe),
    "norm": ("rows", rows),
    "sampling": ("sampling", sampling),
}
PICTURES: dict[str, Callable[[], str]] = {
    f"docs/performance/{name}.svg": functools.partial(chart, *words) for name, words in CHARTS.items()
}
PICTURES["docs/headline.svg"] = headline
PICTURES["README.md"] = figures


def main() -> None:
    for name, draw in PICTURES.items():
        path, text = ROOT / name, draw()
        if sys.argv[1:] == ["--write"]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{name} is not current; run python scripts/draw_performance.py --write")


if __name__ == "__main__":
    main()
