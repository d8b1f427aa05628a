# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of lists of bad tactics."""

from flashinfer.autotuner.blocklist_gen import PROBE_FUNCTIONS as PROBE_FUNCTIONS
from flashinfer.autotuner.blocklist_gen import generate as generate
