# SPDX-License-Identifier: Apache-2.0
"""The files of each op, layer by layer, so that a gap is visible. A map, not a gate.

python scripts/columns.py          one row per stem, line counts per layer
python scripts/columns.py norm     the files of one family
"""

from __future__ import annotations

import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent

# layer -> patterns below the root; {family} and {stem} as in the column rule of CLAUDE.md
LAYERS: dict[str, tuple[str, ...]] = {
    "API": ("flashinfer/{family}.py", "flashinfer/{family}/*.py"),
    "JIT": ("flashinfer/jit/{family}.py", "flashinfer/jit/{stem}.py", "flashinfer/jit/{family}/{stem}.py"),
    "launcher": ("csrc/{stem}.cu", "csrc/{stem}_sm[0-9]*.cu", "csrc/{stem}_cpu.cpp"),
    "binding": ("csrc/{stem}_jit_binding.cu",),
    "template": ("csrc/{stem}_*.jinja",),
    "CUDA": ("include/flashinfer/**/{stem}.cuh", "include/flashinfer/**/{stem}_sm[0-9]*.cuh"),
    "CPU": ("include/flashinfer/**/{stem}_cpu.h",),
    "shared": ("include/flashinfer/**/{stem}.h",),
    "trace": ("flashinfer/trace/templates/{family}.py",),
    "test": ("tests/{family}/test_{stem}*.py", "tests/test_{stem}.py"),
    "bench": ("benchmarks/bench_{stem}.py", "benchmarks/bench_{family}.py"),
}


def families() -> tuple[str, ...]:
    sys.path.insert(0, str(ROOT))
    from flashinfer.aot import FAMILIES

    return tuple(FAMILIES)


def stems(family: str) -> list[str]:
    """The csrc stems a family's generator names. A binding marks a stem: every module has one."""
    generators = [*ROOT.glob(f"flashinfer/jit/{family}.py"), *ROOT.glob(f"flashinfer/jit/{family}/*.py")]
    text = "".join(path.read_text() for path in generators)
    known = sorted(path.name.removesuffix("_jit_binding.cu") for path in ROOT.glob("csrc/*_jit_binding.cu"))
    return [stem for stem in known if f'"{stem}"' in text or f'"{stem}.cu"' in text] or [family]


def files(family: str, stem: str, layer: str) -> list[Path]:
    patterns = [pattern.format(family=family, stem=stem) for pattern in LAYERS[layer]]
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def line_count(path: Path) -> int:
    return path.read_text().count("\n")


def grid() -> str:
    rows = []
    for family in families():
        for stem in stems(family):
            found = [files(family, stem, layer) for layer in LAYERS]
            rows.append([family, stem, *(sum(map(line_count, paths)) if paths else "-" for paths in found)])
    return tabulate(rows, ["family", "stem", *LAYERS], tablefmt="plain")


def column(family: str) -> str:
    rows = []
    for stem in stems(family):
        for layer in LAYERS:
            rows += [[layer, path.relative_to(ROOT), line_count(path)] for path in files(family, stem, layer)]
    unique = list(dict.fromkeys(map(tuple, rows)))
    return tabulate(unique, ["layer", "file", "lines"], tablefmt="plain")


def main() -> None:
    wanted = sys.argv[1:]
    if not wanted:
        print(grid())
    for family in wanted:
        if family not in families():
            sys.exit(f"columns: family is {family!r}, expected one of {', '.join(families())}")
        print(column(family))


if __name__ == "__main__":
    main()
