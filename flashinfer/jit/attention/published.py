# SPDX-License-Identifier: Apache-2.0
"""Published parameters of the built-in attention modules: the key that each list of them names, once.

``uri.py`` makes the functions that return names of modules of these, ``modules.py`` the generators.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Optional, ParamSpec, TypeVar

import torch

from ..core import JitSpec
from .key import AttentionKey

__all__ = [
    "batch_attention",
    "batch_decode",
    "batch_fused",
    "batch_mla",
    "batch_prefill",
    "generator_of",
    "pod",
    "single_decode",
    "single_prefill",
    "uri_of",
]

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


def single_decode(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> AttentionKey:
    """decode: one query token of one request."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, torch.int32), (head_dim_qk, head_dim_vo)
    return AttentionKey("single_decode", *dtypes, *dims, pos_encoding_mode, use_logits_soft_cap)


def batch_decode(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> AttentionKey:
    """batch decode: a few query tokens of each request over a paged cache."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    return AttentionKey("batch_decode", *dtypes, *dims, pos_encoding_mode, use_logits_soft_cap)


def single_prefill(
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
) -> AttentionKey:
    """prefill: many query tokens of one request."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, torch.int32), (head_dim_qk, head_dim_vo)
    return AttentionKey("single_prefill", *dtypes, *dims, pos_encoding_mode, use_logits_soft_cap, backend=backend)


def batch_prefill(
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
) -> AttentionKey:
    """batch prefill: any number of query tokens of each request, over paged or ragged keys."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    return AttentionKey("batch_prefill", *dtypes, *dims, pos_encoding_mode, use_logits_soft_cap, backend=backend)


def batch_fused(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
) -> AttentionKey:
    """two cascade levels in one launch: shared keys and keys of each request. CUDA only."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    return AttentionKey("batch_fused", *dtypes, *dims, pos_encoding_mode, use_logits_soft_cap)


def batch_mla(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> AttentionKey:
    """MLA over a paged cache. ``"fa3"``: for SM90, 512 and 0 or 64 columns."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_ckv, head_dim_ckv)
    return AttentionKey("batch_mla", *dtypes, *dims, head_dim_kpe=head_dim_kpe, backend=backend)


def batch_attention(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
    use_profiler: bool,
) -> AttentionKey:
    """mixed batches, which is the batch prefill module."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    return AttentionKey("batch_prefill", *dtypes, *dims, pos_encoding_mode, use_logits_soft_cap)


def pod(
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
) -> AttentionKey:
    """POD (prefill together with decoding), which is the batch prefill module."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim, head_dim)
    return AttentionKey("batch_prefill", *dtypes, *dims, pos_encoding_mode_p, use_logits_soft_cap_p)


def _like(key: Callable[..., AttentionKey], made: F, name: str, opening: str, signature: inspect.Signature) -> F:
    """Give a function that is made of a key the name, the text and the parameters that are published."""
    functools.update_wrapper(made, key)
    made.__name__ = made.__qualname__ = name
    made.__doc__ = f"{opening} the module for {key.__doc__}"
    del made.__dict__["__wrapped__"]
    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


def uri_of(key: Callable[P, AttentionKey], module: str) -> Callable[P, str]:
    """Return the published function of a Python module that names the attention module of a key."""

    def get_uri(*args: P.args, **kwargs: P.kwargs) -> str:
        return key(*args, **kwargs).uri

    signature = inspect.signature(key).replace(return_annotation="str")
    made = _like(key, get_uri, f"get_{key.__name__}_uri", "Return the name of", signature)
    made.__module__ = module
    return made


_DEVICE = inspect.Parameter("device", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="Optional[str]")


def generator_of(
    key: Callable[..., AttentionKey], module: str, only_device: Optional[str] = None
) -> Callable[..., JitSpec]:
    """Return the published generator of a Python module; it takes a ``device`` too, unless there is only one."""
    parameters = list(inspect.signature(key).parameters.values())
    signature = inspect.Signature(parameters if only_device else [*parameters, _DEVICE], return_annotation="JitSpec")

    def generate(*args: Any, **kwargs: Any) -> JitSpec:
        arguments = signature.bind(*args, **kwargs).arguments
        device = arguments.pop("device", only_device)
        return key(**arguments).spec(device)

    made = _like(key, generate, f"gen_{key.__name__}_module", "Generate", signature)
    made.__module__ = module
    return made
