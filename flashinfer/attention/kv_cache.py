# SPDX-License-Identifier: Apache-2.0
"""Unpacking of a KV cache into keys, values and NVFP4 scale factors."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError

__all__ = ["PagedCache", "scale_factors", "unpack_paged_cache"]

PagedCache = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

_UINT8 = torch.uint8
_FACTOR_DTYPES = (torch.float8_e4m3fn, _UINT8)
_CODES_PER_FACTOR = 8  # bytes of the cache per scale factor; a byte holds two 4-bit codes


def unpack_paged_cache(
    op: str, cache: PagedCache, layout: int, name: str = "paged_kv_cache"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a paged cache as 4-D views.

    One tensor holds keys at 0 and values at 1 of its second dimension. A cache without the page dimension has pages of
    one token.
    """
    if isinstance(cache, torch.Tensor):
        if cache.ndim == 4:
            cache = cache.unsqueeze(-2 if layout else -3)
        elif cache.ndim != 5:
            raise ArgumentError(f"{op}: {name} must have 5 dimensions (or 4 with pages of one token), got {cache.ndim}")
        if cache.shape[1] != 2:
            raise ArgumentError(f"{op}: {name}.shape[1] must be 2 (keys and values), got {cache.shape[1]}")
        k, v = cache.unbind(1)
        return k, v
    if not isinstance(cache, tuple):
        raise KeyError(f"{op}: {name} must be a tensor or a tuple of two, got a {type(cache).__name__}")
    if len(cache) != 2:
        raise ArgumentError(f"{op}: {name} must have 2 tensors (keys and values), got {len(cache)}")
    k, v = cache
    check_tensors(op, **{f"{name}[0]": k, f"{name}[1]": v})
    if k.ndim == 3 and v.ndim == 3:
        at = -2 if layout else -3
        k, v = k.unsqueeze(at), v.unsqueeze(at)
    elif k.ndim != 4 or v.ndim != 4:
        raise ArgumentError(
            f"{op}: {name} must have 4 dimensions (or 3, pages of one token), got {k.ndim} and {v.ndim}"
        )
    return k, v


def scale_factors(
    op: str, k: torch.Tensor, v: torch.Tensor, kv_cache_sf: Optional[PagedCache], layout: int, paged: bool
) -> tuple[torch.Tensor, ...]:
    """Return the scale factors of an NVFP4 cache as uint8 views, or () for other caches."""
    if k.dtype is not _UINT8:
        return ()
    if kv_cache_sf is None:
        raise ArgumentError(f"{op}: kv_cache_sf must be the scale factors of a uint8 (NVFP4) cache, got None")
    if paged:
        factors = unpack_paged_cache(op, kv_cache_sf, layout, "kv_cache_sf")
    elif isinstance(kv_cache_sf, tuple) and len(kv_cache_sf) == 2:
        factors = kv_cache_sf
    else:
        raise ArgumentError(f"{op}: kv_cache_sf must be a tuple of two tensors, got a {type(kv_cache_sf).__name__}")
    for name, factor, codes in (("keys", factors[0], k), ("values", factors[1], v)):
        shape = (*codes.shape[:-1], codes.shape[-1] // _CODES_PER_FACTOR)
        if factor.shape != shape or factor.dtype not in _FACTOR_DTYPES or factor.device != codes.device:
            raise ArgumentError(
                f"{op}: kv_cache_sf of {name} must be torch.float8_e4m3fn {shape} on {codes.device} (one for 16 "
                f"elements, {_CODES_PER_FACTOR} bytes), got {factor.dtype} {tuple(factor.shape)} on {factor.device}"
            )
        if factor.stride(-1) != 1:
            raise ArgumentError(f"{op}: kv_cache_sf innermost stride must be 1, got {factor.stride(-1)}")
    return tuple(factor.view(_UINT8) for factor in factors)
