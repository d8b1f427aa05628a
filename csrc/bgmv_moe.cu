// SPDX-License-Identifier: Apache-2.0
// Launchers of bgmv_moe_shrink and bgmv_moe_expand: argument checks, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/bgmv_moe.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/bgmv_moe_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/bgmv_moe.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

BgmvNumbers Numbers(const TensorView& t) {
  const BgmvFloat half = t.dtype().code == kDLBfloat ? BgmvFloat::kBfloat : BgmvFloat::kHalf;
  return {t.data_ptr(), t.dtype().bits == 32 ? BgmvFloat::kFloat : half};
}

/// Check a list of int64 numbers and return it.
const int64_t* Indices(const char* op, const char* name, const TensorView& indices, const TensorView& like) {
  Expect(op, name, indices).same_device(like, "x").dtype({dl_int64}).rank(1).contiguous();
  return indices.data_ptr<int64_t>();
}

/// Check what tells the matrix of each pair.
BgmvPairs Pairs(const char* op, const TensorView& x, const TensorView& w_ptr, const TensorView& token_ids,
                const TensorView& expert_ids, const TensorView& lora_ids, int64_t lora_stride) {
  Expect(op, "w_ptr", w_ptr).same_device(x, "x").dtype({dl_int64}).rank(2).contiguous();
  BgmvPairs by{};
  by.w_ptr = w_ptr.data_ptr<int64_t>();
  by.slices = w_ptr.size(0);
  by.experts = w_ptr.size(1);
  by.token_ids = Indices(op, "sorted_token_ids", token_ids, x);
  by.expert_ids = Indices(op, "expert_ids", expert_ids, x);
  by.lora_ids = Indices(op, "lora_indices", lora_ids, x);
  by.pairs = token_ids.size(0);
  by.tokens = lora_ids.size(0);
  by.lora_stride = lora_stride;
  Expect(op, "expert_ids", expert_ids).dim(0, by.pairs, "sorted_token_ids.shape[0]");
  return by;
}

}  // namespace

void bgmv_moe_shrink(TensorView y, TensorView x, TensorView w_ptr, TensorView token_ids, TensorView expert_ids,
                     TensorView lora_ids, Optional<TensorView> x_rows, int64_t lora_stride) {
  const char* op = "bgmv_moe_shrink";
  Expect(op, "x", x).on_device().rank(2).dtype({dl_float16, dl_bfloat16}).last_dim_contiguous();
  BgmvShrinkParams p{};
  p.by = Pairs(op, x, w_ptr, token_ids, expert_ids, lora_ids, lora_stride);
  Expect(op, "y", y).same_device(x, "x").rank(3).dtype({dl_float32, dl_float16, dl_bfloat16}).contiguous();
  Expect(op, "y", y).dim(0, p.by.slices, "w_ptr.shape[0]").dim(1, p.by.pairs, "sorted_token_ids.shape[0]");
  p.y = Numbers(y);
  p.x = x.data_ptr();
  p.x_stride = x.stride(0);
  if (x_rows.has_value()) {
    p.x_rows = Indices(op, "x_rows", x_rows.value(), x);
    Expect(op, "x_rows", x_rows.value()).dim(0, p.by.pairs, "sorted_token_ids.shape[0]");
  } else {
    Expect(op, "x", x).dim(0, p.by.pairs, "sorted_token_ids.shape[0], with per_pair_input");
  }
  p.rank = y.size(2);
  p.columns = x.size(1);
#ifdef FLASHINFER_CPU  // a check on the GPU would have to synchronise
  for (int64_t i = 0; p.x_rows != nullptr && i < p.by.pairs; ++i) {
    if (p.by.Matrix<bfloat16_t>(0, i) != nullptr && p.x_rows[i] >= x.size(0)) {
      FLASHINFER_THROW(ArgumentError) << op << ": rows must be less than " << x.size(0) << " (x.shape[0]), got "
                                      << p.x_rows[i] << " for pair " << i;
    }
  }
#endif
  DeviceGuard guard(x.device());
  const auto stream = get_stream(x.device());
  const bool is_bf16 = x.dtype().code == kDLBfloat;
  CheckStatus(op, is_bf16 ? BgmvMoeShrink<bfloat16_t>(p, stream) : BgmvMoeShrink<float16_t>(p, stream));
}

