# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the list of tactics that the tuner must not try."""

from flashinfer.autotuner.blocklist import TacticsBlocklist as TacticsBlocklist
