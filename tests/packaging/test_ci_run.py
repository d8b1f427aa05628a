# SPDX-License-Identifier: Apache-2.0
"""``.ci/run``: the lane runs in a private folder, without standard input, and its end is the end of pytest."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from .tree import ROOT

MAKEFILE = """
.RECIPEPREFIX = >
setup:
> @mkdir -p .venv/bin && ln -sf /bin/true .venv/bin/python
lint:
> @echo "lint in $$(stat -c %a .)"
test:
> @echo "test in $$(stat -c %a .) with $$(wc -c) bytes of input, nvcc $$FLASHINFER_TEST_REQUIRE_NVCC"
> @echo "== {closing} =="
> @exit {status}
"""


@pytest.mark.parametrize("closing, status", [("12 passed in 1.00s", 0), ("1 failed, 11 passed in 1.00s", 1)])
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_lane_runs_in_a_private_folder(tmp_path, closing, status, mode):
    """Check that nobody else may enter the checkout during the lane, and that everybody may again who could before."""
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tree / ".ci" / "run")
    (tree / "Makefile").write_text(MAKEFILE.format(closing=closing, status=status))
    tree.chmod(mode)
    env = {"PATH": os.environ["PATH"]}  # without what the make around this test has set
    command = f"exec '{tree / '.ci' / 'run'}' <&-"
    done = subprocess.run(["bash", "-c", command], cwd="/", env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "lint in 700",
        "test in 700 with 0 bytes of input, nvcc 1",
        f"== {closing} ==",
    ], done.stderr
    assert (done.returncode != 0) == (status != 0)
    assert tree.stat().st_mode & 0o777 == mode
