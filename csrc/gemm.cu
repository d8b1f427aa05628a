// SPDX-License-Identifier: Apache-2.0
// Launcher of the general matrix product: argument checks, strides, scales, groups, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/gemm.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/gemm_cpu.h>
#endif
// clang-format on

#include <algorithm>

using namespace flashinfer::gemm;

namespace {

const char* const OP = "gemm";

bool IsFp8(Element x) { return x == Element::kE4M3 || x == Element::kE5M2; }

/// Return the element type of a tensor that was checked with Expect.
Element ElementOf(const TensorView& x) {
  switch (encode_dlpack_dtype(x.dtype())) {
    case encode_dlpack_dtype(dl_float32):
      return Element::kFloat32;
    case encode_dlpack_dtype(dl_float16):
      return Element::kFloat16;
    case encode_dlpack_dtype(dl_bfloat16):
      return Element::kBFloat16;
    case encode_dlpack_dtype(dl_float8_e4m3fn):
      return Element::kE4M3;
    default:
      return Element::kE5M2;
  }
}

int64_t BatchStride(const TensorView& x) { return x.ndim() == 3 ? x.stride(0) : 0; }

Matrix MatrixOf(const TensorView& x) {
  return {x.data_ptr(), ElementOf(x), BatchStride(x), x.stride(x.ndim() - 2), x.stride(x.ndim() - 1)};
}

int64_t CeilDiv(int64_t x, int64_t y) { return (x + y - 1) / y; }

/// Validate the scales of an operand and return their view. One element is the scale of the whole tensor.
Scale ScaleOf(const char* name, const Optional<TensorView>& given, const TensorView& operand, const char* of,
              int64_t rows_per_scale, int64_t depth) {
  if (!given.has_value()) return {};
  const TensorView& x = given.value();
  Expect(OP, name, x).same_device(operand, of).dtype({dl_float32});
  const int64_t rows = operand.size(-2), k = operand.size(-1);
  if (x.numel() == 1) return {x.data_ptr<float>(), 0, 0, 0, std::max<int64_t>(rows, 1), std::max<int64_t>(k, 1)};
  const int last = operand.ndim() - 1;
  Expect(OP, name, x).rank(operand.ndim());
  if (last == 2) Expect(OP, name, x).dim(0, operand.size(0), "one matrix of scales for each matrix");
  Expect(OP, name, x).dim(last - 1, CeilDiv(rows, rows_per_scale), "blocks of rows");
  Expect(OP, name, x).dim(last, CeilDiv(k, depth), "blocks of K");
  return {x.data_ptr<float>(), BatchStride(x), x.stride(last - 1), x.stride(last), rows_per_scale, depth};
}

/// Validate an int32 vector of row counts, offsets or indices, and return its address.
const int32_t* IndicesOf(const char* name, const TensorView& x, const TensorView& a, int64_t count) {
  Expect(OP, name, x).same_device(a, "a").dtype({dl_int32}).rank(1).contiguous().numel(count);
  return x.data_ptr<int32_t>();
}

[[noreturn]] void Refuse(const std::string& text) {
  throw tvm::ffi::Error("ArgumentError", std::string(OP) + ": " + text, "");
}

/// Fill in grouping, batch and the vectors that belong to it. Ranks of a and b follow from the grouping.
void FillGroups(GemmArguments* p, const TensorView& a, const TensorView& b, const Optional<TensorView>& groups,
                const Optional<TensorView>& weight_indices) {
  const bool is_batched = p->grouping == Grouping::kBatched;
  const bool has_batch = is_batched || p->grouping == Grouping::kMasked;
  const int rank = is_batched ? a.ndim() : 3;
  Expect(OP, "b", b).rank(rank);
  Expect(OP, "a", a).rank(has_batch ? rank : 2);
  p->batch = rank == 3 ? b.size(0) : 1;
  if (weight_indices.has_value()) {
    if (p->grouping != Grouping::kPacked) Refuse("weight_indices must be None unless grouping is 3, got a tensor");
    p->weights = b.size(0);
    p->batch = weight_indices.value().numel();
    p->weight_indices = IndicesOf("weight_indices", weight_indices.value(), a, p->batch);
  }
  if (has_batch && rank == 3) Expect(OP, "a", a).dim(0, p->batch, "b.shape[0]");
  if (is_batched) {
    if (groups.has_value()) Refuse("groups must be None for a batched product, got a tensor");
    return;
  }
  if (!groups.has_value()) Refuse("groups must be given for grouped products, got None");
  const int64_t counts[] = {0, p->m, p->batch, p->batch + 1};
  p->groups = IndicesOf("groups", groups.value(), a, counts[int(p->grouping)]);
}

#if defined(FLASHINFER_CPU)
void CheckIndex(const char* name, int64_t i, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    Refuse(std::string(name) + "[" + std::to_string(i) + "] must be in " + std::to_string(low) + " .. " +
           std::to_string(high) + ", got " + std::to_string(value));
  }
}

