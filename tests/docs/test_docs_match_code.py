# SPDX-License-Identifier: Apache-2.0
"""Names in the documentation exist: files, variables, commands, Python names."""

from __future__ import annotations

import functools
import importlib
import re

import pytest

from flashinfer._runtime.knobs import knobs
from flashinfer.jit import env as jit_env

from ..fresh_process import run_python
from .documents import DOCUMENTS, ROOT, code, links, name_of, paths
from .new_op import FILES as NEW_OP

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)

BUILT = (
    "flashinfer/data",
    "flashinfer/_build_meta.py",
    "build/site",
)  # made by builds, absent from a plain checkout


@functools.cache
def macros() -> set[str]:
    """Return FLASHINFER_ words of the C++ sources, and variables that only tests and CI read."""
    files = [path for folder in ("csrc", "include", "tests") for path in (ROOT / folder).rglob("*")]
    sources = [path for path in files if path.suffix in (".h", ".cuh", ".cu", ".jinja", ".py")]
    text = "".join(p.read_text() for p in sources if p.parent.name != "docs")
    defined = re.findall(r"(?:ifdef|ifndef|defined\(|define|environ\S*\()\W*(FLASHINFER_\w+)", text)
    return set(defined)


@documents
def test_variables_exist(path):
    known = {knob.variable for knob in knobs.all()} | macros()
    unknown = {
        name
        for name in re.findall(r"\bFLASHINFER_[A-Z0-9_]+\b", path.read_text())
        if name not in known and not hasattr(jit_env, name)
    }
    assert not unknown, f"{name_of(path)} names variables that nothing reads: {sorted(unknown)}"


@documents
def test_commands_exist(path):
    from flashinfer.__main__ import main

    named = {m for line in code(path.read_text()) for m in re.findall(r"(?:^|[\s;])flashinfer ([a-z][a-z-]+)\b", line)}
    unknown = named - set(main.commands)
    assert not unknown, f"{name_of(path)} names commands that do not exist: {sorted(unknown)}"


@documents
def test_options_exist(path):
    from flashinfer.__main__ import main

    for line in code(path.read_text()):
        match = re.search(r"(?:^|[\s;])flashinfer ([a-z][a-z-]+)\b([^;#&|]*)", line)
        if match and match[1] in main.commands:
            known = {o for parameter in main.commands[match[1]].params for o in parameter.opts} | {"--help"}
            unknown = set(re.findall(r"(?<=\s)--[a-z-]+", match[2])) - known
            assert not unknown, f"{name_of(path)}: `flashinfer {match[1]}` has no {sorted(unknown)}"


@documents
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {m for line in code(path.read_text()) for m in re.findall(r"^make ([a-z]+)\b", line)}
    assert named <= targets


@documents
def test_links_lead_somewhere(path):
    broken = [target for target in links(path.read_text()) if not (path.parent / target).exists()]
    assert not broken, f"{name_of(path)} links to {broken}"


@documents
def test_paths_exist(path):
    named = [p for p in paths(path.read_text()) if not p.startswith(BUILT)]
    missing = [p for p in named if not any(ROOT.glob(p.rstrip("/"))) and not (path.parent / p).exists()]
    assert not missing, f"{name_of(path)} names {missing}"


@documents
def test_scripts_and_tests_in_commands_exist(path):
    named = [m for line in code(path.read_text()) for m in re.findall(r"(?:python|pytest) ([\w/]+(?:\.py)?)\b", line)]
    missing = [p for p in named if "/" in p and not (ROOT / p).exists() and not (NEW_OP / p).exists()]
    assert not missing, f"{name_of(path)} runs {missing}"


@documents
def test_python_names_exist(path):
    for line in code(path.read_text()):
        for dotted in re.findall(r"(?<![\w./])flashinfer(?:\.\w+)+", line):
            assert _resolves(dotted) or _is_new(dotted), f"{name_of(path)} names {dotted}"


def test_python_names_are_found_after_importing_the_package():
    """Evaluate each name after ``import flashinfer`` alone, in a subprocess where no other import has happened."""
    lines = [line for path in DOCUMENTS for line in code(path.read_text())]
    found = {name for line in lines for name in re.findall(r"(?<![\w./])flashinfer(?:\.\w+)+", line)}
    names = sorted(name for name in found if not _is_new(name))
    program = "import flashinfer, sys; [eval(name) for name in sys.argv[1:]]"
    done = run_python(["-c", program, *names], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def _is_new(dotted: str) -> bool:
    """Tell whether a name is of the operator that docs/adding_an_op.md adds."""
    return (NEW_OP / dotted.replace(".", "/")).with_suffix(".py").exists()


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False


def test_environment_page_is_current():
    script = ROOT / "scripts" / "knobs_table.py"
    page = run_python([script], check=True).stdout
    stored = (ROOT / "docs" / "environment.md").read_text()
    assert stored == page, "run python scripts/knobs_table.py --write"


@pytest.mark.parametrize("skill", ["add-cuda-kernel", "benchmark-kernel", "debug-cuda-crash"])
def test_skill_has_a_header(skill):
    text = (ROOT / ".claude" / "skills" / skill / "SKILL.md").read_text()
    assert text.startswith(f"---\nname: {skill}\ndescription: ")
    assert f"skills/{skill}/SKILL.md" in (ROOT / "CLAUDE.md").read_text()
