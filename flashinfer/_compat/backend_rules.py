# SPDX-License-Identifier: Apache-2.0
"""Rules by which serving engines choose a published attention backend for a call.

The rules describe the published kernels. Our own wrappers resolve ``"auto"`` to a backend that exists in this package.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.enums import PosEncodingMode

__all__ = [
    "check_trtllm_gen_sm107_only_feature",
    "determine_attention_backend",
    "determine_mla_backend",
    "is_cutlass_backend_supported",
    "is_fa3_backend_supported",
    "is_fa3_prefill_head_dim_supported",
]

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
    """Return ``"fa3"`` on Hopper (CUDA 12.3 or later) for calls that FA3 serves, ``"fa2"`` otherwise."""
    from .. import utils  # imported here: serving engines patch is_sm90a_supported in utils

    options = (pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv)
    if not utils.is_sm90a_supported(device) or not is_fa3_backend_supported(*options):
        return "fa2"
    if head_dim_qk is not None and head_dim_vo is not None:
        return "fa3" if is_fa3_prefill_head_dim_supported(head_dim_qk, head_dim_vo) else "fa2"
    return "fa3"


def determine_mla_backend(device: torch.device) -> str:
    """Return ``"fa3"`` on Hopper, ``"fa2"`` otherwise."""
    from .. import utils

    return "fa3" if utils.is_sm90a_supported(device) else "fa2"


def check_trtllm_gen_sm107_only_feature(enabled: Any, feature_name: str, device: torch.device) -> None:
    """Raise an error if an option of compute capability 10.7 is enabled on another device."""
    from .. import utils
    from .._runtime.errors import ArgumentError

    if enabled and (device.type != "cuda" or utils.get_compute_capability(device) != (10, 7)):
        raise ArgumentError(f"{feature_name} is {enabled}, expected None (it needs compute capability 10.7)")
