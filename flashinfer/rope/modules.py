# SPDX-License-Identifier: Apache-2.0
"""Compiled module of the family, and its setting."""

from __future__ import annotations

from .._runtime.knobs import knobs
from ..jit.codegen import module_cache
from ..jit.rope import gen_rope_module

get_rope_module = module_cache(gen_rope_module)

#: True if CUDA calls check the page of each token. Read at import, as in :mod:`flashinfer.page`.
VALIDATE = knobs.validate_inputs
