// SPDX-License-Identifier: Apache-2.0
// Launchers of bgmv_moe_shrink, bgmv_moe_expand and, for the functions of both, bgmv_moe_apply: argument checks, stream.
#include <algorithm>
#include <string>

#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/moe/lora.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/moe/cpu/lora.h>
#elif defined(__CUDACC__)
#include <flashinfer/moe/lora.cuh>
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

constexpr int64_t NOT_NOTED = -1;  // what Python passes for a table whose banks it does not know
constexpr int64_t MIXED = -2;      // and for one whose banks differ in what one call takes to be the same

/// The notes of fill_w_ptr on the banks of a table, in one number because each argument takes 0.1 us:
/// adapters (22 bits), rows (20 bits) and columns (20 bits) of a matrix, whether it is bfloat16 (1 bit).
struct Noted {
  int64_t loras, rows, columns;
  bool is_bf16;

  explicit Noted(int64_t bits)
      : loras(bits >> 41), rows(bits >> 21 & 0xFFFFF), columns(bits >> 1 & 0xFFFFF), is_bf16(bits % 2 != 0) {}
};

/// Return the adapters that the banks of a table have, as far as anybody knows.
int64_t NotedLoras(int64_t noted) { return noted < 0 ? INT64_MAX : Noted(noted).loras; }

/// Check what the matrices of a table are.
void CheckNoted(const char* op, const char* name, int64_t noted, int64_t rows, int64_t columns, bool is_bf16) {
  const Noted made(noted);
  if (noted == NOT_NOTED) return;
  if (noted != MIXED && made.rows == rows && made.columns == columns && made.is_bf16 == is_bf16) return;
  const auto text = [](int64_t rows, int64_t columns, bool is_bf16) {
    return "(" + std::to_string(rows) + ", " + std::to_string(columns) + ") in " + (is_bf16 ? "bfloat16" : "float16");
  };
  FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have the addresses of matrices "
                                  << text(rows, columns, is_bf16) << ", got "
                                  << (noted == MIXED ? "banks that differ in shape, stride or dtype"
                                                     : text(made.rows, made.columns, made.is_bf16))
                                  << " (fill_w_ptr)";
}

/// Check what tells the matrix of each pair, for the published kernels.
BgmvPairs Pairs(const char* op, const TensorView& x, const TensorView& w_ptr, const TensorView& token_ids,
                const TensorView& expert_ids, const TensorView& lora_ids, int64_t lora_stride, int64_t noted) {
  Expect(op, "w_ptr", w_ptr).same_device(x, "x").dtype({dl_int64}).rank(2).contiguous();
  BgmvPairs by{};
  by.w_ptr = w_ptr.data_ptr<int64_t>();
  by.slices = w_ptr.size(0);
  by.experts = w_ptr.size(1);
  by.token_ids = {Indices(op, "sorted_token_ids", token_ids, x), true};
  by.expert_ids = {Indices(op, "expert_ids", expert_ids, x), true};
  by.lora_ids = {Indices(op, "lora_indices", lora_ids, x), true};
  by.pairs = token_ids.size(0);
  by.tokens = lora_ids.size(0);
  by.lora_stride = lora_stride;
  by.loras = NotedLoras(noted);
  by.num_rows = 1;
  Expect(op, "expert_ids", expert_ids).dim(0, by.pairs, "sorted_token_ids.shape[0]");
  return by;
}

/// Check rows and adapters of the pairs on the CPU. On the GPU it would have to synchronise: kernels skip such pairs.
/// All slices are checked, also those of pairs without a matrix.
template <typename RowOf>
void CheckPairs([[maybe_unused]] const char* op, [[maybe_unused]] const char* of_loras,
                [[maybe_unused]] const BgmvPairs& by, [[maybe_unused]] int64_t rows, [[maybe_unused]] RowOf row_of) {
#ifdef FLASHINFER_CPU
  for (int64_t i = 0; i < by.pairs; ++i) {
    const int64_t token = by.Token(i), expert = by.expert_ids[i], row = by.rows.exists() ? by.rows[i] : 0;
    if (token < 0 || token >= by.tokens || expert < 0 || expert >= by.experts || row < 0) continue;
    const int64_t lora = by.lora_ids[token];
    if (lora < 0) continue;
    if (lora >= by.loras) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << of_loras << " must be less than " << by.loras
                                      << " (adapters of the banks), got " << lora << " for token " << token;
    }
    if (row_of(i) >= rows) {
      FLASHINFER_THROW(ArgumentError) << op << ": rows must be less than " << rows << " (x.shape[0]), got " << row_of(i)
                                      << " for pair " << i;
    }
  }
