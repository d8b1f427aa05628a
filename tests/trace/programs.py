# SPDX-License-Identifier: Apache-2.0
"""Programs that tests of traces start in a process of their own."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import flashinfer

from ..fresh_process import run_python

ROOT = Path(flashinfer.__file__).parents[1]


def execute(code: str, cwd: Path, **environment: str) -> str:
    """Run a program in a new process."""
    names = {"FLASHINFER_TRACE_DUMP", "FLASHINFER_TRACE_DUMP_DIR", "FLASHINFER_TRACE_APPLY", "FLASHINFER_LOGLEVEL"}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_python(["-c", textwrap.dedent(code)], env=inherited | {"PYTHONPATH": path} | environment, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
