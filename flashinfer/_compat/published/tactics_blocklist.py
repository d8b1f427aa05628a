# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the list of tactics that the tuner must not try.

It names the module itself: programs replace ``_collect_metadata`` there.
"""

import sys

from flashinfer.autotuner import blocklist
from flashinfer.autotuner.blocklist import TacticsBlocklist as TacticsBlocklist

sys.modules[__name__] = blocklist
