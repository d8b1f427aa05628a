# SPDX-License-Identifier: Apache-2.0
"""Published generators of the built-in attention modules; parameters are in ``published.py``.

``device`` is "cuda" or "cpu"; None takes CUDA if there is a target.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Iterator, Optional

import torch

from .. import env as jit_env  # noqa: F401, published code patches jit_env here
from ..core import JitSpec, current_compilation_context
from ..sparse_mla import gen_sparse_mla_modules
from . import customize, published
from .generate import has_hopper_target
from .key import AttentionKey
from .key import check_backend as check_backend
from .shared_memory import Heads, prefill_bytes, shared_limit

__all__ = [
    "check_backend",
    "gen_batch_attention_module",
    "gen_batch_decode_mla_module",
    "gen_batch_decode_module",
    "gen_batch_mla_module",
    "gen_batch_fused_module",
    "gen_batch_pod_module",
    "gen_batch_prefill_module",
    "gen_decode_modules",
    "gen_mla_modules",
    "gen_pod_module",
    "gen_prefill_modules",
    "gen_single_decode_module",
    "gen_single_prefill_module",
]

logger = logging.getLogger("flashinfer.jit")

#: Generators that published code looks for in this module; they are defined in customize.py.
_CUSTOMIZE = "gen_customize_"
_MLA_HEADS, _PREFILL_TILE = Heads(576, 512, 2, 2, 4, True), 64


gen_single_decode_module = published.generator_of(published.single_decode, __name__)
gen_batch_decode_module = published.generator_of(published.batch_decode, __name__)
gen_single_prefill_module = published.generator_of(published.single_prefill, __name__)
gen_batch_prefill_module = published.generator_of(published.batch_prefill, __name__)
gen_batch_fused_module = published.generator_of(published.batch_fused, __name__, only_device="cuda")
gen_batch_mla_module = published.generator_of(published.batch_mla, __name__)
gen_batch_attention_module = published.generator_of(published.batch_attention, __name__)
gen_pod_module = published.generator_of(published.pod, __name__)
gen_batch_pod_module = gen_pod_module


def gen_batch_decode_mla_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim: int,
    num_qo_heads: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_tensor_cores: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for the older MLA decoding: the MLA module with ``head_dim_kpe = head_dim // 8``."""
    return AttentionKey(
        "batch_mla", dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim, head_dim, head_dim_kpe=head_dim // 8
    ).spec(device)


# ------------------------------------------------------------------------------------------------ families

_DTYPES = (torch.float16, torch.bfloat16)


def gen_decode_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Generate the decode modules that AOT pre-builds and a warm-up loads."""
    for dtype in _DTYPES:
        yield gen_single_decode_module(dtype, dtype, dtype, 128, 128, 0, False, False, device=backend)
        yield gen_batch_decode_module(dtype, dtype, dtype, torch.int32, 128, 128, 0, False, False, device=backend)


def gen_prefill_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Generate the prefill modules that AOT pre-builds and a warm-up loads."""
    for dtype in _DTYPES:
        dtypes, ids = (dtype, dtype, dtype), torch.int32
        for name in ("fa2", "fa3") if backend == "cuda" and has_hopper_target() else ("fa2",):
            yield gen_single_prefill_module(name, *dtypes, 128, 128, 0, False, False, False, device=backend)
            yield gen_batch_prefill_module(name, *dtypes, ids, 128, 128, 0, False, False, False, device=backend)
        if backend == "cuda":
            yield gen_batch_fused_module(*dtypes, torch.int32, 128, 128, 0, False)


def gen_mla_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Generate the MLA modules that AOT pre-builds and a warm-up loads; none where no target has the shared memory.

    The call raises an error there.
    """
    targets = current_compilation_context.TARGET_CUDA_ARCHS if backend == "cuda" else ()
    if targets and prefill_bytes(_MLA_HEADS, _PREFILL_TILE) > max(map(shared_limit, targets)):
        logger.warning("no MLA module is built: none of the targets has the shared memory that a block of it needs")
        return
    for dtype in _DTYPES:
        yield gen_batch_mla_module("fa2", dtype, dtype, dtype, torch.int32, 512, 64, False, device=backend)
        if backend == "cuda" and has_hopper_target():
            yield gen_batch_mla_module("fa3", dtype, dtype, dtype, torch.int32, 512, 64, False, device=backend)
    if backend == "cuda" and has_hopper_target():  # what engines plan for sparse attention
        bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
        for kv, kpe in ((bf16, 0), (fp8, 0), (fp8, 64)):
            yield gen_batch_mla_module("fa3", bf16, kv, bf16, torch.int32, 512, kpe, False, device=backend)
    yield from gen_sparse_mla_modules(backend)


def _fa2_head_dim_nvcc_flags(head_dim_qk: int, head_dim_vo: int, dtype_kv: torch.dtype) -> list[str]:
    """Return nvcc's flags of the targets whose shared memory holds a tile of prefill; a published name.

    RuntimeError if none of the targets does.
    """
    is_packed = dtype_kv is torch.uint8  # NVFP4, which is expanded to 16 bits in shared memory
    heads = Heads(head_dim_qk, head_dim_vo, 2, 2 if is_packed else dtype_kv.itemsize, 8 if is_packed else 4, False)
    needed = prefill_bytes(heads, _PREFILL_TILE)
    targets = current_compilation_context.TARGET_CUDA_ARCHS
    fitting = sorted(target for target in targets if needed <= shared_limit(target))
    if not fitting:
        raise RuntimeError(
            f"No supported CUDA architectures: head_dim_qk = {head_dim_qk} and head_dim_vo = {head_dim_vo} need "
            f"{needed} bytes of shared memory, got the targets {sorted(targets)}"
        )
    names = [f"{major}{minor}" for major, minor in fitting]
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


def __getattr__(name: str) -> Any:
    if name.startswith(_CUSTOMIZE) or name == "gen_batch_prefill_attention_sink_module":
        return getattr(customize, name)
    if name == "gen_fmha_v2_module":
        return importlib.import_module(".front_doors", __package__).gen_fmha_v2_module
    if name.startswith("get_") and name.endswith("_uri"):
        return getattr(importlib.import_module(".uri", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
