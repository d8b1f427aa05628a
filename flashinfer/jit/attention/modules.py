# SPDX-License-Identifier: Apache-2.0
"""Generators of the built-in attention modules. ``device`` is "cuda" or "cpu"; None takes CUDA if there is a target."""

from __future__ import annotations

from typing import Any, Iterator, Optional

import torch

from ...errors import ArgumentError, BackendSupportedError
from .. import env as jit_env  # noqa: F401, published code patches jit_env here
from ..core import JitSpec, current_compilation_context
from .generate import AttentionModule, resolve_device
from .shared_memory import Heads, prefill_bytes, shared_limit
from .uri import (
    get_batch_decode_uri,
    get_batch_fused_uri,
    get_batch_mla_uri,
    get_batch_prefill_uri,
    get_single_decode_uri,
    get_single_prefill_uri,
)
from .variants import DECODE, NVFP4_TENSORS, PREFILL, VariantParams, default_variant_name

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

#: Generators that published code looks for in this module; they are defined in customize.py, which imports this one.
_CUSTOMIZE = "gen_customize_"
_ALIBI = 2  # PosEncodingMode
_LATENT_HEADS, _PREFILL_TILE = Heads(576, 512, 2, 2, 4, True), 64  # of MLA


def check_backend(op: str, backend: str) -> None:
    """Check that ``backend`` is ``"fa2"``; generators do not accept ``"auto"``."""
    if backend == "fa3":
        raise BackendSupportedError(f"{op}: backend 'fa3' is not available; usable here: fa2")
    if backend != "fa2":
        raise ArgumentError(f"{op}: backend is {backend!r}, expected 'fa2'")


def _params(params: VariantParams, dtype_kv: torch.dtype) -> VariantParams:
    extra = NVFP4_TENSORS if dtype_kv == torch.uint8 else ()
    return VariantParams((*params.tensors, *extra), params.scalars)


def _decode_name(pos_encoding_mode: int, use_logits_soft_cap: bool) -> str:
    return default_variant_name("false", use_logits_soft_cap, pos_encoding_mode == _ALIBI)


def _prefill_name(pos_encoding_mode: int, use_logits_soft_cap: bool) -> str:
    return default_variant_name("use_custom_mask", use_logits_soft_cap, pos_encoding_mode == _ALIBI)


def gen_single_decode_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for decode: one query token of one request."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    return AttentionModule(
        "single_decode",
        get_single_decode_uri(*dtypes, *dims, pos_encoding_mode, use_sliding_window, use_logits_soft_cap),
        *dtypes,
        *dims,
        params=_params(DECODE, dtype_kv),
        variant_name=_decode_name(pos_encoding_mode, use_logits_soft_cap),
        pos_encoding_mode=int(pos_encoding_mode),
        device=resolve_device(device),
    ).spec()


def gen_batch_decode_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for batch decode: a few query tokens of each request over a paged cache."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    return AttentionModule(
        "batch_decode",
        get_batch_decode_uri(*dtypes, dtype_idx, *dims, pos_encoding_mode, use_sliding_window, use_logits_soft_cap),
        *dtypes,
        *dims,
        params=_params(DECODE, dtype_kv),
        variant_name=_decode_name(pos_encoding_mode, use_logits_soft_cap),
        idtype=dtype_idx,
        pos_encoding_mode=int(pos_encoding_mode),
        device=resolve_device(device),
    ).spec()


def gen_single_prefill_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_fp16_qk_reduction: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for prefill: many query tokens of one request."""
    check_backend("gen_single_prefill_module", backend)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    flags: tuple[Any, ...] = (pos_encoding_mode, use_sliding_window, use_logits_soft_cap, use_fp16_qk_reduction)
    return AttentionModule(
        "single_prefill",
        get_single_prefill_uri(backend, *dtypes, *dims, *flags),
        *dtypes,
        *dims,
        params=_params(PREFILL, dtype_kv),
        variant_name=_prefill_name(pos_encoding_mode, use_logits_soft_cap),
        pos_encoding_mode=int(pos_encoding_mode),
        device=resolve_device(device),
    ).spec()


def gen_batch_prefill_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_fp16_qk_reduction: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for batch prefill: any number of query tokens of each request, over paged or ragged keys."""
    check_backend("gen_batch_prefill_module", backend)
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    flags: tuple[Any, ...] = (pos_encoding_mode, use_sliding_window, use_logits_soft_cap, use_fp16_qk_reduction)
    return AttentionModule(
        "batch_prefill",
        get_batch_prefill_uri(backend, *dtypes, dtype_idx, *dims, *flags),
        *dtypes,
        *dims,
        params=_params(PREFILL, dtype_kv),
        variant_name=_prefill_name(pos_encoding_mode, use_logits_soft_cap),
        idtype=dtype_idx,
        pos_encoding_mode=int(pos_encoding_mode),
        device=resolve_device(device),
    ).spec()


