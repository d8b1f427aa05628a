# SPDX-License-Identifier: Apache-2.0
"""Published functions that return the names of built-in attention modules; parameters are in ``published.py``."""

from __future__ import annotations

import torch

from . import published
from .key import AttentionKey

__all__ = [
    "get_batch_attention_uri",
    "get_batch_decode_mla_uri",
    "get_batch_decode_uri",
    "get_batch_mla_uri",
    "get_batch_fused_uri",
    "get_batch_prefill_attention_sink_uri",
    "get_batch_prefill_uri",
    "get_pod_uri",
    "get_single_decode_uri",
    "get_single_prefill_uri",
]

get_single_decode_uri = published.uri_of(published.single_decode, __name__)
get_batch_decode_uri = published.uri_of(published.batch_decode, __name__)
get_single_prefill_uri = published.uri_of(published.single_prefill, __name__)
get_batch_prefill_uri = published.uri_of(published.batch_prefill, __name__)
get_batch_fused_uri = published.uri_of(published.batch_fused, __name__)
get_batch_attention_uri = published.uri_of(published.batch_attention, __name__)
get_pod_uri = published.uri_of(published.pod, __name__)
get_batch_mla_uri = published.uri_of(published.batch_mla, __name__)


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
    return AttentionKey(
        "batch_mla", dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv, head_dim_ckv, head_dim_kpe=head_dim_ckv // 8
    ).uri


def get_batch_prefill_attention_sink_uri(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
) -> str:
    dtypes, dims = (dtype_q, dtype_kv, dtype_o, dtype_idx), (head_dim_qk, head_dim_vo)
    name = get_batch_prefill_uri(backend, *dtypes, *dims, pos_encoding_mode, use_sliding_window, False, False)
    return f"{name}_attention_sink"
