# SPDX-License-Identifier: Apache-2.0
"""Attention functions that serving engines import and that need a Blackwell GPU.

The functions are placeholders: each can be imported, and a call raises an error that names the missing GPU.
"""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from ..trace.templates import attention_blackwell as traces
from .unsupported import needs

#: Names that ``flashinfer`` exports; ``flashinfer.decode``, ``prefill``, ``mla``, ``xqa`` and ``msa_ops`` the rest.
__all__ = [
    "nvfp4_attention_sm120_fwd",
    "nvfp4_attention_sm120_quantize_qkv",
    "trtllm_sage_attention_quantize",
    "xqa_mla",
]


_SM100 = "an SM100 or SM103 GPU (Blackwell) and kernels for it, which this package does not have"
_SPARSE = (
    f"{_SM100} (on Hopper, BatchMLAPagedAttentionWrapper with page size 1 and flashinfer.mla.sparse_mla attend to "
    "selected rows)"
)
_SM120 = "an SM120 or SM121 GPU and kernels for it, which this package does not have"


def _names(what: str, *names: str) -> dict[str, Callable[..., NoReturn]]:
    return {name: needs(name, what) for name in names}


def _traced(what: str, module: str, **traced: tuple[Any, str]) -> dict[str, Callable[..., NoReturn]]:
    """Return functions with a trace template and the published parameters, as members of ``module``."""
    return {name: needs(name, what, parameters, trace, module) for name, (trace, parameters) in traced.items()}


_LATENT = (
    "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, "
    "max_seq_len"
)

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
        "trtllm_ragged_attention_deepseek",
        "trtllm_sage_attention_quantize",
    ),
    **_traced(
        _SM100,
        "prefill",
        trtllm_batch_context_with_kv_cache=(
            traces.trtllm_batch_context_trace,
            "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, "
            "batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, "
            "o_sf_vec_size=None, kv_layout='HND', enable_pdl=None, sinks=None, kv_cache_sf=None, "
            "skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None, "
            "return_lse=False, multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None, "
            "backend='trtllm-gen'",
        ),
    ),
    **_names(_SM120, "fmha_v2_prefill_deepseek", "fmha_v2_prefill_sm120", "get_trtllm_fmha_v2_sm120_module"),
}
MLA_NAMES = {
    **_names(
        _SM100,
        "CuteDslMlaDecodeRunner",
        "DSV4HCAMetadata",
        "_get_trtllm_gen_multi_ctas_kv_counter_buffer",
        "TrtllmGenMlaDecodeRunner",
        "_build_mla_decode_tuning_config",
        "_mla_decode_tuning_config",
        "convert_compressed_page_aligned_sparse_indices_to_hca_metadata",
        "get_mla_module",
        "get_prims_ts_batch_decode_mla_workspace_size",
        "get_trtllm_gen_fmha_module",
        "prims_ts_batch_decode_with_kv_cache_mla",
    ),
    **_names(_SPARSE, "batch_decode_sparse_mla_dsv4", "trtllm_batch_decode_sparse_mla_dsv4"),
    **_traced(
        _SPARSE,
        "mla._core",
        trtllm_batch_decode_with_kv_cache_mla=(
            traces.trtllm_batch_decode_mla_trace_dispatch,
            f"{_LATENT}, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, "
            "skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend='auto', is_var_seq=True, "
            "uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl='auto', kv_scale_format='auto', "
            "cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None, "
            "enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None, "
            "return_lse_base=None",
        ),
    ),
    **_traced(
        _SM120,
        "mla._core",
        xqa_batch_decode_with_kv_cache_mla=(
            traces.xqa_batch_decode_mla_trace,
            f"{_LATENT}, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl=None",
        ),
    ),
}
XQA_NAMES = {
    **_names(_SM120, "get_xqa_module_mla"),
    **_traced(
        _SM120,
        "xqa",
        xqa_mla=(
            traces.xqa_mla_trace,
            "q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, page_size, q_scale=1.0, "
            "kv_scale=1.0, sm_count=None, enable_pdl=None",
        ),
    ),
}
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