#endif
}

void Shrink(const char* op, const BgmvShrinkParams& p, bool is_bf16, Stream stream) {
  CheckStatus(op, is_bf16 ? BgmvMoeShrink<bfloat16_t>(p, stream) : BgmvMoeShrink<float16_t>(p, stream));
}

void Expand(const char* op, const BgmvExpandParams& p, bool is_bf16, Stream stream) {
  CheckStatus(op, is_bf16 ? BgmvMoeExpand<bfloat16_t>(p, stream) : BgmvMoeExpand<float16_t>(p, stream));
}

/// Check weights and order of the pairs of a sum.
void Finalize(const char* op, BgmvExpandParams& p, const TensorView& x, const Optional<TensorView>& weights,
              const Optional<TensorView>& order, const Optional<TensorView>& offsets) {
  if (weights.has_value()) {
    Expect(op, "topk_weights", weights.value()).same_device(x, "x").dtype({dl_float32}).contiguous();
    Expect(op, "topk_weights", weights.value()).numel(p.by.pairs);
    p.weights = weights.value().data_ptr<float>();
  }
  if (!order.has_value() || !offsets.has_value()) return;
  p.order = Indices(op, "order", order.value(), x);
  p.offsets = Indices(op, "offsets", offsets.value(), x);
  Expect(op, "order", order.value()).dim(0, p.by.pairs, "sorted_token_ids.shape[0]");
  Expect(op, "offsets", offsets.value()).dim(0, p.by.tokens + 1, "lora_indices.shape[0] + 1");
}

/// Names of arguments in errors of the functions that have both products.
struct Names {
  const char *op, *x, *experts, *loras, *a, *b;
};
constexpr Names OF_BOTH{"bgmv_moe", "x", "expert_ids", "lora_indices", "lora_a_weights", "lora_b_weights"};
constexpr Names OF_GEMM1{"bgmv_moe_gemm1_lora_delta", "hidden_states", "topk_ids", "lora_ids", "w_ptr_a", "w_ptr_b"};
constexpr Names OF_GEMM2{
    "bgmv_moe_gemm2_lora_delta", "gemm1_activation_output", "topk_ids", "lora_ids", "w_ptr_a", "w_ptr_b"};

/// Check a list of numbers that may have more than one dimension, and return it.
BgmvIndices AnyIndices(const Names& names, const char* name, const TensorView& indices, const TensorView& x) {
  Expect(names.op, name, indices).same_device(x, names.x).dtype({dl_int32, dl_int64}).rank(1, 2).contiguous();
  return {indices.data_ptr(), indices.dtype().bits == 64};
}

/// Check the matrices of one product: a table of addresses (slices, experts) or (experts,), or a bank.
void SetMatrices(const Names& names, const char* name, BgmvPairs& by, const TensorView& w, const TensorView& x,
                 int64_t lora_stride, int64_t rows, int64_t columns) {
  Expect(names.op, name, w).same_device(x, names.x).rank(1, 4);
  by.lora_stride = lora_stride;
  if (w.ndim() < 4) {
    Expect(names.op, name, w).dtype({dl_int64}).rank(1, 2).contiguous();
    by.w_ptr = w.data_ptr<int64_t>();
    by.slices = w.ndim() == 1 ? 1 : w.size(0);
    by.experts = w.size(-1);
    return;
  }
  Expect(names.op, name, w).same_dtype(x, names.x).dim(2, rows, "rows").dim(3, columns, "columns");
  by.loras = w.size(0);
  by.bank = w.data_ptr();
  by.slices = 1;
  by.experts = w.size(1);
  by.expert_stride = w.stride(1);
}

}  // namespace

