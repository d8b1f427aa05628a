# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/ are those that the scripts draw."""

import subprocess
import sys

import pytest

from .documents import ROOT


@pytest.mark.parametrize("name", ["draw_kernels.py", "draw_performance.py"])
def test_pictures_are_current(name):
    script = ROOT / "scripts" / name
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
