# SPDX-License-Identifier: Apache-2.0
"""Rules by which serving engines choose an attention backend for a call.

``determine_*`` tell what ``backend="auto"`` takes here, by the rule of the wrappers. The others describe the published
kernels.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.enums import PosEncodingMode
from .._runtime.errors import ArgumentError
from .._runtime.probes import probes

__all__ = [
    "check_trtllm_gen_sm107_only_feature",
    "determine_attention_backend",
    "determine_mla_backend",
    "is_cutlass_backend_supported",
    "is_fa3_backend_supported",
    "is_fa3_prefill_head_dim_supported",
]

_LONG_PREFILL = 8192  #: rows of a request; its tiles are full
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fa3_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Tell whether FA3 (Hopper) serves a call: no custom mask, no position encoding, FP8 keys only with FP8 queries."""
    if use_custom_mask or use_fp16_qk_reductions or pos_encoding_mode != PosEncodingMode.NONE.value:
        return False
    return dtype_kv != torch.uint8 and not (dtype_kv in _FP8 and dtype_q not in _FP8)


def is_fa3_prefill_head_dim_supported(head_dim_qk: int, head_dim_vo: int) -> bool:
    return (head_dim_qk == head_dim_vo and head_dim_qk in (64, 128, 256)) or (head_dim_qk, head_dim_vo) == (192, 128)


def is_cutlass_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Tell whether CUTLASS (Blackwell) serves a call: the rules of FA3, and no FP8."""
    if dtype_q in _FP8 or dtype_kv in _FP8:
        return False
    return is_fa3_backend_supported(pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv)


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    *,
    head_dim_qk: Optional[int] = None,
    head_dim_vo: Optional[int] = None,
) -> str:
    """Return the backend that ``backend="auto"`` takes for a long prefill, ``"fa2"`` or ``"fa3"``.

    Outputs have the type of the queries, bfloat16 if those have 8 bits; head dimensions that are not given are 128.
    With few rows per request, ``"auto"`` is always ``"fa2"``. ``use_fp16_qk_reductions`` does not matter: kernels here
    sum in float32 anyway.
    """
    from ..attention.options import CUSTOM, FP8, NON_CAUSAL, fa3_is_faster, fa3_serves

    rows, mask_mode = _LONG_PREFILL, CUSTOM if use_custom_mask else NON_CAUSAL
    dims = (head_dim_qk or head_dim_vo or 128, head_dim_vo or head_dim_qk or 128)
    dtype_o = torch.bfloat16 if dtype_q in FP8 else dtype_q
    serves = fa3_serves(torch.device(device), dtype_q, dtype_kv, dtype_o, *dims, pos_encoding_mode)
    return "fa3" if serves and fa3_is_faster(rows, 1, mask_mode) else "fa2"


def determine_mla_backend(device: torch.device) -> str:
    """Return the backend that ``backend="auto"`` takes for a long bfloat16 MLA prefill with DeepSeek's dimensions."""
    from ..attention.options import fa3_serves_mla

    return "fa3" if fa3_serves_mla(torch.device(device), torch.bfloat16, torch.bfloat16, 512, 64) else "fa2"


def check_trtllm_gen_sm107_only_feature(enabled: Any, feature_name: str, device: torch.device) -> None:
    """Raise an error if an option of compute capability 10.7 is enabled on another device."""
    if enabled and (device.type != "cuda" or probes.get_compute_capability(device) != (10, 7)):
        raise ArgumentError(f"{feature_name} must be None (it needs compute capability 10.7), got {enabled}")
