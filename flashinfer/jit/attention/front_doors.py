# SPDX-License-Identifier: Apache-2.0
"""Variants behind calls with the interfaces of other libraries: draft token masks, chunks, softmax statistics."""

from __future__ import annotations

from typing import Any, Callable, NoReturn, Optional

import torch

from ..._runtime.errors import BackendSupportedError
from ..context import current_compilation_context
from ..core import JitSpec
from .modules import gen_batch_prefill_module

__all__ = [
    "gen_cudnn_fmha_module",
    "gen_fmha_cutlass_sm100a_module",
    "gen_fmha_v2_module",
    "gen_mla_module",
    "gen_nvfp4_attention_sm120_module",
    "gen_trtllm_fmha_v2_sm120_module",
    "gen_trtllm_gen_fmha_module",
]


def gen_fmha_v2_module(
    input_layout: str,
    input_dtype: torch.dtype,
    output_dtype: Optional[torch.dtype] = None,
    device: Optional[str] = None,
) -> JitSpec:
    """Generate the module behind ``trtllm_fmha_v2_prefill`` for a head_dim of 128: batch prefill, for all layouts."""
    dtype = torch.bfloat16 if input_dtype.itemsize == 1 else input_dtype
    types = (dtype, input_dtype, dtype, torch.int32)
    return gen_batch_prefill_module("fa2", *types, 128, 128, 0, False, False, False, device=device)


def gen_mla_module() -> NoReturn:
    """Refuse: the published module holds MLA kernels for SM100 and SM110 (see ``gen_batch_mla_module`` for ours).

    Other targets raise what the compilation context raises: no supported CUDA architectures.
    """
    current_compilation_context.get_nvcc_flags_list(supported_major_versions=[10, 11])
    raise BackendSupportedError("gen_mla_module: there is no such module here (it needs kernels for SM100)")


def _absent(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a placeholder for a generator that published code imports and for which this package has no sources."""

    def generate(*args: Any, **kwargs: Any) -> NoReturn:
        raise BackendSupportedError(f"{name}: there is no such module here ({reason})")

    generate.__name__ = generate.__qualname__ = name
    generate.__doc__ = f"Not available here: {reason}."
    return generate


gen_cudnn_fmha_module = _absent("gen_cudnn_fmha_module", "flashinfer.cudnn uses the package of cuDNN's frontend")
gen_fmha_cutlass_sm100a_module = _absent("gen_fmha_cutlass_sm100a_module", "it needs SM100")
gen_trtllm_gen_fmha_module = _absent("gen_trtllm_gen_fmha_module", "it needs SM100")
gen_trtllm_fmha_v2_sm120_module = _absent("gen_trtllm_fmha_v2_sm120_module", "it needs SM120")
gen_nvfp4_attention_sm120_module = _absent("gen_nvfp4_attention_sm120_module", "it needs SM120")

_HEAD = r"""
  static constexpr bool use_softmax = true;

  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
"""

_LENGTHS = r"""
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? uint32_t(params.window_left) : kv_len;
"""

_SINK = r"""
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    if (kv_tile_idx == 0 && params.maybe_sink != nullptr) {
      const float sink = params.maybe_sink[qo_head_idx] * math::log2e;
      if (sink != -math::inf) {
        const float larger = sink > m ? sink : m;
        scale = math::ptx_exp2(m - larger);
        d = d * scale + math::ptx_exp2(sink - larger);
        m = larger;
      }
    }
  })
"""

#: Tensors ``maybe_sink`` float and ``draft_mask`` uint16_t, scalars ``sm_scale`` double and ``draft_words`` int64_t.
#: Every key before the draft tokens is visible; bit j of a row of ``draft_mask`` says whether draft token j is.
draft_decl = (
    r"""
struct DraftAttention : AttentionVariantBase {"""
    + _HEAD
    + r"""
  template <typename Params>
  __device__ __host__ DraftAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {"""
    + _LENGTHS
    + r"""    sm_scale_log2 = float(params.sm_scale) * math::log2e;
  }
"""
    + _SINK
    + r"""
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t draft = int32_t(kv_idx) - (int32_t(kv_len) - int32_t(qo_len));
    if (draft < 0) return true;
    if (qo_idx >= qo_len || uint32_t(draft) >= qo_len) return false;  // tiles are longer than requests
    const int64_t row = int64_t(params.qo_indptr[batch_idx]) + qo_idx;
    return ((params.draft_mask[row * params.draft_words + (draft >> 4)] >> (draft & 15)) & 1) != 0;
  })
};
"""
)

#: Tensors ``maybe_sink`` float, ``maybe_alibi_slopes`` float and ``maybe_stats`` float, scalars ``sm_scale`` double,
#: ``logits_soft_cap`` double (0: none), ``chunk_mask`` int64_t and ``stats_scale`` double. With chunks of n keys (a
#: power of two, ``chunk_mask`` is -n, otherwise 0) a row sees its own chunk up to itself. ``maybe_stats`` gets the
#: largest logit of a row times ``stats_scale`` and the sum of the exponentials relative to it; such a plan must not
#: split keys.
prompt_decl = (
    r"""
template <bool use_soft_cap, bool use_alibi, bool use_chunks, bool use_stats>
struct PromptAttention : AttentionVariantBase {"""
    + _HEAD
    + r"""  static constexpr bool wants_maximum = use_stats;
  float logits_scale;
  float alibi_scale;

  template <typename Params>
  __device__ __host__ PromptAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {"""
    + _LENGTHS
    + r"""    alibi_scale = 1.f;
    logits_scale = float(params.sm_scale);
    sm_scale_log2 = use_alibi ? math::log2e : float(params.sm_scale) * math::log2e;
    if (use_soft_cap) {
      alibi_scale = math::ptx_rcp(float(params.logits_soft_cap));
      logits_scale *= alibi_scale;
      sm_scale_log2 = float(params.logits_soft_cap) * math::log2e;
    }
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_alibi) {
      logits = logits * logits_scale +
               params.maybe_alibi_slopes[qo_head_idx] * alibi_scale * float(int32_t(kv_idx) - int32_t(qo_idx));
    } else if constexpr (use_soft_cap) {
      logits = logits * logits_scale;
    }
    if constexpr (use_soft_cap) logits = math::tanh(logits);
    return logits;
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_chunks) {
      const int32_t position = int32_t(qo_idx) + int32_t(kv_len) - int32_t(qo_len);
      return int32_t(kv_idx) <= position && int32_t(kv_idx) >= (position & int32_t(params.chunk_mask));
    }
    return true;
  })
"""
    + _SINK
    + r"""
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    if constexpr (use_stats) {
      if (qo_idx < qo_len) {  // tiles are longer than requests
        const int64_t row = int64_t(params.qo_indptr[batch_idx]) + qo_idx;
        float* stats = params.maybe_stats + (row * params.num_qo_heads + qo_head_idx) * 2;
        stats[0] = m * math::loge2 * float(params.stats_scale);
        stats[1] = d;
      }
    }
    return (m != -math::inf) ? output * math::ptx_rcp(d) : 0.f;
  })
};
"""
)
