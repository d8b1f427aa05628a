# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/ are those that scripts/draw_kernels.py draws."""

import subprocess
import sys

from .documents import ROOT


def test_pictures_are_current():
    script = ROOT / "scripts" / "draw_kernels.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
