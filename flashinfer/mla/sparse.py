# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: each query token attends to the cached rows that its list of indices names."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Optional, Union

import torch

from .._runtime.allocation import new_empty
from .._runtime.arch import AMPERE_ON, CPU, get_device_sm_count
from .._runtime.dispatch import use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.requirements import backend_requirement, supported_compute_capability
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.sparse_mla import gen_sparse_mla_module
from ..trace.templates.sparse_mla import sparse_mla_trace

__all__ = ["get_sparse_mla_module", "sparse_mla"]

OP = "sparse_mla"
VALUE_COLUMNS = 512
PACKED_BYTES = 656  #: bytes of a row with scales: 512 e4m3, four float32, 64 bfloat16
_FP8, _BYTES = torch.float8_e4m3fn, torch.uint8
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE_HEADS, _LEAST_KEYS, _MOST_SPLITS = 16, 128, 32

get_sparse_mla_module = module_cache(gen_sparse_mla_module)
_Function = dict[tuple[bool, torch.dtype, torch.dtype, int], Any]
_functions: _Function = {}


def _native(q: torch.Tensor, kv_cache: torch.Tensor) -> Any:
    key = (q.is_cuda, q.dtype, kv_cache.dtype, q.shape[2])
    function = _functions.get(key)
    if function is None:
        if q.is_cuda:
            module = get_sparse_mla_module("cuda", q.dtype, kv_cache.dtype, q.shape[2] != VALUE_COLUMNS)
        else:
            module = get_sparse_mla_module("cpu")
        function = _functions[key] = module.run
    return function


def _refuse(name: str, must: str, got: Any) -> None:
    raise ArgumentError(f"{OP}: {name} must {must}, got {got}")


@supported_compute_capability([CPU, *AMPERE_ON])
def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    lengths: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    kv_scale: Optional[float] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    return_lse_base_on_e: bool = False,
    enable_pdl: Optional[bool] = None,
) -> bool:
    """Check what chooses a module or makes a result; the launcher checks shapes, strides and devices."""
    if q.ndim != 3:
        _refuse("q", "have 3 dimensions (tokens, heads, columns)", q.ndim)
    if q.dtype not in _DTYPES or (q.is_cuda and q.dtype is torch.float32):
        _refuse("q", "be bfloat16 or float16 (on the CPU also float32)", q.dtype)
    if kv_cache.dtype not in (q.dtype, _FP8, _BYTES):
        kinds = f"be {q.dtype} (as q), float8_e4m3fn or uint8 (rows of {PACKED_BYTES} bytes)"
        _refuse("kv_cache", kinds, kv_cache.dtype)
    if kv_cache.dtype is not q.dtype and q.dtype is not torch.bfloat16:
        _refuse("q", f"be bfloat16 (the cache is {kv_cache.dtype})", q.dtype)
    if indices.ndim != 2:
        _refuse("indices", "have 2 dimensions (tokens, top_k)", indices.ndim)
    if not isinstance(sm_scale, Real) or not math.isfinite(sm_scale):
        _refuse("sm_scale", "be a finite number", repr(sm_scale))
    if (kv_scale is not None) != (kv_cache.dtype is _FP8):
        other = "be None (the cache has no such scale)"
        _refuse("kv_scale", "be a number (the cache is float8_e4m3fn)" if kv_scale is None else other, repr(kv_scale))
    if kv_scale is not None and (not isinstance(kv_scale, Real) or not math.isfinite(kv_scale) or kv_scale <= 0):
        _refuse("kv_scale", "be a finite number above 0", repr(kv_scale))
    return True


