# SPDX-License-Identifier: Apache-2.0
"""Timing, tolerances and work counts that tests and benchmarks share.

Modules, in the order to read them::

    timing      bench_gpu_time and its variants: CUPTI, CUDA events, CUDA graphs, host clock
    timers      the measuring loops behind them; cupti, cold_cache: their parts
    compare     assert_close and the tolerance of each dtype
    attention   operations and bytes of an attention call
    fp8, inputs, kineto   blockwise quantisation, seeds and sizes, torch's profiler
    utils       the same names where published code imports them from
"""

from .attention import *
from .attention import __all__ as _attention
from .compare import Tolerance, assert_close, tolerances
from .inputs import count_bytes, set_seed
from .timers import sleep_after_kernel_run
from .timing import *
from .timing import __all__ as _timing

__all__ = [
    *_attention,
    *_timing,
    "Tolerance",
    "assert_close",
    "count_bytes",
    "set_seed",
    "sleep_after_kernel_run",
    "tolerances",
]
