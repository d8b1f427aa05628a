# SPDX-License-Identifier: Apache-2.0
"""Concatenation of keys of multi-head latent attention."""

from __future__ import annotations

from typing import Optional

import torch

from ._runtime.dispatch import backend_of
from ._runtime.errors import ArgumentError, BackendSupportedError
from ._runtime.explain_error import explain_type_errors
from ._runtime.torch_ops import register_custom_op
from .api_logging import flashinfer_api
from .jit.codegen import module_cache
from .jit.concat_ops import gen_concat_mla_module
from .trace.templates.concat_ops import concat_mla_k_trace, concat_mla_kv_quant_fp8_trace

__all__ = ["concat_mla_k", "concat_mla_kv_quant_fp8"]

get_concat_mla_module = module_cache(gen_concat_mla_module)


@register_custom_op("flashinfer::concat_mla_k", mutates_args=("k",))
def _concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    get_concat_mla_module(backend_of(k)).concat_mla_k(k, k_nope, k_rope)


@flashinfer_api(trace=concat_mla_k_trace)
def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    r"""Write ``k[t, h] = [k_nope[t, h], k_rope[t, 0]]``: the rotary part is the same for every head. Bits are copied.

    Parameters
    ----------
    k : torch.Tensor
        ``(num_tokens, 128, 192)``, written; bfloat16, float16, float8_e4m3fn or float8_e5m2. Here and below the last
        dimension is contiguous, the others have any stride.
    k_nope : torch.Tensor
        ``(num_tokens, 128, 128)``, dtype of ``k``. May be a slice of a wider tensor.
    k_rope : torch.Tensor
        ``(num_tokens, 1, 64)``, dtype of ``k``.
    backend : str
        "default", the only one there is.

    Examples
    --------
    >>> k_nope, k_rope = torch.randn(4, 128, 128).bfloat16(), torch.randn(4, 1, 64).bfloat16()
    >>> flashinfer.concat_ops.concat_mla_k(k := k_nope.new_empty(4, 128, 192), k_nope, k_rope)
    """
    if backend != "default":
        raise BackendSupportedError(f"concat_mla_k does not support backend '{backend}'; usable here: default")
    _concat_mla_k(k, k_nope, k_rope)


_OP = "concat_mla_kv_quant_fp8"
_E4M3, _E4M3_MAX = torch.float8_e4m3fn, 448.0


def _result(name: str, given: Optional[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if given is None:
        return like.new_empty(shape, dtype=_E4M3)
    if tuple(given.shape) != shape or given.dtype != _E4M3 or given.device != like.device:
        raise ArgumentError(
            f"{_OP}: {name} must be {shape} float8_e4m3fn on {like.device}, got {tuple(given.shape)} {given.dtype} on "
            f"{given.device}"
        )
    return given


def _saturated(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)


@flashinfer_api(trace=concat_mla_kv_quant_fp8_trace)
@explain_type_errors
def concat_mla_kv_quant_fp8(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    key: Optional[torch.Tensor] = None,
    value: Optional[torch.Tensor] = None,
    *,
    nope_dim: int = 128,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Round keys and values of multi-head latent attention to e4m3: ``key = [k_nope | k_pe]`` and ``value = v``.

    Values beyond 448 saturate. Rounding is done by torch, on every device.

    Parameters
    ----------
    kv_nope : torch.Tensor
        ``(num_tokens, num_heads, nope_dim + v_dim)``: keys without position, then values, of each head.
    k_pe : torch.Tensor
        ``(num_tokens, rope_dim)`` or ``(num_tokens, 1, rope_dim)``: the rotary part, the same for every head.
    key, value : Optional[torch.Tensor]
        Buffers for the results; any strides.
    nope_dim : int
        Columns of ``kv_nope`` that belong to the key.
    backend : str
        "auto" or "default", which are the same here.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        ``(num_tokens, num_heads, nope_dim + rope_dim)`` and ``(num_tokens, num_heads, v_dim)``, float8_e4m3fn.

    Examples
    --------
    >>> key, value = flashinfer.concat_ops.concat_mla_kv_quant_fp8(torch.ones(2, 4, 256), torch.full((2, 64), 999.0))
    >>> key.shape, value.shape, key[0, 0, -1].item()
    (torch.Size([2, 4, 192]), torch.Size([2, 4, 128]), 448.0)
    """
    if backend not in ("auto", "default"):
        raise BackendSupportedError(f"{_OP} does not support backend '{backend}'; usable here: auto, default")
    if kv_nope.ndim != 3 or not 0 < nope_dim < kv_nope.shape[2] or not kv_nope.is_floating_point():
        raise ArgumentError(
            f"{_OP}: kv_nope must be (num_tokens, num_heads, more than nope_dim = {nope_dim}) floats, got "
            f"{tuple(kv_nope.shape)} {kv_nope.dtype}"
        )
    tokens, heads, _ = kv_nope.shape
    pe = k_pe.squeeze(1) if k_pe.ndim == 3 and k_pe.shape[1] == 1 else k_pe
    if pe.ndim != 2 or pe.shape[0] != tokens or k_pe.dtype != kv_nope.dtype or k_pe.device != kv_nope.device:
        raise ArgumentError(
            f"{_OP}: k_pe must be ({tokens}, rope_dim) or ({tokens}, 1, rope_dim) {kv_nope.dtype} on "
            f"{kv_nope.device}, got {tuple(k_pe.shape)} {k_pe.dtype} on {k_pe.device}"
        )
    key = _result("key", key, (tokens, heads, nope_dim + pe.shape[1]), kv_nope)
    value = _result("value", value, (tokens, heads, kv_nope.shape[2] - nope_dim), kv_nope)
    key[..., :nope_dim].copy_(_saturated(kv_nope[..., :nope_dim]))
    key[..., nope_dim:].copy_(_saturated(pe).unsqueeze(1).expand(tokens, heads, -1))
    value.copy_(_saturated(kv_nope[..., nope_dim:]))
    return key, value