void bgmv_moe_shrink(TensorView y, TensorView x, TensorView w_ptr, TensorView token_ids, TensorView expert_ids,
                     TensorView lora_ids, int64_t lora_stride, int64_t noted, bool per_pair_input, bool enable_pdl) {
  const char* op = "bgmv_moe_shrink";
  Expect(op, "x", x).on_device().rank(2).dtype({dl_float16, dl_bfloat16}).last_dim_contiguous();
  BgmvShrinkParams p{};
  p.by = Pairs(op, x, w_ptr, token_ids, expert_ids, lora_ids, lora_stride, noted);
  Expect(op, "y", y).same_device(x, "x").rank(3).dtype({dl_float32, dl_float16, dl_bfloat16}).contiguous();
  Expect(op, "y", y).dim(0, p.by.slices, "w_ptr.shape[0]").dim(1, p.by.pairs, "sorted_token_ids.shape[0]");
  p.y = Numbers(y);
  p.x = x.data_ptr();
  p.x_stride = x.stride(0);
  p.x_per_pair = per_pair_input;
  if (per_pair_input) Expect(op, "x", x).dim(0, p.by.pairs, "sorted_token_ids.shape[0], with per_pair_input");
  p.rank = y.size(2);
  p.columns = x.size(1);
  p.enable_pdl = UsePdl(enable_pdl, x.device());
  const bool is_bf16 = x.dtype().code == kDLBfloat;
  CheckNoted(op, "w_ptr", noted, p.rank, p.columns, is_bf16);
  CheckPairs(op, "lora_indices", p.by, x.size(0), [&](int64_t pair) { return p.Row(pair); });
  if (!per_pair_input) p.by.tokens = std::min(p.by.tokens, x.size(0));  // the GPU skips what the CPU refuses
  DeviceGuard guard(x.device());
  Shrink(op, p, is_bf16, get_stream(x.device()));
}

void bgmv_moe_expand(TensorView y, TensorView x, TensorView w_ptr, TensorView token_ids, TensorView expert_ids,
                     TensorView lora_ids, Optional<TensorView> weights, TensorView slice_starts,
                     Optional<TensorView> order, Optional<TensorView> offsets, int64_t columns, int64_t lora_stride,
                     int64_t noted, bool is_bf16, bool finalize, bool enable_pdl) {
  const char* op = "bgmv_moe_expand";
  Expect(op, "x", x).on_device().rank(3).dtype({dl_float32, dl_float16, dl_bfloat16}).contiguous();
  BgmvExpandParams p{};
  p.by = Pairs(op, x, w_ptr, token_ids, expert_ids, lora_ids, lora_stride, noted);
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
  CheckNoted(op, "w_ptr", noted, columns, x.size(2), is_bf16);
  CheckPairs(op, "lora_indices", p.by, p.by.pairs, [](int64_t pair) { return pair; });
#ifdef FLASHINFER_CPU  // on the GPU, where it would have to synchronise, kernels leave out columns that are not in y
  for (int64_t s = 0; s < p.by.slices; ++s) {
    if (p.slice_starts[s] < 0 || p.slice_starts[s] + columns > y.size(1)) {
      FLASHINFER_THROW(ArgumentError) << op << ": slice_start_loc must be from 0 to " << y.size(1) - columns
                                      << " (y.shape[1] less output_slices[0]), got " << p.slice_starts[s];
    }
  }
#endif
  Finalize(op, p, x, weights, order, offsets);
  p.y = Numbers(y);
  p.y_stride = y.stride(0);
  p.y_columns = y.size(1);
  p.x = Numbers(x);
  p.rank = x.size(2);
  p.x_slice_stride = p.by.pairs * p.rank;
  p.columns = columns;
  p.scale = 1.f;
  p.finalize = finalize;
  p.enable_pdl = UsePdl(enable_pdl, x.device());
  DeviceGuard guard(x.device());
  Expand(op, p, is_bf16, get_stream(x.device()));
}

