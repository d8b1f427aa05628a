# SPDX-License-Identifier: Apache-2.0
"""Put ``examples/`` on the path: its files are scripts, and import each other by plain names."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
