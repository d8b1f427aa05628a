# SPDX-License-Identifier: Apache-2.0
"""Source rules that a text search can check."""

from __future__ import annotations

import re

import pytest

from .tree import ROOT

HEADERS = sorted(p for p in (ROOT / "include").rglob("*") if p.suffix in (".h", ".cuh", ".hpp", ".inl"))


def relative(path):
    return str(path.relative_to(ROOT))


def code_of(path):
    """Return the text without comments, so that a comment may name what the code must not use."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)


CODE = {path: code_of(path) for path in HEADERS}


def guilty(pattern: str, *, outside: str = "") -> dict[str, list[str]]:
    """Return what a pattern finds in the code of headers, by file, but for those of one folder."""
    found = {relative(path): re.findall(pattern, code) for path, code in CODE.items() if path.parent.name != outside}
    return {path: names for path, names in found.items() if names}


def test_headers_know_no_framework():
    found = guilty(r'#\s*include\s*[<"]((?:torch|ATen|c10|pybind11|tvm|dlpack)[/.][^>"]*)')
    assert found == {}, "kernels take raw pointers and a stream"


def test_inline_assembly_lives_in_ptx():
    found = guilty(r"\b(?:__)?asm(?:__)?\b", outside="ptx")
    assert found == {}, "wrap the instructions under include/flashinfer/ptx/"


def test_no_tuning_macro():
    """Check that numbers to tune are constants of a shape or template arguments: a macro has a value in every unit."""
    found = guilty(r"#\s*ifndef (FLASHINFER_\w+)\s*#\s*define \1[ \t]+[^\n]*\d")
    assert found == {}, "-D sets them; make them constexpr, or arguments of a template"


def test_rules_see_headers():
    assert len(CODE) > 200 and guilty(r"__global__") and guilty(r"\basm\b")


def test_kernels_name_their_test_and_benchmark():
    """Check that a header with a kernel begins with what runs it: ``test  pytest ...`` and ``bench  python ...``."""
    wrong = {}
    for path in (path for path, code in CODE.items() if "__global__" in code):
        head = path.read_text().partition("#pragma once")[0]
        tests = re.findall(r"\btests/[\w/.]*\w", "".join(re.findall(r"//   test +pytest (.*)", head)))
        benches = re.findall(r"\bbenchmarks/\w+\.py", "".join(re.findall(r"bench +python (.*)", head)))
        missing = [name for name in (*tests, *benches) if not (ROOT / name).exists()]
        if not tests or missing or not (benches or re.search(r"bench  none: \w+", head)):
            wrong[relative(path)] = f"test {tests}, bench {benches}, of which {missing} do not exist"
    assert wrong == {}


def test_csrc_has_no_inline_assembly():
    guilty = [relative(p) for p in sorted((ROOT / "csrc").rglob("*.cu")) if re.search(r"\basm\b", code_of(p))]
    assert not guilty


def test_no_test_file_imports_another():
    """Check that what test files share is in helper modules: a test file can then be changed or moved by itself."""
    pattern = re.compile(r"^(?:from [\w.]*\btest_\w+ import|(?:from [\w.]+ )?import .*\btest_\w+)", re.M)
    found = {relative(p): pattern.findall(p.read_text()) for p in sorted((ROOT / "tests").rglob("test_*.py"))}
    found.pop("tests/page/test_page_scales.py")  # a program in a string, which imports the file itself
    assert not {path: lines for path, lines in found.items() if lines}


def test_every_source_states_its_license():
    sources = [p for d in ("flashinfer", "csrc", "include") for p in (ROOT / d).rglob("*")]
    sources = [p for p in sources if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp") and "data" not in p.parts]
    missing = [
        relative(p)
        for p in sorted(sources)
        if p.name != "_build_meta.py" and p.stat().st_size and "SPDX-License-Identifier" not in p.read_text()[:200]
    ]
    assert not missing


@pytest.mark.parametrize(
    "path",
    [
        *("include/flashinfer/attention", "include/flashinfer/mma.cuh", "include/flashinfer/utils.cuh"),
        *(
            "include/flashinfer/vec_dtypes.cuh",
            "csrc/tvm_ffi_utils.h",
            "flashinfer/aot.py",
            "flashinfer/api_logging.py",
        ),
        *("flashinfer/jit/core.py", "flashinfer/jit/cpp_ext.py", "flashinfer/jit/env.py", "flashinfer/jit/attention"),
        *("flashinfer/compilation_context.py", "flashinfer/fi_trace.py", "flashinfer/collect_env.py"),
        *("flashinfer/testing", "flashinfer/profiler", "flashinfer/trace/templates", "flashinfer/__main__.py"),
        *("tests/attention", "tests/utils", "tests/trace", "tests/conftest.py", "benchmarks/flashinfer_benchmark.py"),
    ],
)
def test_paths_of_the_development_guide(path):
    assert (ROOT / path).exists()
