# SPDX-License-Identifier: Apache-2.0
"""Published path of an all-reduce over NVSHMEM."""

from flashinfer._compat.unsupported_comm import NVSHMEMAllReduce as NVSHMEMAllReduce
