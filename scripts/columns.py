# SPDX-License-Identifier: Apache-2.0
"""Print the files of each op by layer, so that a missing layer is visible. Informative only; no check depends on it.

python scripts/columns.py          one row per stem, line counts per layer
python scripts/columns.py norm     the files of one family
"""

from __future__ import annotations

import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent

# layer -> alternatives, each a list of patterns below the root; the first that finds files is the layer. {family} and
# {stem} as in the column rule of CLAUDE.md; {folder} has parts that stems share: the family's, or attention's.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "API": (("flashinfer/{family}.py", "flashinfer/{family}/*.py", "flashinfer/_runtime/{family}.py"),),
    "JIT": (("flashinfer/jit/{family}.py", "flashinfer/jit/{stem}.py"), ("flashinfer/jit/{folder}/*.py",)),
    "launcher": (("csrc/{stem}.cu", "csrc/{stem}_sm[0-9]*.cu", "csrc/{stem}_cpu.cpp"),),
    "binding": (("csrc/{stem}_jit_binding.cu",),),
    "template": (("csrc/{stem}_*.jinja",), ("csrc/{folder}_*.jinja",)),
    "CUDA": (
        ("include/flashinfer/{stem}.cuh", "include/flashinfer/{stem}_*.cuh", "include/flashinfer/{folder}/*.cuh"),
    ),
    "CPU": (
        (
            "include/flashinfer/{stem}_cpu.h",
            "include/flashinfer/{folder}/*cpu*.h",
            "include/flashinfer/{folder}/cpu/*.h",
        ),
    ),
    "shared": (("include/flashinfer/{stem}.h", "include/flashinfer/{folder}/*.h"),),
    "trace": (("flashinfer/trace/templates/{family}.py", "flashinfer/trace/templates/{family}_*.py"),),
    "test": (
        ("tests/{family}/test_{stem}*.py", "tests/test_{stem}.py"),
        ("tests/{folder}/test_{stem}*.py",),
        ("tests/{family}/test_*.py",),
        ("tests/{folder}/test_*.py",),
    ),
    "bench": (("benchmarks/bench_{stem}.py", "benchmarks/bench_{family}.py"),),
}
ATTENTION = ("single_", "batch_")  # how the stems begin whose kernels are in include/flashinfer/attention
FUSED = "batch_fused"  # two levels of a cascade in one launch


def families() -> tuple[str, ...]:
    sys.path.insert(0, str(ROOT))
    from flashinfer.aot import FAMILIES

    return tuple(FAMILIES)


def known_stems() -> list[str]:
    """Return all stems. Every module has a binding, so the bindings list the stems."""
    return sorted(path.name.removesuffix("_jit_binding.cu") for path in ROOT.glob("csrc/*_jit_binding.cu"))


def stems(family: str) -> list[str]:
    """Return the csrc stems that a family's generator names. Stems of attention end in the family's name."""
    generators = [*ROOT.glob(f"flashinfer/jit/{family}.py"), *ROOT.glob(f"flashinfer/jit/{family}/*.py")]
    if not generators:
        return [stem for stem in known_stems() if stem.startswith(ATTENTION) and stem.endswith(f"_{family}")]
    text = "".join(path.read_text() for path in generators)
    named = [stem for stem in known_stems() if f'"{stem}"' in text or f'"{stem}.cu"' in text]
    return [*named, FUSED] if family == "cascade" else named


def files(family: str, stem: str, layer: str) -> list[Path]:
    folder = "attention" if stem.startswith(ATTENTION) else family
    elsewhere = set(files(family, stem, "CPU")) if layer == "shared" else set()
    longer = [other for other in known_stems() if other.startswith(f"{stem}_")]
    for patterns in LAYERS[layer]:
        globs = [pattern.format(family=family, stem=stem, folder=folder) for pattern in patterns]
        found = {path for glob in globs for path in ROOT.glob(glob) if not path.name.startswith(tuple(longer))}
        if found:
            return sorted(found - elsewhere)
    return []


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
