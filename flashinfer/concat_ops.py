# SPDX-License-Identifier: Apache-2.0
"""Concatenation of keys of multi-head latent attention."""

from __future__ import annotations

import torch

from ._runtime.dispatch import backend_of
from ._runtime.errors import BackendSupportedError
from ._runtime.torch_ops import register_custom_op
from .api_logging import flashinfer_api
from .jit.codegen import module_cache
from .jit.concat_ops import gen_concat_mla_module
from .trace.templates.concat_ops import concat_mla_k_trace

__all__ = ["concat_mla_k"]

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
