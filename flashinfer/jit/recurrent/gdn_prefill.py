# SPDX-License-Identifier: Apache-2.0
"""The modules of the chunked gated delta rule: for the CPU, for any GPU from SM80 on, and for SM90."""

from __future__ import annotations

from typing import Iterator

from ...compilation_context import sm90a_nvcc_flags
from ..attention.generate import has_hopper_target
from ..codegen import stage
from ..core import JitSpec

__all__ = ["gen_gdn_prefill_module", "gen_gdn_prefill_modules"]

_DTYPES = ("float16_t", "bfloat16_t")

#: Units of the Hopper module for a dtype, which compile side by side: the first kernel with the host's part, and each
#: form of the second.
_SM90_UNITS: dict[str, dict[str, str]] = {
    "first": {},
    "halves": {"shape": "Shape<1>", "scan": "kWhole"},
    "heads": {"shape": "Shape<2>", "scan": "kWhole"},
    "transfer": {"shape": "Shape<2>", "scan": "kTransfer"},
    "parts": {"shape": "Shape<1>", "scan": "kParts"},
}


def gen_gdn_prefill_module(backend: str = "cuda") -> JitSpec:
    """Describe the module for ``backend``: "cpu", "cuda", or "sm90" for the Hopper kernels."""
    is_sm90 = backend == "sm90"
    forms = _SM90_UNITS if is_sm90 else {"portable": {}}
    return stage(
        "gdn_prefill",
        backend="cpu" if backend == "cpu" else "cuda",
        name="gdn_prefill_sm90" if is_sm90 else None,
        kernels={f"{t}_{part}": {"dtype": t, "part": part, **more} for part, more in forms.items() for t in _DTYPES},
        extra_cuda_cflags=sm90a_nvcc_flags if is_sm90 else (),
    )


def gen_gdn_prefill_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_gdn_prefill_module(backend)
    if backend == "cuda" and has_hopper_target():
        yield gen_gdn_prefill_module("sm90")