def _splits(q: torch.Tensor, top_k: int) -> int:
    """Return the parts of a list of indices that blocks of their own take, so that few tokens fill the GPU too."""
    if not q.is_cuda or q.shape[0] == 0 or q.shape[1] == 0:
        return 1
    blocks = q.shape[0] * -(-q.shape[1] // _TILE_HEADS)
    return max(1, min(2 * get_device_sm_count(q.device) // blocks, top_k // _LEAST_KEYS, _MOST_SPLITS))


@register_custom_op("flashinfer::sparse_mla", mutates_args=("out", "lse"))
@called(OP)
def _sparse_mla(
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    sm_scale: float,
    kv_scale: float,
    return_lse_base_on_e: bool,
    enable_pdl: bool,
) -> None:
    splits, partials = _splits(q, indices.shape[1]), None
    if splits > 1:
        partials = new_empty(q, torch.float32, splits * q.shape[0] * q.shape[1] * (VALUE_COLUMNS + 1))
    _native(q, kv_cache)(
        out, lse, partials, q, kv_cache, indices, lengths, sinks, splits, sm_scale, kv_scale, return_lse_base_on_e,
        enable_pdl,
    )  # fmt: skip


@flashinfer_api(trace=sparse_mla_trace)
@backend_requirement(backend_checks={}, common_check=_check)
def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    lengths: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    kv_scale: Optional[float] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    return_lse_base_on_e: bool = False,
    enable_pdl: Optional[bool] = None,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    r"""Attend to selected rows of a latent cache, in decode and in prefill: nothing is planned.

    ``out[t, h] = sum_j softmax_j(sm_scale * (q[t, h] . k[j])) k[j][:512]`` over ``j`` in ``indices[t, :lengths[t]]``.
    Causal masks are the caller's: a token attends to what its list names, an index that occurs twice counts twice.

    Parameters
    ----------
    q : torch.Tensor
        ``(tokens, heads, 576)``, or 512 columns without rotary ones; bfloat16 or float16, on the CPU also float32. Any
        strides but the last.
    kv_cache : torch.Tensor
        ``(pages, page_size, columns)``, rows at multiples of 16 bytes: the dtype of ``q`` or float8_e4m3fn with the
        columns of ``q``, or uint8 with 656 columns. A row of 656 bytes has 512 e4m3 numbers, four float32 scales of
        128 of them each, and 64 bfloat16 rotary columns. Caches of 8 bits go with bfloat16 queries.
    indices : torch.Tensor
        ``(tokens, top_k)`` int32: ``page * page_size + slot`` of each row, in any order; -1, anywhere, names none.
        Other indices out of range are an error on the CPU; on CUDA they name none.
    sm_scale : float
        Scale of the logits.
    lengths : Optional[torch.Tensor]
        ``(tokens,)`` int32: how many indices of each token count, 0 allowed; default: all.
    sinks : Optional[torch.Tensor]
        ``(heads,)`` float32: one more logit of each head, which has no value; already scaled. The LSE contains it.
    kv_scale : Optional[float]
        Scale of a float8_e4m3fn cache: value = stored * scale. None for other caches.
    out, lse : Optional[torch.Tensor]
        Contiguous buffers of the results.
    return_lse : bool
        Whether to return the LSE too.
    return_lse_base_on_e : bool
        Natural logarithms instead of base 2 in the LSE.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None enables it where the device supports it.

    Returns
    -------
    out : torch.Tensor
        ``(tokens, heads, 512)``, dtype of ``q``. Zeros where a token has no keys.
    lse : torch.Tensor
        ``(tokens, heads)`` float32, with ``return_lse``; -inf where a token has neither keys nor sinks.

    Examples
    --------
    >>> q, cache = torch.randn(2, 16, 576).bfloat16(), torch.randn(4, 64, 576).bfloat16()
    >>> indices = torch.tensor([[3, 200, -1], [7, 7, 255]], dtype=torch.int32)
    >>> flashinfer.mla.sparse_mla(q, cache, indices, 192**-0.5).shape
    torch.Size([2, 16, 512])
    """
    if out is None:
        out = new_empty(q, q.dtype, q.shape[0], q.shape[1], VALUE_COLUMNS)
    if lse is None and return_lse:
        lse = new_empty(q, torch.float32, q.shape[0], q.shape[1])
    scale = 1.0 if kv_scale is None else float(kv_scale)
    _sparse_mla(
        out, lse, q, kv_cache, indices, lengths, sinks, float(sm_scale), scale, return_lse_base_on_e,
        use_pdl(q, enable_pdl),
    )  # fmt: skip
    if not return_lse:
        return out
    assert lse is not None
    return out, lse
