# SPDX-License-Identifier: Apache-2.0
"""The module that prints statistics of tensors during replays of a CUDA graph; CUDA only, for the API log."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_api_log_stats_module", "gen_api_log_stats_modules"]

_ELEMENTS = ("float", "float16_t", "bfloat16_t", "int32_t", "int64_t", "uint8_t")


def gen_api_log_stats_module() -> JitSpec:
    """Describe the module: one kernel per element type, in one unit."""
    return stage("api_log_stats", backend="cuda", kernels={"kernel": {"elements": _ELEMENTS}})


def gen_api_log_stats_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    if backend == "cuda":
        yield gen_api_log_stats_module()