/// Validate the values of groups and indices, which only the CPU can read without waiting.
void CheckIndexValues(const GemmArguments& p, int64_t matrices) {
  for (int64_t i = 0; p.weight_indices != nullptr && i < p.batch; ++i) {
    CheckIndex("weight_indices", i, p.weight_indices[i], 0, matrices - 1);
  }
  if (p.grouping == Grouping::kContiguous) {
    for (int64_t i = 0; i < p.m; ++i) CheckIndex("groups", i, p.groups[i], -1, p.batch - 1);
  } else if (p.grouping == Grouping::kMasked) {
    for (int64_t i = 0; i < p.batch; ++i) CheckIndex("groups", i, p.groups[i], 0, p.m);
  } else if (p.grouping == Grouping::kPacked) {
    for (int64_t i = 0; i <= p.batch; ++i) CheckIndex("groups", i, p.groups[i], i == 0 ? 0 : p.groups[i - 1], p.m);
  }
}
#endif

void CheckDtypes(const TensorView& out, const TensorView& a, const TensorView& b) {
  const auto operand = {dl_float32, dl_float16, dl_bfloat16, dl_float8_e4m3fn, dl_float8_e5m2};
  Expect(OP, "a", a).on_device().dtype(operand).rank(2, 3);
  Expect(OP, "b", b).same_device(a, "a").dtype(operand).rank(2, 3);
  Expect(OP, "out", out).same_device(a, "a").dtype({dl_float32, dl_float16, dl_bfloat16}).rank(a.ndim()).distinct();
  if (!IsFp8(ElementOf(a)) || !IsFp8(ElementOf(b))) Expect(OP, "b", b).same_dtype(a, "a");
}

}  // namespace

void gemm(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale, Optional<TensorView> b_scale,
          Optional<TensorView> bias, Optional<TensorView> groups, Optional<TensorView> weight_indices, int64_t grouping,
          int64_t scale_m, int64_t scale_n, int64_t scale_k, double alpha, double beta, bool enable_pdl) {
  CheckDtypes(out, a, b);
  if (grouping < 0 || grouping > 3) Refuse("grouping must be in 0 .. 3, got " + std::to_string(grouping));
  if (std::min({scale_m, scale_n, scale_k}) < 1) {
    Refuse("granularity must be positive, got (" + std::to_string(scale_m) + ", " + std::to_string(scale_n) + ", " +
           std::to_string(scale_k) + ")");
  }
  GemmArguments p;
  p.grouping = Grouping(grouping);
  p.m = a.size(-2), p.k = a.size(-1), p.n = b.size(-2);
  FillGroups(&p, a, b, groups, weight_indices);
  const int last = a.ndim() - 1;
  Expect(OP, "b", b).dim(b.ndim() - 1, p.k, "a.shape[-1]");
  Expect(OP, "out", out).dim(last - 1, p.m, "a.shape[-2]").dim(last, p.n, "b.shape[-2]");
  if (last == 2) Expect(OP, "out", out).dim(0, p.batch, "b.shape[0]");
  Expect(OP, "out", out).apart(a, "a").apart(b, "b").apart(bias, "bias");
  Expect(OP, "out", out).apart(a_scale, "a_scale").apart(b_scale, "b_scale");
  p.a = MatrixOf(a), p.b = MatrixOf(b), p.d = MatrixOf(out);
  p.a_scale = ScaleOf("a_scale", a_scale, a, "a", scale_m, scale_k);
  p.b_scale = ScaleOf("b_scale", b_scale, b, "b", scale_n, scale_k);
  if (bias.has_value()) {
    const TensorView& x = bias.value();
    Expect(OP, "bias", x).same_device(a, "a").dtype({dl_float32, dl_float16, dl_bfloat16}).rank(1).contiguous();
    Expect(OP, "bias", x).dim(0, p.n, "b.shape[-2]");
    p.bias = x.data_ptr(), p.bias_element = ElementOf(x);
  }
  p.alpha = float(alpha), p.beta = float(beta);
  p.enable_pdl = UsePdl(enable_pdl, a.device());
#if defined(FLASHINFER_CPU)
  CheckIndexValues(p, b.ndim() == 3 ? b.size(0) : 1);
#endif
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  DeviceGuard guard(a.device());
  CheckStatus(OP, Gemm(p, get_stream(a.device())));
}
