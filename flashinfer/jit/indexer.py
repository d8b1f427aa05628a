# SPDX-License-Identifier: Apache-2.0
"""Modules of the indexer family: one per backend, and one for Hopper per number of heads, slots and head dimension."""

from __future__ import annotations

from typing import Iterator

from ..compilation_context import sm90a_nvcc_flags
from .codegen import stage
from .core import JitSpec

__all__ = ["SLAB", "gen_indexer_modules", "gen_mqa_logits_module", "gen_mqa_logits_sm90_module"]

SLAB = 128  #: bytes of a row in shared memory: the Hopper kernel takes head dimensions that are multiples of it

#: Heads, head dimension and slots of the models that have an indexer: DeepSeek-V3.2 and GLM, Step.
_SHAPES = ((64, 128, 1), (64, 128, 2), (8, 256, 1), (8, 256, 2))


def gen_mqa_logits_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of index scores of any shape, over pages and over ragged keys, and of their schedule."""
    headers = {"kernels": "mqa_logits.cuh", "ragged": "ragged_mqa_logits.cuh"}
    return stage("mqa_logits", backend=backend, kernels={unit: {"header": name} for unit, name in headers.items()})


def gen_mqa_logits_sm90_module(heads: int, dim: int, next_n: int) -> JitSpec:
    """Describe the module of index scores on Hopper for one shape of queries."""
    shape = {"heads": heads, "dim": dim, "next_n": next_n}
    return stage(
        "mqa_logits_sm90",
        backend="cuda",
        name=f"mqa_logits_sm90_h{heads}_d{dim}_n{next_n}",
        kernels={"kernels": shape},
        config=shape,
        extra_cuda_cflags=sm90a_nvcc_flags,
    )


def gen_indexer_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_mqa_logits_module(backend)
    if backend == "cuda":
        for shape in _SHAPES:
            yield gen_mqa_logits_sm90_module(*shape)
