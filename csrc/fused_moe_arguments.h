// SPDX-License-Identifier: Apache-2.0
// Arguments of cutlass_fused_moe, checked: tensors become raw pointers and sizes.
#pragma once
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/moe/workspace.h>
// clang-format on

#include <string>

namespace moe_arguments {

using namespace flashinfer::fused_moe;

constexpr const char* OP = "cutlass_fused_moe";

[[noreturn]] inline void Refuse(const std::string& text) {
  throw tvm::ffi::Error("ArgumentError", std::string(OP) + ": " + text, "");
}

inline Element ElementOf(const TensorView& x) {
  switch (encode_dlpack_dtype(x.dtype())) {
    case encode_dlpack_dtype(dl_float32):
      return Element::kFloat32;
    case encode_dlpack_dtype(dl_float16):
      return Element::kFloat16;
    case encode_dlpack_dtype(dl_bfloat16):
      return Element::kBFloat16;
    default:
      return Element::kE4M3;
  }
}

/// Tensors of a call, in the order of the exported function.
struct Tensors {
  TensorView output, input;
  Optional<TensorView> experts;  // none if the layer routes its tokens
  Optional<TensorView> token_scales;
  TensorView fc1, fc2;
  Optional<TensorView> bias1, bias2;
  Optional<TensorView> scale1, scale2;    // block scales or folded scales of weights
  Optional<TensorView> factor1, factor2;  // one factor per expert, for the sums of GEMMs 1 and 2
  Optional<TensorView> quant1, quant2;    // factors of operands before their rounding
};

inline bool IsPacked(Format x) { return x >= Format::kMxfp4; }

/// Validate that a base address suits loads of 16 bytes.
inline void CheckAligned(const char* name, const TensorView& x) {
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 != 0) Refuse(std::string(name) + " must be 16B-aligned");
}

inline void CheckDivisible(const char* name, int64_t size, int64_t unit) {
  if (size % unit != 0) {
    Refuse(std::string(name) + " must be divisible by " + std::to_string(unit) + ", got " + std::to_string(size));
  }
}

inline void CheckDtypes(const Tensors& x, Format format) {
  const char* in = "input";
  switch (format) {
    case Format::kPlain:
      Expect(OP, in, x.input).on_device().dtype({dl_bfloat16, dl_float16});
      Expect(OP, "output", x.output).same_dtype(x.input, in);
      break;
    case Format::kFp8Tensor:
      Expect(OP, in, x.input).on_device().dtype({dl_float8_e4m3fn});
      break;
    case Format::kFp8Block:
    case Format::kMxfp4:
      Expect(OP, in, x.input).on_device().dtype({dl_bfloat16});
      break;
    default:
      Expect(OP, in, x.input).on_device().dtype({dl_bfloat16, dl_float16});
  }
  Expect(OP, "output", x.output).same_device(x.input, in).dtype({dl_bfloat16, dl_float16});
  const DLDataType weight = format == Format::kPlain ? x.input.dtype() : IsPacked(format) ? dl_uint8 : dl_float8_e4m3fn;
  Expect(OP, "fc1_expert_weights", x.fc1).same_device(x.input, in).dtype({weight}).rank(3).contiguous();
  Expect(OP, "fc2_expert_weights", x.fc2).same_device(x.input, in).dtype({weight}).rank(3).contiguous();
}

/// Validate experts and scales of tokens, and return top_k.
inline int64_t TopKOf(const Tensors& x) {
  const char* name = "token_selected_experts";
  const TensorView& experts = x.experts.value();
  Expect(OP, name, experts).same_device(x.input, "input").dtype({dl_int32}).rank(2).contiguous();
  Expect(OP, name, experts).dim(0, x.input.size(0), "one row for each token of input");
  if (x.token_scales.has_value()) {
    Expect(OP, "token_final_scales", x.token_scales.value()).same_device(x.input, "input").dtype({dl_float32});
    Expect(OP, "token_final_scales", x.token_scales.value()).same_shape(experts, name).contiguous();
  }
  return experts.size(1);
}

