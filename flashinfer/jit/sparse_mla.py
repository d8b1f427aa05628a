# SPDX-License-Identifier: Apache-2.0
"""Modules of sparse MLA: one for the CPU, and on CUDA one for each type of queries and kind of cache rows."""

from __future__ import annotations

from typing import Iterator

import torch

from .codegen import stage
from .core import JitSpec

__all__ = ["gen_sparse_mla_module", "gen_sparse_mla_modules"]

_TYPES = {
    torch.bfloat16: ("bfloat16_t", "dl_bfloat16"),
    torch.float16: ("float16_t", "dl_float16"),
    torch.float32: ("float", "dl_float32"),
}
#: Kind of the rows of a cache by its dtype; any other dtype is that of the queries. Names of ``sparse_mla::Cache``.
_CACHES = {torch.float8_e4m3fn: "kE4m3", torch.uint8: "kPacked"}

Form = tuple[torch.dtype, torch.dtype, bool]
_BF16 = torch.bfloat16
_ALL: tuple[Form, ...] = (
    *((dtype, dtype, rope) for dtype in _TYPES for rope in (True, False)),
    *((_BF16, torch.float8_e4m3fn, rope) for rope in (True, False)),
    (_BF16, torch.uint8, True),
)


def _values(form: Form) -> tuple[tuple[str, str], str, str]:
    dtype_q, dtype_kv, has_rope = form
    name = "float" if dtype_q is torch.float32 else f"flashinfer::{_TYPES[dtype_q][0]}"
    return (name, _TYPES[dtype_q][1]), _CACHES.get(dtype_kv, "kLikeQuery"), str(has_rope).lower()


def gen_sparse_mla_module(
    backend: str = "cuda",
    dtype_q: torch.dtype = torch.bfloat16,
    dtype_kv: torch.dtype = torch.bfloat16,
    has_rope: bool = True,
) -> JitSpec:
    """Describe the module of one form; that of the CPU has all forms."""
    if backend == "cpu":
        return stage("sparse_mla", backend=backend, kernels={}, config={"forms": [_values(form) for form in _ALL]})
    (dtype, dl_dtype), cache, rope = _values((dtype_q, dtype_kv, has_rope))
    names = [str(dtype).removeprefix("torch.") for dtype in (dtype_q, dtype_kv)]
    return stage(
        "sparse_mla",
        backend=backend,
        name=f"sparse_mla_{names[0]}_{names[1]}_d{576 if has_rope else 512}",
        kernels={"kernels": {"dtype": dtype, "cache": cache, "rope": rope}},
        config={"forms": [((dtype, dl_dtype), cache, rope)]},
    )


def gen_sparse_mla_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    if backend == "cpu":
        yield gen_sparse_mla_module(backend)
        return
    for dtype_kv in (_BF16, torch.float8_e4m3fn, torch.uint8):
        yield gen_sparse_mla_module(backend, _BF16, dtype_kv, True)
