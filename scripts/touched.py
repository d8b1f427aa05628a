# SPDX-License-Identifier: Apache-2.0
"""Print the tests of what differs from main, committed or not: the arguments of pytest in ``make quick``.

python scripts/touched.py            compared with main
python scripts/touched.py v0.2.0     compared with another revision
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from columns import LAYERS, ROOT, families, files, stems

SMOKE = "tests/test_tiny.py"

#: Tests of files that belong to no family; the first prefix that matches decides.
SHARED = {
    "flashinfer/jit/": "tests/jit",
    "flashinfer/trace/": "tests/trace",
    "flashinfer/testing/": "tests/testing",
    "flashinfer/profiler/": "tests/testing",
    "flashinfer/": "tests/runtime",
    "benchmarks/": "tests/benchmarks",
    "examples/serve": "tests/serve",
    "examples/": "tests/docs",
    "docs/": "tests/docs",
    "build_backend.py": "tests/packaging",
    "pyproject.toml": "tests/packaging",
}


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed(revision: str) -> list[str]:
    """Return the files that differ from the point where the branch left ``revision``, and untracked files."""
    base = git("merge-base", "HEAD", revision) or git("merge-base", "HEAD", f"origin/{revision}")
    return git("diff", "--name-only", *base) + git("ls-files", "--others", "--exclude-standard")


def tests_by_file() -> dict[str, set[str]]:
    """Return the test folders of each file of each family, as scripts/columns.py finds them."""
    found: dict[str, set[str]] = {}
    for family in families():
        for stem in stems(family):
            tests = {str(path.relative_to(ROOT)) for path in files(family, stem, "test")}
            folders = {test if test.count("/") == 1 else str(Path(test).parent) for test in tests}
            for layer in LAYERS:
                for path in files(family, stem, layer):
                    found.setdefault(str(path.relative_to(ROOT)), set()).update(folders)
    return found


def tests_of(path: str, by_file: dict[str, set[str]]) -> set[str]:
    """Return the tests of one changed file; none for a file that is only text or has been deleted."""
    parts = Path(path).parts
    if parts[0] == "tests":
        return {path if Path(path).name.startswith("test_") or len(parts) == 2 else str(Path(*parts[:2]))}
    if path in by_file:
        return by_file[path]
    folder = Path("tests", Path(parts[1]).stem) if len(parts) > 1 and parts[0] == "flashinfer" else Path("none")
    if (ROOT / folder).is_dir():
        return {str(folder)}
    return {next((tests for prefix, tests in SHARED.items() if path.startswith(prefix)), SMOKE)}


def main() -> None:
    by_file = tests_by_file()
    found = {test for path in changed(*sys.argv[1:] or ["main"]) for test in tests_of(path, by_file)}
    runnable = [x for x in found if (ROOT / x).is_dir() or (Path(x).name.startswith("test_") and (ROOT / x).is_file())]
    print(*sorted({SMOKE, *runnable}))


if __name__ == "__main__":
    main()
