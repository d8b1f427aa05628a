# SPDX-License-Identifier: Apache-2.0
"""Print the files of each op by layer, so that a missing layer is visible. Informative only; no check depends on it.

python scripts/columns.py          one row per stem, line counts per layer
python scripts/columns.py norm     the files of one family

Needs nothing but Python: a fresh clone has no packages yet.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path
from typing import Sequence

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "flashinfer"

# layer -> alternatives, each a list of patterns below the root; the first that finds files is the layer. {family} and
# {stem} as in the column rule of CLAUDE.md; {folder} has parts that stems share: the family's, or attention's.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "API": (("flashinfer/{family}.py", "flashinfer/{family}/**/*.py", "flashinfer/_runtime/{family}.py"),),
    "JIT": (("flashinfer/jit/{family}.py", "flashinfer/jit/{stem}.py"), ("flashinfer/jit/{folder}/*.py",)),
    "launcher": (("csrc/{stem}.cu", "csrc/{stem}_sm[0-9]*.cu", "csrc/{stem}_cpu.cpp"),),
    "binding": (("csrc/{stem}_jit_binding.cu",),),
    "template": (("csrc/{stem}_*.jinja",), ("csrc/{folder}_*.jinja",)),
    "CUDA": (),  # headers: see kernels()
    "CPU": (),
    "shared": (),
    "trace": (("flashinfer/trace/templates/{family}.py", "flashinfer/trace/templates/{family}_*.py"),),
    "test": (
        ("tests/{family}/test_{stem}*.py", "tests/test_{stem}.py"),
        ("tests/{folder}/test_{stem}*.py",),
        ("tests/{family}/test_*.py",),
        ("tests/{folder}/test_*.py",),
    ),
    "bench": (("benchmarks/bench_{stem}.py", "benchmarks/bench_{family}.py"),),
}
ATTENTION = ("single_", "batch_", "sparse_")  # how the stems begin whose kernels are in include/flashinfer/attention
FUSED = "batch_fused"  # two levels of a cascade in one launch
KERNEL_FOLDERS = {"fused_moe": ("moe", "fused_moe")}  # where the folder has another name than the family
#: Headers of the attention generator that modules of other kinds take.
OTHER_KINDS = {
    "decode": ("prefill_sm90", "mla", "fused", "mixed"),
    "prefill": ("mla",),
    "mla": ("prefill", "fused", "mixed"),
}
_INCLUDE = re.compile(r'^\s*#\s*include\s+(?:<flashinfer/([\w./]+)>|"([\w./]+)")', re.MULTILINE)
_NAMED = re.compile(r'"([\w/{}]+(?:\.cuh|[_/]cpu\.h|launch\.h))"')


def families() -> tuple[str, ...]:
    """Return ``FAMILIES`` of aot.py, read without importing it."""
    tree = ast.parse((ROOT / "flashinfer" / "aot.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    value = next(node.value for node in assigned if getattr(node.targets[0], "id", None) == "FAMILIES")
    return tuple(node.value for node in ast.walk(value) if isinstance(node, ast.Constant))


@functools.cache
def known_stems() -> list[str]:
    """Return all stems. Every module has a binding, so the bindings list the stems."""
    return sorted(path.name.removesuffix("_jit_binding.cu") for path in ROOT.glob("csrc/*_jit_binding.cu"))


def generators(family: str) -> list[Path]:
    return [*ROOT.glob(f"flashinfer/jit/{family}.py"), *ROOT.glob(f"flashinfer/jit/{family}/*.py")]


def stems(family: str) -> list[str]:
    """Return the csrc stems that a family's generator names. Stems of attention end in the family's name."""
    if not generators(family):
        return [stem for stem in known_stems() if stem.startswith(ATTENTION) and stem.endswith(f"_{family}")]
    text = "".join(path.read_text() for path in generators(family))
    named = [stem for stem in known_stems() if f'"{stem}"' in text or f'"{stem}.cu"' in text]
    return [*named, FUSED] if family == "cascade" else named


def folder_of(family: str, stem: str) -> str:
    return "attention" if stem.startswith(ATTENTION) else family


@functools.cache
def included(path: Path) -> tuple[Path, ...]:
    """Return the files of csrc/ and include/ that a source names in its ``#include`` lines."""
    found = []
    for ours, quoted in _INCLUDE.findall(path.read_text()):
        candidates = [HEADERS / ours] if ours else [path.parent / quoted, ROOT / "csrc" / quoted, HEADERS / quoted]
        found += [candidate.resolve() for candidate in candidates if candidate.is_file()][:1]
    return tuple(found)


