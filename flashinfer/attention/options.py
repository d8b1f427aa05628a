# SPDX-License-Identifier: Apache-2.0
"""Parse string options (layout, position encoding, dtype, backend) and fill in defaults."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch

from .._runtime.arch import is_sm90a_supported
from .._runtime.checks import canonicalize_torch_dtype
from .._runtime.enums import MaskMode, PosEncodingMode, TensorLayout, get_alibi_slopes
from .._runtime.errors import ArgumentError
from .._runtime.knobs import knobs
from .._runtime.probes import probes
from ..jit.attention.generate import has_hopper_target, hopper_serves
from ..jit.utils import filename_safe_dtype_map
from .streams import made_for_all_streams

__all__ = [
    "ALIBI",
    "CAUSAL",
    "CUSTOM",
    "DECODE_TILE",
    "FP8",
    "MULTI_ITEM",
    "NON_CAUSAL",
    "Dtypes",
    "alibi_slopes",
    "default_scale",
    "fa3_is_faster",
    "fa3_multiplies_fp8",
    "fa3_serves",
    "fa3_serves_mla",
    "has_fa3",
    "layout_code",
    "pos_encoding_code",
    "resolve_backend",
    "resolve_dtypes",
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

NON_CAUSAL, CAUSAL = MaskMode.NON_CAUSAL.value, MaskMode.CAUSAL.value
CUSTOM, MULTI_ITEM = MaskMode.CUSTOM.value, MaskMode.MULTIITEMSCORING.value
ALIBI = PosEncodingMode.ALIBI.value
DECODE_TILE = 16  #: requests of at most as many rows of a KV head are in the decode list (common/backend_interface.h)

_hopper_serves = functools.cache(hopper_serves)
_LAYOUTS = {layout.name: layout.value for layout in TensorLayout}
_POS_ENCODINGS = {mode.name: mode.value for mode in PosEncodingMode}
#: Published backends that the wrappers do not have, and what a caller of each needs instead.
_PEERS = {
    "fa3": "which has kernels for prefill and MLA only",
    "cudnn": "which flashinfer.cudnn offers as functions",
    "trtllm-gen": "which needs SM100",
    "cute-dsl": "which needs SM100",
    "cutlass": "which needs SM100",
    "fmha_v2": "which flashinfer.prefill.trtllm_fmha_v2_prefill offers as a function",
}


def layout_code(op: str, kv_layout: str) -> int:
    code = _LAYOUTS.get(kv_layout) if isinstance(kv_layout, str) else None
    if code is None:
        raise KeyError(f"{op}: kv_layout must be one of {', '.join(_LAYOUTS)}, got {kv_layout!r}")
    return code


def pos_encoding_code(op: str, mode: str) -> int:
    code = _POS_ENCODINGS.get(mode) if isinstance(mode, str) else None
    if code is None:
        raise KeyError(f"{op}: pos_encoding_mode must be one of {', '.join(_POS_ENCODINGS)}, got {mode!r}")
    return code


def resolve_backend(op: str, backend: str, fa3_device: Optional[torch.device] = None) -> str:
    """Return the backend that serves the call. ``fa2`` is the portable algorithm, for GPU and CPU.

    ``fa3_device`` is the device of a prefill call, for which there is a kernel for Hopper.
    """
    if backend in ("auto", "fa2"):
        return "fa2"
    if backend == "fa3" and fa3_device is not None:
        if fa3_device.type == "cpu" and knobs.cpu_backends == "any":
            return "fa2"
        if fa3_device.type != "cuda" or not is_sm90a_supported(fa3_device):
            raise NotImplementedError(
                f"{op}: backend must be fa2 on {fa3_device} (fa3 needs an SM90 GPU), got 'fa3'; usable: fa2"
            )
        return "fa3"
    if isinstance(backend, str) and backend in _PEERS:
        raise NotImplementedError(f"{op}: backend must be fa2 here, got {backend!r}, {_PEERS[backend]}; usable: fa2")
    usable = "'auto' or 'fa2'" if fa3_device is None else "'auto', 'fa2' or 'fa3'"
    raise ArgumentError(f"{op}: backend must be {usable}, got {backend!r}")


@functools.cache
def _is_hopper(device: torch.device, probe: Callable[..., bool], _capability: Callable[..., Any]) -> bool:
    return device.type == "cuda" and probe(device)


def has_fa3(device: torch.device) -> bool:
    """Tell whether the Hopper kernels can run on a device: an SM90 GPU, and modules are compiled for 9.0a.

    Probes of ``utils`` are looked up at each call because engines replace them, and the targets are read at each call
    because ``FLASHINFER_CUDA_ARCH_LIST`` may change during a process.
    """
    return _is_hopper(device, probes.is_sm90a_supported, probes.get_compute_capability) and has_hopper_target()


def fa3_serves(
    device: torch.device,
    q: torch.dtype,
    kv: torch.dtype,
    o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding: int,
) -> bool:
    """Tell whether the Hopper prefill kernels serve a call: 16-bit or e4m3 q on an SM90 GPU, keys used as stored."""
    return _hopper_serves((q, kv, o), head_dim_qk, head_dim_vo, pos_encoding) and has_fa3(device)


def fa3_serves_mla(device: torch.device, q: torch.dtype, kv: torch.dtype, head_dim_ckv: int, head_dim_kpe: int) -> bool:
    """Tell whether the Hopper kernels serve MLA on a device: types and head dimensions of DeepSeek's models, SM90."""
    return mla_fits_fa3(q, kv, head_dim_ckv, head_dim_kpe) and has_fa3(device)


def mla_fits_fa3(q: torch.dtype, kv: torch.dtype, head_dim_ckv: int, head_dim_kpe: int) -> bool:
    """Tell whether the Hopper kernels of MLA have these types and head dimensions."""
    has_types = (kv == q and q in (torch.float16, torch.bfloat16)) or (q, kv) == (torch.bfloat16, torch.float8_e4m3fn)
    return has_types and head_dim_ckv == 512 and head_dim_kpe in (0, 64)


def fa3_is_faster(rows: int, batch_size: int, mask_mode: int) -> bool:
    """Tell whether the Hopper kernels are faster than ``fa2``, which has smaller tiles and skips masked ones (H200).

    ``rows`` counts the query heads of a KV head: tiles of 128 rows must be full on average.
    """
    return mask_mode in (NON_CAUSAL, CAUSAL) and rows >= 128 * batch_size


def fa3_multiplies_fp8(
    q: torch.dtype, kv: torch.dtype, o: torch.dtype, head_dim_qk: int, head_dim_vo: int, pos_encoding: int
) -> bool:
    """Tell whether the Hopper prefill kernels take 8-bit queries as they are; others are converted to 16 bits."""
    return q in FP8 and hopper_serves((q, kv, o), head_dim_qk, head_dim_vo, pos_encoding)


def default_scale(op: str, sm_scale: Optional[float], head_dim: int) -> float:
    try:
        return 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    except ZeroDivisionError:
        raise ArgumentError(f"{op}: q must have a head dimension of at least 1, got 0") from None


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a plan. ``compute`` is the query dtype of the module: 16 bits, unless its kernel multiplies 8 bits."""

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
        raise ArgumentError(f"{op}: {name} must be a dtype with kernels, got {found}")
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
        raise ArgumentError(f"{op}: o_data_type must be a 16-bit type (no backend here writes 8-bit outputs), got {o}")
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
