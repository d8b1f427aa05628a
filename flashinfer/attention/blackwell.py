# SPDX-License-Identifier: Apache-2.0
"""Attention functions that serving engines import and that need a Blackwell GPU.

The functions are placeholders: each can be imported, and a call raises an error that names the missing GPU.
"""

from __future__ import annotations

from typing import Callable, NoReturn

from ..blackwell_only import needs

#: Names that ``flashinfer`` exports; ``flashinfer.decode``, ``prefill``, ``mla``, ``xqa`` and ``msa_ops`` the rest.
__all__ = [
    "nvfp4_attention_sm120_fwd",
    "nvfp4_attention_sm120_quantize_qkv",
    "trtllm_sage_attention_quantize",
    "xqa_mla",
]


_SM100 = "an SM100 or SM103 GPU (Blackwell) and kernels for it, which this package does not have"
_SM120 = "an SM120 or SM121 GPU and kernels for it, which this package does not have"


def _names(what: str, *names: str) -> dict[str, Callable[..., NoReturn]]:
    return {name: needs(name, what) for name in names}


DECODE_NAMES = _names(
    _SM100,
    "TrtllmGenDecodeModule",
    "get_prims_ts_batch_decode_workspace_size",
    "get_trtllm_gen_decode_module",
    "get_trtllm_gen_fmha_module",
    "prims_ts_batch_decode_with_kv_cache",
)
PREFILL_NAMES = {
    **_names(
        _SM100,
        "fmha_varlen",
        "fmha_varlen_plan",
        "get_fmha_module",
        "get_trtllm_gen_fmha_module",
        "get_trtllm_gen_prefill_module",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_ragged_attention_deepseek",
    ),
    **_names(_SM120, "fmha_v2_prefill_deepseek", "fmha_v2_prefill_sm120", "get_trtllm_fmha_v2_sm120_module"),
}
MLA_NAMES = {
    **_names(
        _SM100,
        "CuteDslMlaDecodeRunner",
        "DSV4HCAMetadata",
        "TrtllmGenMlaDecodeRunner",
        "batch_decode_sparse_mla_dsv4",
        "convert_compressed_page_aligned_sparse_indices_to_hca_metadata",
        "get_mla_module",
        "get_prims_ts_batch_decode_mla_workspace_size",
        "get_trtllm_gen_fmha_module",
        "prims_ts_batch_decode_with_kv_cache_mla",
        "trtllm_batch_decode_sparse_mla_dsv4",
        "trtllm_batch_decode_with_kv_cache_mla",
    ),
    **_names(_SM120, "xqa_batch_decode_with_kv_cache_mla"),
}
XQA_NAMES = _names(_SM120, "get_xqa_module_mla", "xqa_mla")
MSA_NAMES = _names(
    _SM120,
    "msa_proxy_score",
    "msa_proxy_score_fp4",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "msa_topk_select",
)
nvfp4_attention_sm120_fwd = needs("nvfp4_attention_sm120_fwd", _SM120)
nvfp4_attention_sm120_quantize_qkv = needs("nvfp4_attention_sm120_quantize_qkv", _SM120)
trtllm_sage_attention_quantize = needs("trtllm_sage_attention_quantize", _SM100)
xqa_mla = XQA_NAMES["xqa_mla"]
