# SPDX-License-Identifier: Apache-2.0
"""C++ source and parameters of attention variants: the built-in one, and attention sinks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..._runtime.errors import ArgumentError, BackendSupportedError

__all__ = [
    "DECODE",
    "HEAD_SCALES",
    "NVFP4_TENSORS",
    "PREFILL",
    "VariantParams",
    "attention_sink_decl",
    "bidirectional_ranges_decl",
    "check_sm90_form",
    "default_variant_name",
    "has_sm90_form",
]


@dataclass(frozen=True)
class VariantParams:
    """Additional parameters of a variant, in the order of the arguments of run()."""

    tensors: tuple[tuple[str, str], ...] = field(default=())  #: (name, C++ element type)
    scalars: tuple[tuple[str, str], ...] = field(default=())  #: (name, C++ type)


_SCALARS = tuple((name, "double") for name in ("logits_soft_cap", "sm_scale", "rope_rcp_scale", "rope_rcp_theta"))

DECODE = VariantParams((("maybe_alibi_slopes", "float"),), _SCALARS)
PREFILL = VariantParams(
    (
        ("maybe_custom_mask", "uint8_t"),
        ("maybe_mask_indptr", "int32_t"),
        ("maybe_alibi_slopes", "float"),
        ("maybe_prefix_len_ptr", "uint32_t"),
        ("maybe_token_pos_in_items_ptr", "uint16_t"),
        ("maybe_max_item_len_ptr", "uint16_t"),
    ),
    (*_SCALARS, ("token_pos_in_items_len", "int64_t")),
)

#: Scale factors of an NVFP4 cache, appended to the tensors when the cache is uint8.
NVFP4_TENSORS = (("maybe_k_cache_sf", "uint8_t"), ("maybe_v_cache_sf", "uint8_t"))

#: Scales of each query head, and of keys and values of each KV head, appended to the tensors when queries have 8 bits.
HEAD_SCALES = (("maybe_scale_q", "float"), ("maybe_scale_k", "float"), ("maybe_scale_v", "float"))


def default_variant_name(custom_mask: str, use_logits_soft_cap: bool, use_alibi: bool) -> str:
    """Return the C++ type of the built-in variant. Kernels apply sliding windows, so that flag is always false."""
    return f"DefaultAttention<{custom_mask}, false, {str(use_logits_soft_cap).lower()}, {str(use_alibi).lower()}>"


def has_sm90_form(variant_decl: str) -> bool:
    """Tell whether a variant has the published form for SM90 (include/flashinfer/attention/variant_sm90.h)."""
    return "GetAttentionUpdater" in variant_decl


_SM90_UPDATERS = ("OnlineSoftmax", "DefaultUpdater")
_OTHER_HOOKS = ("QUERY_TRANSFORM", "KEY_TRANSFORM", "M_D_UPDATE", "OUTPUT_TRANSFORM")


def check_sm90_form(op: str, variant_decl: str) -> None:
    """Check what a variant in the form for SM90 uses: our updaters, no CuTe, and the hooks that the form has."""
    for name in ("cute::", "cutlass::"):
        if name in variant_decl:
            raise BackendSupportedError(f"{op}: variant_decl must not use CuTe (kernels have none), got {name}")
    if not any(name in variant_decl for name in _SM90_UPDATERS):
        names = " or ".join(_SM90_UPDATERS)
        raise BackendSupportedError(
            f"{op}: GetAttentionUpdater must return {names} (others work on tensors of CuTe), got another updater"
        )
    for hook in _OTHER_HOOKS:
        if f"REGISTER_{hook}" in variant_decl:
            raise ArgumentError(
                f"{op}: hooks of a variant_decl with GetAttentionUpdater must be REGISTER_LOGITS_TRANSFORM and "
                f"REGISTER_LOGITS_MASK, got REGISTER_{hook}"
            )


_SINK = r"""
// A logit of each head that has no value: it takes its part of the denominator.
struct AttentionSink : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ AttentionSink(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? uint32_t(params.window_left) : kv_len;
    sm_scale_log2 = float(params.sm_scale) * math::log2e;
  }

  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    if (kv_tile_idx == 0) {
      const float sink = params.sink[qo_head_idx] * math::log2e;
      if (sink != -math::inf) {
        const float larger = sink > m ? sink : m;
        scale = math::ptx_exp2(m - larger);
        d = d * scale + math::ptx_exp2(sink - larger);
        m = larger;
      }
    }
  })
};
"""

#: Source of the variant ``AttentionSink`` by backend, with the tensor ``sink`` and the scalar ``sm_scale``. One struct
#: serves all of them.
attention_sink_decl = {"fa2": _SINK, "fa3": _SINK}

#: Source of the variant ``BidirectionalRanges``: the tensor ``ranges`` has the first and last key position that a row
#: sees, and the scalar is ``sm_scale``. It needs mask mode CUSTOM; kernels apply the left end of the window.
bidirectional_ranges_decl = r"""
// A query sees the keys up to its own position, and those of one range of positions, within a window on both sides.
struct BidirectionalRanges : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  const int32_t* ranges;

  template <typename Params>
  __device__ __host__ BidirectionalRanges(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? uint32_t(params.window_left) : kv_len;
    sm_scale_log2 = float(params.sm_scale) * math::log2e;
    ranges = params.ranges + 2 * int64_t(params.qo_indptr[batch_idx]);
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int64_t ahead = int64_t(kv_idx) - (int64_t(qo_idx) + kv_len - qo_len);  // positions from query to key
    if (ahead <= 0) return true;
    const int32_t* range = ranges + 2 * int64_t(qo_idx);
    return ahead <= int64_t(window_left) && int32_t(kv_idx) >= range[0] && int32_t(kv_idx) <= range[1];
  })
};
"""