def named_by_generator(family: str, stem: str) -> list[Path]:
    """Return the headers that the generator renders into units of the stem (``#include <.../{{ header }}>``)."""
    folder = folder_of(family, stem)
    kind = stem.rpartition("_")[2]
    names = {name for path in generators(folder) for name in _NAMED.findall(path.read_text())}
    if folder == "attention":
        names = {name for name in names if not name.startswith(OTHER_KINDS.get(kind, ()))}
    elif folder == "sampling":
        names |= {f"{word}.cuh" for path in generators(folder) for word in re.findall(r'"(\w+)"', path.read_text())}
    places = [HEADERS, *(HEADERS / name for name in KERNEL_FOLDERS.get(folder, (folder,)))]
    globs = {re.sub(r"{\w+}", "*", name) for name in names}  # f"mono_{form}.cuh"
    return sorted({path for glob in globs for place in places for path in place.glob(glob)})


@functools.cache
def kernels(family: str, stem: str) -> tuple[Path, ...]:
    """Return the headers of the family that the sources of a stem include, directly or through others."""
    sources = [*files(family, stem, "launcher"), *files(family, stem, "template")]
    variable = any("{{ header" in path.read_text() or ".header }}" in path.read_text() for path in sources)
    todo = [*sources, *(named_by_generator(family, stem) if variable else [])]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += included(path)
    folder = folder_of(family, stem)
    homes = KERNEL_FOLDERS.get(folder, (folder,))
    inner = {path for path in seen if HEADERS in path.parents and path.relative_to(HEADERS).parts[0] in homes}
    outer = {path for path in seen if path.parent == HEADERS and path.name.split(".")[0].startswith((stem, family))}
    return tuple(sorted(inner | outer))


def layer_of(header: Path) -> str:
    if header.name.endswith("_cpu.h") or header.name == "cpu.h" or header.parent.name == "cpu":
        return "CPU"
    return "CUDA" if header.suffix == ".cuh" else "shared"


def files(family: str, stem: str, layer: str) -> list[Path]:
    if layer in ("CUDA", "CPU", "shared"):
        return [path for path in kernels(family, stem) if layer_of(path) == layer]
    longer = tuple(other for other in known_stems() if other.startswith(f"{stem}_"))
    for patterns in LAYERS[layer]:
        globs = [pattern.format(family=family, stem=stem, folder=folder_of(family, stem)) for pattern in patterns]
        found = {path for glob in globs for path in ROOT.glob(glob) if not path.name.startswith(longer)}
        if found:
            return sorted(found)
    return []


def line_count(path: Path) -> int:
    return path.read_text().count("\n")


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return columns of text; numbers are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row, cells in zip(rows, texts, strict=True):
        aligned = (
            text.rjust(width) if isinstance(cell, int) else text.ljust(width)
            for cell, text, width in zip(row, cells, widths, strict=True)
        )
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def grid() -> str:
    rows: list[list[object]] = [["family", "stem", *LAYERS]]
    for family in families():
        for stem in stems(family):
            found = [files(family, stem, layer) for layer in LAYERS]
            rows.append([family, stem, *(sum(map(line_count, paths)) if paths else "-" for paths in found)])
    return table(rows)


def column(family: str) -> str:
    rows: list[tuple[object, ...]] = [("layer", "file", "lines")]
    for stem in stems(family):
        for layer in LAYERS:
            rows += [(layer, path.relative_to(ROOT), line_count(path)) for path in files(family, stem, layer)]
    return table(list(dict.fromkeys(rows)))


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
