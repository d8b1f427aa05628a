# SPDX-License-Identifier: Apache-2.0
"""The module of the concat family: one per backend; element sizes are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_concat_mla_module", "gen_concat_ops_modules"]


def gen_concat_mla_module(backend: str = "cuda") -> JitSpec:
    """Describe the module that concatenates the two parts of MLA keys."""
    return stage("concat_mla", backend=backend, kernels={"kernel": {}})


def gen_concat_ops_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_concat_mla_module(backend)
