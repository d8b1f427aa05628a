# SPDX-License-Identifier: Apache-2.0
"""Programs that tests of traces start in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import flashinfer

ROOT = Path(flashinfer.__file__).parents[1]


def execute(code: str, cwd: Path, **environment: str) -> str:
    """Run a program in a new process."""
    names = {"FLASHINFER_TRACE_DUMP", "FLASHINFER_TRACE_DUMP_DIR", "FLASHINFER_TRACE_APPLY", "FLASHINFER_LOGLEVEL"}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
