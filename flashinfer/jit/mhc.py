# SPDX-License-Identifier: Apache-2.0
"""The module of the mhc family (manifold hyper-connections): one per backend."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_mhc_module", "gen_mhc_modules"]


def gen_mhc_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the hyper-connections before and after a layer."""
    return stage("mhc", backend=backend, kernels={"kernels": {}})


def gen_mhc_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_mhc_module(backend)
