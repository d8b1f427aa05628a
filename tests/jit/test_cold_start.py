# SPDX-License-Identifier: Apache-2.0
"""The eight modules that a server touches first, built from nothing and loaded again: scripts/cold_start.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..packaging.tree import ROOT


@pytest.mark.alone
@pytest.mark.full
def test_the_eight_modules_stay_within_their_limits():
    """A minute on two cores, compilation included; one second for a process that finds them built."""
    command = [sys.executable, str(ROOT / "scripts" / "cold_start.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.search(r"^cold: 8 of 8 modules built in [\d.]+ s", done.stdout), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