/// Both products, whose results need not be initialised: `low`, (slices of a, pairs, rank) in between, and the columns
/// of `out` from `start` on: those of all slices of b and `zero_columns`. With tables, slices have all columns of `out`
/// in equal parts. Without `token_ids` each token has the same number of pairs, and `rows` may tell the rows of x; with
/// either, the pairs of a token are added up.
void bgmv_moe_apply(TensorView out, TensorView low, TensorView x, TensorView a, TensorView b,
                    Optional<TensorView> token_ids, TensorView expert_ids, TensorView lora_ids,
                    Optional<TensorView> rows, Optional<TensorView> weights, Optional<TensorView> order,
                    Optional<TensorView> offsets, int64_t lora_stride_a, int64_t lora_stride_b, int64_t noted_a,
                    int64_t noted_b, int64_t start, int64_t zero_columns, double scale, bool enable_pdl) {
  const bool finalize = token_ids.has_value() || rows.has_value();
  const Names& names = token_ids.has_value() ? OF_BOTH : finalize ? OF_GEMM2 : OF_GEMM1;
  const char* op = names.op;
  Expect(op, names.x, x).on_device().rank(2).dtype({dl_float16, dl_bfloat16}).last_dim_contiguous();
  Expect(op, "low", low).same_device(x, names.x).rank(3).dtype({dl_float32}).contiguous();
  BgmvShrinkParams first{};
  first.by.expert_ids = AnyIndices(names, names.experts, expert_ids, x);
  first.by.lora_ids = AnyIndices(names, names.loras, lora_ids, x);
  Expect(op, names.loras, lora_ids).rank(1);
  first.by.pairs = expert_ids.numel();
  first.by.tokens = lora_ids.size(0);
  first.by.top_k = expert_ids.size(-1);
  first.by.loras = std::min(NotedLoras(noted_a), NotedLoras(noted_b));  // tables first, banks follow
  first.by.num_rows = rows.has_value() ? x.size(0) : 1;
  if (token_ids.has_value()) {
    Expect(op, names.experts, expert_ids).rank(1);
    first.by.token_ids = AnyIndices(names, "sorted_token_ids", token_ids.value(), x);
    Expect(op, "sorted_token_ids", token_ids.value()).rank(1).dim(0, first.by.pairs, "expert_ids.shape[0]");
    Expect(op, names.loras, lora_ids).dim(0, x.size(0), "x.shape[0]");
  } else {
    Expect(op, names.experts, expert_ids).rank(2);
    if (finalize) Expect(op, names.loras, lora_ids).dim(0, expert_ids.size(0), "topk_ids.shape[0]");
    if (!rows.has_value() && x.size(0) < expert_ids.size(0)) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << names.x << " must have at least " << expert_ids.size(0)
                                      << " rows (topk_ids.shape[0]), got " << x.size(0);
    }
  }
  if (first.by.pairs > INT32_MAX) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << names.experts << " must have fewer than 2^31 elements, got "
                                    << first.by.pairs;
  }
  if (rows.has_value()) {
    first.by.rows = AnyIndices(names, "expanded_idx_to_permuted_idx", rows.value(), x);
    Expect(op, "expanded_idx_to_permuted_idx", rows.value()).numel(first.by.pairs);
  }
  first.y = Numbers(low);
  first.x = x.data_ptr();
  first.x_stride = x.stride(0);
  first.rank = low.size(2);
  first.columns = x.size(1);
  first.overwrites = true;
  first.enable_pdl = UsePdl(enable_pdl, x.device());

  BgmvExpandParams second{};
  second.by = first.by;
  const int64_t width = out.size(-1);
  const int64_t columns = b.ndim() == 4 ? b.size(2) : b.ndim() == 2 && b.size(0) > 0 ? width / b.size(0) : width;
  SetMatrices(names, names.a, first.by, a, x, lora_stride_a, first.rank, first.columns);
  SetMatrices(names, names.b, second.by, b, x, lora_stride_b, columns, first.rank);
  const bool is_bf16 = x.dtype().code == kDLBfloat;
  CheckNoted(op, names.a, noted_a, first.rank, first.columns, is_bf16);
  CheckNoted(op, names.b, noted_b, columns, first.rank, is_bf16);
  const auto same = [&](const char* what, int64_t of_a, int64_t of_b) {
    if (of_a == of_b) return;
    FLASHINFER_THROW(ArgumentError) << op << ": " << names.b << " must have " << of_a << " " << what << " (" << names.a
                                    << "), got " << of_b;
  };
  same("experts", first.by.experts, second.by.experts);
  same("adapters", first.by.loras, second.by.loras);
  Expect(op, "low", low).dim(0, first.by.slices, "slices").dim(1, first.by.pairs, "pairs");
  if (first.by.slices != 1) same("slices", first.by.slices, second.by.slices);
  Expect(op, "out", out).same_device(x, names.x).dtype({dl_float32, dl_float16, dl_bfloat16}).contiguous();
  const int64_t last = start + second.by.slices * columns + zero_columns;
  if (start < 0 || zero_columns < 0 || last > width) {
    FLASHINFER_THROW(ArgumentError) << op << ": columns must end at " << width << " (out.shape[-1]), got " << last;
  }
  Expect(op, "out", out).numel((finalize ? first.by.tokens : first.by.pairs) * width);
  second.y = Numbers(out);
  second.y_stride = second.y_columns = width;
  second.x = first.y;
  second.x_slice_stride = first.by.slices == 1 ? 0 : first.by.pairs * first.rank;
  Finalize(op, second, x, weights, order, offsets);
  second.start = start;
  second.rank = first.rank;
  second.columns = columns;
  second.zero_columns = zero_columns;
  second.scale = float(scale);
  second.finalize = finalize;
  second.overwrites = true;
  second.enable_pdl = first.enable_pdl;

  CheckPairs(op, names.loras, first.by, x.size(0), [&](int64_t pair) { return first.Row(pair); });
  DeviceGuard guard(x.device());
  const auto stream = get_stream(x.device());
  Shrink(op, first, is_bf16, stream);
  Expand(op, second, is_bf16, stream);
}
