# SPDX-License-Identifier: Apache-2.0
"""The compiled module of the family, and what its functions share on the Python side."""

from __future__ import annotations

from typing import Optional

from ..jit.codegen import module_cache
from ..jit.rope import gen_rope_module

get_rope_module = module_cache(gen_rope_module)


def columns(rotary_dim: Optional[int]) -> int:
    """``rotary_dim`` as the launchers take it: -1 is the whole head."""
    return -1 if rotary_dim is None else rotary_dim
