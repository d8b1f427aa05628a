# SPDX-License-Identifier: Apache-2.0
"""Published path of NVSHMEM's functions; this package has no adapter to it."""

from flashinfer._compat.unsupported_nvshmem import alloc_empty_unique_id as alloc_empty_unique_id
from flashinfer._compat.unsupported_nvshmem import alltoall as alltoall
from flashinfer._compat.unsupported_nvshmem import barrier_all as barrier_all
from flashinfer._compat.unsupported_nvshmem import barrier_all_on_current_stream as barrier_all_on_current_stream
from flashinfer._compat.unsupported_nvshmem import finalize as finalize
from flashinfer._compat.unsupported_nvshmem import free_tensor as free_tensor
from flashinfer._compat.unsupported_nvshmem import get_unique_id as get_unique_id
from flashinfer._compat.unsupported_nvshmem import init as init
from flashinfer._compat.unsupported_nvshmem import malloc as malloc
from flashinfer._compat.unsupported_nvshmem import my_pe as my_pe
from flashinfer._compat.unsupported_nvshmem import n_pes as n_pes
