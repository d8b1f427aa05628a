# SPDX-License-Identifier: Apache-2.0
"""The modules of the scale family: one per element type, as the add-a-kernel tutorial has it."""

from __future__ import annotations

from typing import Iterator

from .._runtime.errors import ArgumentError
from .codegen import stage
from .core import JitSpec

__all__ = ["gen_scale_module", "gen_scale_modules", "get_scale_uri"]

_TYPES = {"float16": "flashinfer::float16_t", "bfloat16": "flashinfer::bfloat16_t", "float32": "float"}


def get_scale_uri(dtype_in: str, dtype_out: str) -> str:
    return f"scale_dtype_in_{dtype_in}_dtype_out_{dtype_out}"


def gen_scale_module(dtype_in: str, dtype_out: str) -> JitSpec:
    """``dtype_in`` and ``dtype_out`` are torch's names without the prefix, such as "float16"; they must be equal."""
    if dtype_in not in _TYPES or dtype_in != dtype_out:
        raise ArgumentError(f"scale: dtypes must be one of {', '.join(_TYPES)}, twice, got {dtype_in} -> {dtype_out}")
    return stage(
        "scale",
        backend="cuda",
        name=get_scale_uri(dtype_in, dtype_out),
        kernels={"kernel": {"dtype": _TYPES[dtype_in]}},
        config={"dtype": _TYPES[dtype_in], "dl_dtype": f"dl_{dtype_in}"},
    )


def gen_scale_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Return the modules that AOT pre-builds and a warm-up of the family loads."""
    for dtype in _TYPES if backend == "cuda" else ():
        yield gen_scale_module(dtype, dtype)
