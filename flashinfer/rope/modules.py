# SPDX-License-Identifier: Apache-2.0
"""The compiled module of the family, and what its functions share on the Python side."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..dispatch import backend_of
from ..errors import ArgumentError
from ..jit.codegen import module_cache
from ..jit.rope import gen_rope_module

get_rope_module = module_cache(gen_rope_module)


def module_for(q: torch.Tensor) -> Any:
    """The module that serves a tensor."""
    return get_rope_module(backend_of(q))


def columns(rotary_dim: Optional[int]) -> int:
    """``rotary_dim`` as the launchers take it: -1 is the whole head."""
    return -1 if rotary_dim is None else rotary_dim


def check_table(op: str, cos_sin_cache: torch.Tensor) -> None:
    if cos_sin_cache.dtype != torch.float32:
        raise ArgumentError(f"{op}: cos_sin_cache has dtype {cos_sin_cache.dtype}: cos_sin_cache should be float32")
