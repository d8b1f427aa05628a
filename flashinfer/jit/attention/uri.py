# SPDX-License-Identifier: Apache-2.0
"""Names of the built-in attention modules.

Sliding windows and the precision of the accumulator do not change the compiled kernels, so modules that differ only in
these options share one name.
"""

from __future__ import annotations

import torch

from ..utils import filename_safe_dtype_map as _short

__all__ = [
    "get_batch_attention_uri",
    "get_batch_decode_mla_uri",
    "get_batch_decode_uri",
    "get_batch_mla_uri",
    "get_batch_fused_uri",
    "get_batch_prefill_uri",
    "get_pod_uri",
    "get_single_decode_uri",
    "get_single_prefill_uri",
]


def _dtypes(dtype_q: torch.dtype, dtype_kv: torch.dtype, dtype_o: torch.dtype) -> str:
    return f"dtype_q_{_short[dtype_q]}_dtype_kv_{_short[dtype_kv]}_dtype_o_{_short[dtype_o]}"


def _variant(head_dim_qk: int, head_dim_vo: int, pos_encoding_mode: int, use_logits_soft_cap: bool) -> str:
    return (
        f"head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}_posenc_{int(pos_encoding_mode)}"
        f"_use_logits_cap_{bool(use_logits_soft_cap)}"
    )


def get_single_decode_uri(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> str:
    variant = _variant(head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    return f"single_decode_with_kv_cache_{_dtypes(dtype_q, dtype_kv, dtype_o)}_{variant}"


def get_batch_decode_uri(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> str:
    variant = _variant(head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    dtypes = f"{_dtypes(dtype_q, dtype_kv, dtype_o)}_dtype_idx_{_short[dtype_idx]}"
    return f"batch_decode_with_kv_cache_{dtypes}_{variant}"


def get_single_prefill_uri(
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
) -> str:
    variant = _variant(head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    return f"single_prefill_with_kv_cache_{_dtypes(dtype_q, dtype_kv, dtype_o)}_{variant}{_suffix(backend)}"


def get_batch_prefill_uri(
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
) -> str:
    variant = _variant(head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    dtypes = f"{_dtypes(dtype_q, dtype_kv, dtype_o)}_dtype_idx_{_short[dtype_idx]}"
    return f"batch_prefill_with_kv_cache_{dtypes}_{variant}{_suffix(backend)}"


def get_batch_fused_uri(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
) -> str:
    variant = _variant(head_dim_qk, head_dim_vo, pos_encoding_mode, use_logits_soft_cap)
    return f"batch_fused_{_dtypes(dtype_q, dtype_kv, dtype_o)}_dtype_idx_{_short[dtype_idx]}_{variant}"


def get_batch_attention_uri(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
    use_profiler: bool,
) -> str:
    """Return the name of the module for mixed batches, which is the batch prefill module."""
    dtypes = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    return get_batch_prefill_uri(
        "fa2", *dtypes, head_dim_qk, head_dim_vo, pos_encoding_mode, False, use_logits_soft_cap, False
    )


def get_pod_uri(
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
) -> str:
    """Return the name of the module for POD, which is the batch prefill module."""
    dtypes = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    return get_batch_prefill_uri(
        "fa2", *dtypes, head_dim, head_dim, pos_encoding_mode_p, False, use_logits_soft_cap_p, use_fp16_qk_reduction
    )


def get_batch_mla_uri(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> str:
    dtypes = f"{_dtypes(dtype_q, dtype_kv, dtype_o)}_dtype_idx_{_short[dtype_idx]}"
    return f"batch_mla_attention_{dtypes}_head_dim_ckv_{head_dim_ckv}_head_dim_kpe_{head_dim_kpe}{_suffix(backend)}"


def get_batch_decode_mla_uri(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    arc: str,
) -> str:
    """Return the name of the module for the older MLA decoding, which is the MLA module."""
    return get_batch_mla_uri("fa2", dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv, head_dim_ckv // 8, False)


def _suffix(backend: str) -> str:
    return "" if backend == "fa2" else f"_{backend}"
