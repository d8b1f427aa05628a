# SPDX-License-Identifier: Apache-2.0
"""The module that reads the GPU's clock."""

from __future__ import annotations

from . import env as jit_env
from .core import JitSpec, describe_module

__all__ = ["gen_globaltimer_module"]


def gen_globaltimer_module() -> JitSpec:
    return describe_module("globaltimer", [jit_env.FLASHINFER_CSRC_DIR / "globaltimer.cu"], backend="cuda")
