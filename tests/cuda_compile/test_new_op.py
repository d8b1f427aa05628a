# SPDX-License-Identifier: Apache-2.0
"""The operator of docs/adding_an_op.md compiles for CUDA as an AOT family, in a copy of the tree."""

from __future__ import annotations

import os
import subprocess
import sys

from ..docs.new_op import make_tree
from .options import NO_SPILLS


def test_family(hopper, tmp_path):
    tree = make_tree(tmp_path / "tree")
    command = [sys.executable, "-m", "flashinfer.aot", "--family", "shift", "--out-dir", "out"]
    env = {**os.environ, "PYTHONPATH": str(tree), "FLASHINFER_EXTRA_CUDAFLAGS": NO_SPILLS}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tree / "out" / "shift" / "shift.so").is_file()
