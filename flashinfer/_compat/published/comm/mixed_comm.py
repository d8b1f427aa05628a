# SPDX-License-Identifier: Apache-2.0
"""Published path of collectives over hosts, which need NVSHMEM."""

from flashinfer._compat.unsupported_comm import MixedCommHandler as MixedCommHandler
from flashinfer._compat.unsupported_comm import run_mixed_comm as run_mixed_comm
