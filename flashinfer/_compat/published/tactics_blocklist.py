# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the list of tactics that the tuner must not try.

Programs replace ``_collect_metadata`` here: lists read it from this module.
"""

from flashinfer.autotuner.blocklist import _METADATA_KEY as _METADATA_KEY
from flashinfer.autotuner.blocklist import TacticsBlocklist as TacticsBlocklist
from flashinfer.autotuner.blocklist import _collect_metadata as _collect_metadata
from flashinfer.autotuner.blocklist import _tactic_to_json as _tactic_to_json
from flashinfer.autotuner.blocklist import _tactic_to_json_hashable as _tactic_to_json_hashable
