# SPDX-License-Identifier: Apache-2.0
"""The check for GPU machines covers every folder of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_file_is_run(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("FAMILIES", "STEPS")} | {"LIST": "1"}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))  # also if .venv is not activated
    script = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path)]
    printed = subprocess.run(script, env=env, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / line.split()[1] for line in printed.splitlines() if line.startswith("test ")]
    missed = [
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if not any(path == file or path in file.parents for path in paths)
    ]
    assert missed == []
