# SPDX-License-Identifier: Apache-2.0
"""Published path of an all-reduce that needs a Blackwell GPU."""

from flashinfer._compat.unsupported_comm import MNNVLCuteDSLAllReduceFusionWorkspace

__all__ = ["MNNVLCuteDSLAllReduceFusionWorkspace"]