def gen_batch_fused_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
) -> JitSpec:
    """Generate the module for two cascade levels in one launch: shared keys and keys of each request. CUDA only."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    return AttentionModule(
        "batch_fused",
        get_batch_fused_uri(*dtypes, dtype_idx, *dims, pos_encoding_mode, use_logits_soft_cap),
        *dtypes,
        *dims,
        params=PREFILL,
        variant_name=_prefill_name(pos_encoding_mode, use_logits_soft_cap),
        idtype=dtype_idx,
        pos_encoding_mode=int(pos_encoding_mode),
        device="cuda",
    ).spec()


def gen_batch_mla_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for MLA over a paged cache."""
    check_backend("gen_batch_mla_module", backend)
    dtypes = (dtype_q, dtype_kv, dtype_o)
    return AttentionModule(
        "batch_mla",
        get_batch_mla_uri(backend, *dtypes, dtype_idx, head_dim_ckv, head_dim_kpe, use_profiler),
        *dtypes,
        head_dim_qk=head_dim_ckv + head_dim_kpe,
        head_dim_vo=head_dim_ckv,
        params=VariantParams(scalars=(("sm_scale", "double"),)),
        variant_name=default_variant_name("false", False, False),
        idtype=dtype_idx,
        head_dim_pe=head_dim_kpe,
        device=resolve_device(device),
    ).spec()


# ------------------------------------------------------------------------------------------------ names of other APIs


def gen_batch_attention_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
    use_profiler: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for mixed batches, which is the batch prefill module."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    return gen_batch_prefill_module(
        "fa2", *dtypes, *dims, pos_encoding_mode, False, use_logits_soft_cap, False, device=device
    )


def gen_pod_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim: int,
    pos_encoding_mode_p: int,
    use_sliding_window_p: bool,
    use_logits_soft_cap_p: bool,
    use_fp16_qk_reduction: bool,
    dtype_idx: torch.dtype,
    pos_encoding_mode_d: int,
    use_sliding_window_d: bool,
    use_logits_soft_cap_d: bool,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module for POD (prefill together with decoding), which is the batch prefill module."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim, head_dim)
    flags = (use_sliding_window_p, use_logits_soft_cap_p, use_fp16_qk_reduction)
    return gen_batch_prefill_module("fa2", *dtypes, *dims, pos_encoding_mode_p, *flags, device=device)


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
    dtypes = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    return gen_batch_mla_module("fa2", *dtypes, head_dim, head_dim // 8, False, device=device)


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
        dtypes = (dtype, dtype, dtype)
        yield gen_single_prefill_module("fa2", *dtypes, 128, 128, 0, False, False, False, device=backend)
        yield gen_batch_prefill_module("fa2", *dtypes, torch.int32, 128, 128, 0, False, False, False, device=backend)
        if backend == "cuda":
            yield gen_batch_fused_module(*dtypes, torch.int32, 128, 128, 0, False)


def gen_mla_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Generate the MLA modules that AOT pre-builds and a warm-up loads; none for targets with too little shared memory.

    The call raises an error there.
    """
    targets = current_compilation_context.TARGET_CUDA_ARCHS if backend == "cuda" else ()
    if targets and prefill_bytes(_LATENT_HEADS, _PREFILL_TILE) > shared_limit(targets):
        return
    for dtype in _DTYPES:
        yield gen_batch_mla_module("fa2", dtype, dtype, dtype, torch.int32, 512, 64, False, device=backend)


def __getattr__(name: str) -> Any:
    if name.startswith(_CUSTOMIZE):
        from . import customize

        return getattr(customize, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
