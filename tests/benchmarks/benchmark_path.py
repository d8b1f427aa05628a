# SPDX-License-Identifier: Apache-2.0
"""Put ``benchmarks/`` on the path: its files are scripts, and import each other by plain names."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))
