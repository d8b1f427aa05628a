# SPDX-License-Identifier: Apache-2.0
"""Published path of collectives over hosts, which need NVSHMEM."""

from flashinfer._compat.unsupported_comm import MixedCommHandler as MixedCommHandler
from flashinfer._compat.unsupported_comm import MixedCommMode as MixedCommMode
from flashinfer._compat.unsupported_comm import MixedCommOp as MixedCommOp
from flashinfer._compat.unsupported_comm import ParallelInfo as ParallelInfo
from flashinfer._compat.unsupported_comm import get_mixed_comm_module as get_mixed_comm_module
from flashinfer._compat.unsupported_comm import run_mixed_comm as run_mixed_comm