void bgmv_moe_expand(TensorView y, TensorView x, TensorView w_ptr, TensorView token_ids, TensorView expert_ids,
                     TensorView lora_ids, Optional<TensorView> weights, TensorView slice_starts,
                     Optional<TensorView> order, Optional<TensorView> offsets, int64_t top_k, int64_t columns,
                     int64_t lora_stride, bool is_bf16, bool finalize, double scale) {
  const char* op = "bgmv_moe_expand";
  Expect(op, "x", x).on_device().rank(3).dtype({dl_float32, dl_float16, dl_bfloat16}).contiguous();
  BgmvExpandParams p{};
  p.by = Pairs(op, x, w_ptr, token_ids, expert_ids, lora_ids, lora_stride);
  Expect(op, "x", x).dim(0, p.by.slices, "w_ptr.shape[0]").dim(1, p.by.pairs, "sorted_token_ids.shape[0]");
  Expect(op, "y", y).same_device(x, "x").rank(2).dtype({dl_float32, dl_float16, dl_bfloat16}).last_dim_contiguous();
  const char* rows = finalize ? "lora_indices.shape[0]" : "sorted_token_ids.shape[0]";
  Expect(op, "y", y).dim(0, finalize ? p.by.tokens : p.by.pairs, rows);
  p.slice_starts = Indices(op, "slice_start_loc", slice_starts, x);
  Expect(op, "slice_start_loc", slice_starts).dim(0, p.by.slices, "w_ptr.shape[0]");
  if (columns < 0 || columns > y.size(1)) {
    FLASHINFER_THROW(ArgumentError) << op << ": output_slices[0] must be from 0 to " << y.size(1)
                                    << " (y.shape[1]), got " << columns;
  }
#ifdef FLASHINFER_CPU  // a check on the GPU would have to synchronise
  for (int64_t s = 0; s < p.by.slices; ++s) {
    if (p.slice_starts[s] < 0 || p.slice_starts[s] + columns > y.size(1)) {
      FLASHINFER_THROW(ArgumentError) << op << ": slice_start_loc must be from 0 to " << y.size(1) - columns
                                      << " (y.shape[1] less output_slices[0]), got " << p.slice_starts[s];
    }
  }
#endif
  if (weights.has_value()) {
    Expect(op, "topk_weights", weights.value()).same_device(x, "x").dtype({dl_float32}).contiguous();
    Expect(op, "topk_weights", weights.value()).numel(p.by.pairs);
    p.weights = weights.value().data_ptr<float>();
  }
  if (order.has_value() && offsets.has_value()) {
    p.order = Indices(op, "order", order.value(), x);
    p.offsets = Indices(op, "offsets", offsets.value(), x);
    Expect(op, "order", order.value()).dim(0, p.by.pairs, "sorted_token_ids.shape[0]");
    Expect(op, "offsets", offsets.value()).dim(0, p.by.tokens + 1, "lora_indices.shape[0] + 1");
  } else if (finalize && p.by.tokens * top_k != p.by.pairs) {
    FLASHINFER_THROW(ArgumentError) << op << ": sorted_token_ids must have top_k = " << top_k << " pairs for each of "
                                    << p.by.tokens << " tokens, got " << p.by.pairs;
  }
  p.y = Numbers(y);
  p.y_stride = y.stride(0);
  p.x = Numbers(x);
  p.top_k = top_k;
  p.rank = x.size(2);
  p.columns = columns;
  p.scale = float(scale);
  p.finalize = finalize;
  DeviceGuard guard(x.device());
  const auto stream = get_stream(x.device());
  CheckStatus(op, is_bf16 ? BgmvMoeExpand<bfloat16_t>(p, stream) : BgmvMoeExpand<float16_t>(p, stream));
}
