# SPDX-License-Identifier: Apache-2.0
"""Modules of the recurrent layers: one file per part of the family, each with ``gen_<part>_modules``."""

from __future__ import annotations

from typing import Callable, Iterator

from ..core import JitSpec
from .gdn_prefill import gen_gdn_prefill_module as gen_gdn_prefill_module
from .gdn_prefill import gen_gdn_prefill_modules
from .gdn_step import gen_gdn_step_modules
from .kda_prefill import gen_kda_prefill_modules
from .kda_step import gen_kda_step_modules
from .mamba import gen_mamba_modules

__all__ = ["gen_recurrent_modules"]

#: What each part of the family yields for a backend.
_PARTS: tuple[Callable[[str], Iterator[JitSpec]], ...] = (
    gen_gdn_prefill_modules,
    gen_gdn_step_modules,
    gen_kda_prefill_modules,
    gen_kda_step_modules,
    gen_mamba_modules,
)


def gen_recurrent_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    for part in _PARTS:
        yield from part(backend)