/// Validate shapes of tokens and weights, and return the sizes of the layer. `top_k` counts if there are no experts.
inline LayerSizes SizesOf(const Tensors& x, Format format, ActivationType activation, int64_t top_k = 0) {
  LayerSizes s{};
  Expect(OP, "input", x.input).rank(2).last_dim_contiguous();
  s.format = format, s.is_gated = IsGated(activation);
  const int codes = IsPacked(format) ? 2 : 1;  // weights per element
  s.tokens = x.input.size(0), s.top_k = x.experts.has_value() ? TopKOf(x) : top_k, s.num_experts = x.fc1.size(0);
  s.hidden = x.fc2.size(1), s.intermediate = x.fc2.size(2) * codes;
  if (s.top_k < 1 || s.num_experts < 1 || s.num_experts > flashinfer::MOE_SORT_MAX_EXPERTS) {
    Refuse("top_k must be at least 1 and local experts from 1 to 1024, got " + std::to_string(s.top_k) + " and " +
           std::to_string(s.num_experts));
  }
  Expect(OP, "fc2_expert_weights", x.fc2).dim(0, s.num_experts, "experts of fc1_expert_weights");
  Expect(OP, "input", x.input).dim(1, s.hidden, "rows of fc2_expert_weights");
  if (x.fc1.size(2) * codes != s.hidden) {
    Refuse("fc1_expert_weights.shape[2] must be " + std::to_string(s.hidden / codes) + " (columns of input), got " +
           std::to_string(x.fc1.size(2)));
  }
  if (x.fc1.size(1) != s.fc1_rows()) {
    Refuse(std::string("fc1_expert_weights.shape[1] must be ") + (s.is_gated ? "2 times " : "") +
           "the inner dimension of fc2_expert_weights = " + std::to_string(s.intermediate) + ", got " +
           std::to_string(x.fc1.size(1)));
  }
  const int64_t unit = format == Format::kPlain ? 8 : IsPacked(format) ? 128 : 16;
  CheckDivisible("hidden size", s.hidden, unit);
  CheckDivisible("intermediate size", s.intermediate, unit);
  Expect(OP, "output", x.output).rank(2).dim(0, s.tokens, "tokens of input").dim(1, s.hidden, "hidden size");
  Expect(OP, "output", x.output).last_dim_contiguous().distinct();
  CheckAligned("input", x.input), CheckAligned("output", x.output);
  CheckAligned("fc1_expert_weights", x.fc1), CheckAligned("fc2_expert_weights", x.fc2);
  return s;
}

/// Return the address of an fp32 vector with one element per local expert, or null.
inline const float* ExpertVector(const char* name, const Optional<TensorView>& x, const TensorView& input, int64_t n) {
  if (!x.has_value()) return nullptr;
  Expect(OP, name, x.value()).same_device(input, "input").dtype({dl_float32}).numel(n).contiguous();
  return x.value().data_ptr<float>();
}

inline const void* Bias(const char* name, const Optional<TensorView>& x, const Tensors& all, int64_t n,
                        int64_t columns) {
  if (!x.has_value()) return nullptr;
  Expect(OP, name, x.value()).same_device(all.input, "input").same_dtype(all.output, "output").rank(2).contiguous();
  Expect(OP, name, x.value()).dim(0, n, "local experts").dim(1, columns, "rows of the weights");
  CheckAligned(name, x.value());
  return x.value().data_ptr();
}

/// Validate the scales of weights (n, k) of each expert and return their address.
inline const void* WeightScales(const char* name, const Optional<TensorView>& given, const TensorView& input,
                                Format format, int64_t experts, int64_t n, int64_t k) {
  if (format == Format::kPlain || format == Format::kFp8Tensor) return nullptr;
  if (!given.has_value()) Refuse(std::string(name) + " must be given in quant_scales, got None");
  const TensorView& x = given.value();
  Expect(OP, name, x).same_device(input, "input").contiguous();
  if (format == Format::kFp8Block) {
    Expect(OP, name, x).dtype({dl_float32}).rank(3).dim(0, experts, "local experts");
    Expect(OP, name, x).dim(1, (n + 127) / 128, "blocks of 128 rows").dim(2, (k + 127) / 128, "blocks of 128 columns");
    return x.data_ptr();
  }
  CheckDivisible("rows of four-bit weights", n, 64);
  CheckAligned(name, x);
  const int64_t bytes = format == Format::kInt4Fp8 ? n * (k / 128) * 2 : n * (k / 32);
  const int64_t got = x.numel() * (x.dtype().bits / 8);
  if (got != experts * bytes) {
    Refuse(std::string(name) + " must have " + std::to_string(experts * bytes) + " bytes, got " + std::to_string(got));
  }
  // As many bytes in the order of a checkpoint would be multiplied in without a word.
  if (x.ndim() != 5 || x.size(0) != experts || x.size(1) != n / 64 || x.size(2) != k / 128) {
    std::string shape;
    for (const int64_t size : x.shape()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    Refuse(std::string(name) + " must be folded by interleave_moe_scales_for_sm90_mixed_gemm to 5 dimensions (" +
           std::to_string(experts) + ", " + std::to_string(n / 64) + ", " + std::to_string(k / 128) + ", ...), got (" +
           shape + ")");
  }
  return x.data_ptr();
}

/// Return the address of factors of columns (bf16 bit patterns in any 16-bit dtype), or null where there are none.
inline const flashinfer::bfloat16_t* ColumnFactors(const char* name, const Optional<TensorView>& x,
                                                   const TensorView& input, int64_t columns) {
  if (!x.has_value() || x.value().numel() == 0) return nullptr;
  Expect(OP, name, x.value()).same_device(input, "input").dtype({dl_bfloat16, dl_float16}).numel(columns).contiguous();
  return static_cast<const flashinfer::bfloat16_t*>(x.value().data_ptr());
}

}  // namespace moe_arguments
