# SPDX-License-Identifier: Apache-2.0
"""Autotuning: choose the fastest of several implementations of an operator, by measuring each once per size.

A :class:`TunableRunner` lists its variants ("tactics"); :meth:`AutoTuner.choose_one` returns the one to run. Inside
``with autotune():`` unknown sizes are measured. Elsewhere known results are looked up; all other sizes use tactic -1,
the default of the first runner. ``mm_bf16`` and ``bmm_fp8`` with ``backend="auto"`` and the products of
``cutlass_fused_moe`` are tuned. Other kernels of this package have their own selection rules, which ``autotune`` does
not change. ``autotune_v2`` keeps its results in a store that processes share.
"""

from .autotuner import (
    _METADATA_KEY,
    AutoTuner,
    AutoTunerStatistics,
    _classify_metadata_mismatches,
    _collect_metadata,
    _get_cudnn_backend_version,
    _json_to_tactic,
    _tactic_to_json,
    _tactic_to_json_hashable,
)
from .batches import ValueProfileArena
from .buckets import make_bucket_mapper, round_to_nearest_bucket
from .context import autotune, autotune_v2, autotune_v2_reload
from .initializers import (
    autotuner_initializer_empty,
    autotuner_initializer_ones,
    autotuner_initializer_rand,
    autotuner_initializer_rand_scaled,
    autotuner_initializer_randn,
    autotuner_initializer_zeros,
)
from .measure import is_in_profile_measurement
from .policy import MeasurementPolicy
from .profiles import (
    ConstraintSpec,
    DynamicDim,
    DynamicTensorSpec,
    OptimizationProfile,
    ProfilingCacheKey,
    StaticDim,
    TuningConfig,
)
from .ranks import get_autotune_process_group, set_autotune_process_group
from .runner import TunableRunner

__all__ = [
    "_METADATA_KEY",
    "AutoTuner",
    "AutoTunerStatistics",
    "ConstraintSpec",
    "DynamicDim",
    "DynamicTensorSpec",
    "MeasurementPolicy",
    "OptimizationProfile",
    "ProfilingCacheKey",
    "StaticDim",
    "TunableRunner",
    "TuningConfig",
    "ValueProfileArena",
    "_classify_metadata_mismatches",
    "_collect_metadata",
    "_get_cudnn_backend_version",
    "_json_to_tactic",
    "_tactic_to_json",
    "_tactic_to_json_hashable",
    "autotune",
    "autotune_v2",
    "autotune_v2_reload",
    "autotuner_initializer_empty",
    "autotuner_initializer_ones",
    "autotuner_initializer_rand",
    "autotuner_initializer_rand_scaled",
    "autotuner_initializer_randn",
    "autotuner_initializer_zeros",
    "get_autotune_process_group",
    "is_in_profile_measurement",
    "make_bucket_mapper",
    "round_to_nearest_bucket",
    "set_autotune_process_group",
]
