# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports ``autotune_v2`` and the store of its results."""

from flashinfer.autotuner.context import autotune_v2 as autotune_v2
from flashinfer.autotuner.context import autotune_v2_reload as autotune_v2_reload
from flashinfer.autotuner.policy import MeasurementPolicy as MeasurementPolicy
from flashinfer.autotuner.store import ManagedAutotuneCache as ManagedAutotuneCache
from flashinfer.autotuner.store import ManagedCacheEntry as ManagedCacheEntry
from flashinfer.autotuner.store import get_default_cache_root as get_default_cache_root
