# SPDX-License-Identifier: Apache-2.0
"""The modules of the comm family: one per stem and backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_allreduce_module", "gen_alltoall_module", "gen_comm_modules"]


def gen_allreduce_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the all-reduce fused with residual, norm and quantisation."""
    units = {dtype: {"dtype": dtype} for dtype in ("float16_t", "bfloat16_t", "float")}
    return stage("allreduce", backend=backend, kernels=units)


def gen_alltoall_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the one-sided exchange of tokens between the ranks of expert-parallel layers."""
    units = {"dispatch": {"dtype": ""}, **{dtype: {"dtype": dtype} for dtype in ("float16_t", "bfloat16_t", "float")}}
    return stage("alltoall", backend=backend, kernels=units)


def gen_comm_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_allreduce_module(backend)
    yield gen_alltoall_module(backend)
