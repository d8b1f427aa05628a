# SPDX-License-Identifier: Apache-2.0
"""Names the published API places in ``flashinfer.testing.utils``; the modules beside this one define them."""

from .attention import *  # noqa: F403
from .attention import __all__ as _attention
from .cold_cache import calculate_rotation_count, get_l2_cache_size
from .fp8 import dequantize_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8, quantize_fp8
from .inputs import count_bytes, set_seed
from .kineto import bench_kineto, empty_suppress, suppress_stdout_stderr
from .timers import aggregate_gpu_time_across_ranks, sleep_after_kernel_run
from .timing import (
    bench_gpu_time,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_gpu_time_with_cupti,
)

__all__ = [
    *_attention,
    "aggregate_gpu_time_across_ranks",
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "bench_kineto",
    "calculate_rotation_count",
    "count_bytes",
    "dequantize_fp8",
    "empty_suppress",
    "get_l2_cache_size",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "quantize_fp8",
    "set_seed",
    "sleep_after_kernel_run",
    "suppress_stdout_stderr",
]
