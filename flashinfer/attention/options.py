# SPDX-License-Identifier: Apache-2.0
"""Parse string options (layout, position encoding, dtype, backend) and fill in defaults."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Optional, Union

import torch

from ..errors import ArgumentError
from ..jit.utils import filename_safe_dtype_map
from ..layouts import MaskMode, PosEncodingMode, TensorLayout, get_alibi_slopes
from ..tensor_checks import canonicalize_torch_dtype
from .streams import made_for_all_streams

__all__ = [
    "ALIBI",
    "CAUSAL",
    "CUSTOM",
    "FP8",
    "MULTI_ITEM",
    "NON_CAUSAL",
    "Dtypes",
    "alibi_slopes",
    "default_scale",
    "layout_code",
    "pos_encoding_code",
    "resolve_backend",
    "resolve_dtypes",
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

NON_CAUSAL, CAUSAL = MaskMode.NON_CAUSAL.value, MaskMode.CAUSAL.value
CUSTOM, MULTI_ITEM = MaskMode.CUSTOM.value, MaskMode.MULTIITEMSCORING.value
ALIBI = PosEncodingMode.ALIBI.value

_LAYOUTS = {layout.name: layout.value for layout in TensorLayout}
_POS_ENCODINGS = {mode.name: mode.value for mode in PosEncodingMode}
#: Published backends that the wrappers do not have, and what a caller of each needs instead.
_PEERS = {
    "fa3": "which has no kernels here",
    "cudnn": "which flashinfer.cudnn offers as functions",
    "trtllm-gen": "which needs SM100",
    "cute-dsl": "which needs SM100",
    "cutlass": "which needs SM100",
    "fmha_v2": "which flashinfer.prefill.trtllm_fmha_v2_prefill offers as a function",
}


def layout_code(op: str, kv_layout: str) -> int:
    code = _LAYOUTS.get(kv_layout) if isinstance(kv_layout, str) else None
    if code is None:
        raise KeyError(f"{op}: kv_layout is {kv_layout!r}, expected one of {', '.join(_LAYOUTS)}")
    return code


def pos_encoding_code(op: str, mode: str) -> int:
    code = _POS_ENCODINGS.get(mode) if isinstance(mode, str) else None
    if code is None:
        raise KeyError(f"{op}: pos_encoding_mode is {mode!r}, expected one of {', '.join(_POS_ENCODINGS)}")
    return code


def resolve_backend(op: str, backend: str) -> str:
    """Return the backend that serves the call. ``fa2`` is the portable algorithm, for GPU and CPU."""
    if backend in ("auto", "fa2"):
        return "fa2"
    if backend in _PEERS:
        raise NotImplementedError(f"{op}: backend is {backend!r}, {_PEERS[backend]}; usable: fa2")
    raise ArgumentError(f"{op}: backend is {backend!r}, expected 'auto' or 'fa2'")


def default_scale(op: str, sm_scale: Optional[float], head_dim: int) -> float:
    try:
        return 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    except ZeroDivisionError:
        raise ArgumentError(f"{op}: q has a head dimension of 0, expected at least 1") from None


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a plan. ``compute`` is the query dtype of the module: 16 bits even if the caller's q has 8 bits."""

    q: torch.dtype
    kv: torch.dtype
    o: torch.dtype
    compute: torch.dtype


Dtype = Union[torch.dtype, str, None]


def _dtype(op: str, name: str, dtype: Dtype) -> torch.dtype:
    try:
        found = canonicalize_torch_dtype(dtype)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{op}: {name}: {error}") from None
    if found not in filename_safe_dtype_map:
        raise ArgumentError(f"{op}: {name} is {found}, for which there are no kernels")
    return found


@functools.lru_cache(maxsize=256)
def resolve_dtypes(op: str, q: Dtype, kv: Dtype, o: Dtype, data: Dtype = None) -> Dtypes:
    """Fill in missing dtypes: q <- data, kv <- data <- q, o <- q (bfloat16 for 8-bit queries)."""
    q = _dtype(op, "q_data_type", q if q is not None else data)
    kv = _dtype(op, "kv_data_type", kv if kv is not None else data if data is not None else q)
    if o is None:
        o = torch.bfloat16 if q in FP8 else q
    o = _dtype(op, "o_data_type", o)
    if o.itemsize < 2:
        raise ArgumentError(f"{op}: o_data_type is {o}, expected a 16-bit type (no backend here writes 8-bit outputs)")
    return Dtypes(q, kv, o, o if q in FP8 else q)


_slopes: dict[tuple[int, torch.device], torch.Tensor] = {}


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """Return the ALiBi slopes of ``num_heads`` heads, a tensor that all calls share. Any stream may read it."""
    slopes = _slopes.get((num_heads, device))
    if slopes is None:
        slopes, is_ready = made_for_all_streams(lambda: get_alibi_slopes(num_heads, device), device)
        if is_ready:
            _slopes[num_heads, device] = slopes
    return slopes
