# SPDX-License-Identifier: Apache-2.0
"""The modules of the sampling family: draws and softmax, and rows that are renormalised or masked."""

from __future__ import annotations

from typing import Any, Iterator, Optional

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_sampling_module", "gen_sampling_modules", "gen_sampling_rows_module"]


#: Forms of the top-k and top-p kernel that are separate units: threads of a block, and whether rows may be long.
_TOP_FORMS = {"wide": "WIDE_THREADS, true", "long": "TOP_THREADS, true"}


def _unit(header: str, *instances: str, elsewhere: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Return a unit: a header and the instances compiled here; ``elsewhere`` is the unit with the other instances."""
    return {"header": header, "instances": instances, "elsewhere": elsewhere}


def _units() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kernel units of draws and softmax, each small enough to compile in a few seconds."""
    for header in ("sample_unfiltered", "sample_many_per_row", "softmax", "speculative"):
        yield header, _unit(header)
    forms = {
        form: f"sampling::LaunchTopKTopP<sampling::{arguments}>(const SampleParams&, int, Stream)"
        for form, arguments in _TOP_FORMS.items()
    }
    yield "top", _unit("sample_top_k_top_p", elsewhere=_unit("sample_one_pass", *forms.values()))
    for form, instance in forms.items():
        yield f"top_{form}", _unit("sample_one_pass", instance)


def _row_units() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kernel units of filtered rows."""
    pairs = _unit("filter_rows_launch", "sampling::LaunchCtaPairs<float>(const RowParams<float>&, Stream)")
    yield "pairs", pairs
    for dtype in ("float", "float16_t", "bfloat16_t"):
        for function in ("RenormRows", "MaskRows"):
            instance = f"{function}<{dtype}>(const RowParams<{dtype}>&, Stream)"
            yield f"{function}_{dtype}", _unit("filter_rows_launch", instance, elsewhere=pairs)


def gen_sampling_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of draws, softmax and the verification of drafts."""
    return stage("sampling", backend=backend, kernels=dict(_units()))


def gen_sampling_rows_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of rows that are renormalised or masked.

    It is separate because draws filter by themselves: most servers never need its kernels, half of the family's.
    """
    return stage("sampling_rows", backend=backend, template="sampling", kernels=dict(_row_units()))


def gen_sampling_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_sampling_module(backend)
    yield gen_sampling_rows_module(backend)
