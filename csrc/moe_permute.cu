// SPDX-License-Identifier: Apache-2.0
// Launchers of moe_permute and moe_finalize: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/moe/permute.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/moe/cpu/permute.h>
#elif defined(__CUDACC__)
#include <flashinfer/moe/permute.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

/// Check what the permutations share, and fill their parameters.
MoePermuteParams Permutation(const char* op, const TensorView& output, const TensorView& input,
                             const TensorView& row_to_pair, int64_t top_k, bool enable_pdl) {
  Expect(op, "input", input).on_device().rank(2).last_dim_contiguous();
  Expect(op, "row_to_pair", row_to_pair).same_device(input, "input").dtype({dl_int32}).rank(1).contiguous();
  Expect(op, "output", output).same_device(input, "input").rank(2).last_dim_contiguous().distinct();
  Expect(op, "output", output).dim(1, input.size(1), "input.shape[1]").apart(input, "input");
  if (output.size(0) < row_to_pair.size(0)) {
    FLASHINFER_THROW(ArgumentError) << op << ": output must have at least " << row_to_pair.size(0)
                                    << " rows (row_to_pair.shape[0]), got " << output.size(0);
  }
  if (top_k < 1 || top_k > INT32_MAX) {
    FLASHINFER_THROW(ArgumentError) << op << ": top_k must be at least 1, got " << top_k;
  }
  MoePermuteParams p{};
  p.input = input.data_ptr();
  p.input_stride = input.stride(0);
  p.output = output.data_ptr();
  p.output_stride = output.stride(0);
  p.row_to_pair = row_to_pair.data_ptr<int32_t>();
  p.rows = row_to_pair.size(0);
  p.tokens = input.size(0);
  p.top_k = int32_t(top_k);
  p.columns = input.size(1);
  p.enable_pdl = UsePdl(enable_pdl, input.device());
  return p;
}

#ifdef FLASHINFER_CPU  // on the GPU it would have to synchronise, and kernels leave such rows alone
void CheckTokens(const char* op, const MoePermuteParams& p, int64_t tokens) {
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.row_to_pair[row] / p.top_k >= tokens) {
      FLASHINFER_THROW(ArgumentError) << op << ": row_to_pair must be less than " << tokens * p.top_k
                                      << " (input.shape[0] * top_k), got " << p.row_to_pair[row] << " at row " << row;
    }
  }
}
#else
void CheckTokens(const char*, const MoePermuteParams&, int64_t) {}
#endif

template <typename In, typename Out>
void Finalize(const TensorView& output, const TensorView& rows, const TensorView& pair_to_row, const float* scales,
              bool enable_pdl) {
  const MoeFinalizeParams<In, Out> p{rows.data_ptr<In>(),
                                     rows.stride(0),
                                     rows.size(0),
                                     pair_to_row.data_ptr<int32_t>(),
                                     scales,
                                     output.data_ptr<Out>(),
                                     output.stride(0),
                                     output.size(0),
                                     int32_t(pair_to_row.size(1)),
                                     output.size(1),
                                     UsePdl(enable_pdl, rows.device())};
  CheckStatus("moe_unpermute", MoeFinalize<In, Out>(p, get_stream(rows.device())));
}

}  // namespace

void moe_permute(TensorView output, TensorView input, TensorView row_to_pair, int64_t top_k, bool enable_pdl) {
  const char* op = "moe_permute";
  const MoePermuteParams p = Permutation(op, output, input, row_to_pair, top_k, enable_pdl);
  Expect(op, "output", output).same_dtype(input, "input");
  CheckTokens(op, p, input.size(0));
  DeviceGuard guard(input.device());
  const auto stream = get_stream(input.device());
  switch (input.dtype().bits) {
    case 8:
      return CheckStatus(op, MoePermute<uint8_t>(p, stream));
    case 16:
      return CheckStatus(op, MoePermute<uint16_t>(p, stream));
    case 32:
      return CheckStatus(op, MoePermute<uint32_t>(p, stream));
    default:
      FLASHINFER_THROW(ArgumentError) << op << ": input must have elements of 8, 16 or 32 bits, got " << input.dtype();
  }
}

void moe_permute_fp8(TensorView output, TensorView input, TensorView row_to_pair, Optional<TensorView> factor,
                     int64_t top_k, bool enable_pdl) {
  const char* op = "moe_permute_fp8";
  MoePermuteParams p = Permutation(op, output, input, row_to_pair, top_k, enable_pdl);
  Expect(op, "input", input).dtype({dl_bfloat16, dl_float16});
  Expect(op, "output", output).dtype({dl_float8_e4m3fn});
  if (factor.has_value()) {
    Expect(op, "factor", factor.value()).same_device(input, "input").dtype({dl_float32}).numel(1);
    p.factor = factor.value().data_ptr<float>();
  }
  CheckTokens(op, p, input.size(0));
  DeviceGuard guard(input.device());
  const auto stream = get_stream(input.device());
  const bool is_bf16 = input.dtype().code == kDLBfloat;
  CheckStatus(op, is_bf16 ? MoePermuteFp8<bfloat16_t>(p, stream) : MoePermuteFp8<float16_t>(p, stream));
}

/// `scales` is (columns / 128, rows); its rows may be padded, so that the copy engine can read them.
void moe_permute_fp8_block(TensorView output, TensorView scales, TensorView input, TensorView row_to_pair,
                           int64_t top_k, bool enable_pdl) {
  const char* op = "moe_permute_fp8_block";
  MoePermuteParams p = Permutation(op, output, input, row_to_pair, top_k, enable_pdl);
  Expect(op, "input", input).dtype({dl_bfloat16, dl_float16});
  Expect(op, "output", output).dtype({dl_float8_e4m3fn});
  if (p.columns % 128 != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": input.shape[1] must be divisible by block size 128, got " << p.columns;
  }
  Expect(op, "scales", scales).same_device(input, "input").dtype({dl_float32}).rank(2).last_dim_contiguous();
  Expect(op, "scales", scales)
      .dim(0, p.columns / 128, "input.shape[1] / 128")
      .dim(1, output.size(0), "output.shape[0]");
  p.scales = scales.data_ptr<float>();
  p.scale_stride = scales.stride(0);
#ifndef FLASHINFER_CPU  // the CUDA kernel reads 16 bytes at once
  if (reinterpret_cast<uintptr_t>(p.input) % 16 != 0 || p.input_stride % 8 != 0 || p.output_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(p.output) % 8 != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": rows of input must be aligned to 16 bytes and rows of output to 8, got "
                                    << "strides " << p.input_stride << " and " << p.output_stride;
  }
#endif
  CheckTokens(op, p, input.size(0));
  DeviceGuard guard(input.device());
  const auto stream = get_stream(input.device());
  const bool is_bf16 = input.dtype().code == kDLBfloat;
  CheckStatus(op, is_bf16 ? MoePermuteFp8Block<bfloat16_t>(p, stream) : MoePermuteFp8Block<float16_t>(p, stream));
}

void moe_finalize(TensorView output, TensorView rows, TensorView pair_to_row, Optional<TensorView> scales,
                  bool enable_pdl) {
  const char* op = "moe_unpermute";  // and the names of its arguments
  const char *of_rows = "permuted_input", *of_pairs = "expanded_idx_to_permuted_idx";
  Expect(op, of_rows, rows).on_device().rank(2).dtype({dl_float32, dl_float16, dl_bfloat16}).last_dim_contiguous();
  Expect(op, of_pairs, pair_to_row).same_device(rows, of_rows).dtype({dl_int32}).rank(2).contiguous();
  Expect(op, "output", output).same_device(rows, of_rows).rank(2).dtype({dl_float32, dl_float16, dl_bfloat16});
  Expect(op, "output", output)
      .dim(0, pair_to_row.size(0), "num_tokens")
      .dim(1, rows.size(1), "permuted_input.shape[1]");
  Expect(op, "output", output).last_dim_contiguous().distinct().apart(rows, of_rows);
  const float* factors = nullptr;
  if (scales.has_value()) {
    Expect(op, "topk_scales", scales.value()).same_device(rows, of_rows).dtype({dl_float32}).contiguous();
    Expect(op, "topk_scales", scales.value()).same_shape(pair_to_row, of_pairs);
    factors = scales.value().data_ptr<float>();
  }
#ifdef FLASHINFER_CPU  // on the GPU it would have to synchronise, and kernels skip such slots
  for (int64_t i = 0; i < pair_to_row.numel(); ++i) {
    if (pair_to_row.data_ptr<int32_t>()[i] >= rows.size(0)) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << of_pairs << " must be less than " << rows.size(0)
                                      << " (permuted_input.shape[0]), got " << pair_to_row.data_ptr<int32_t>()[i];
    }
  }
#endif
  DeviceGuard guard(rows.device());
  DispatchFloat(rows.dtype(), [&](auto in) {
    DispatchFloat(output.dtype(), [&](auto out) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      if constexpr (std::is_same_v<In, Out> || std::is_same_v<In, float> || std::is_same_v<Out, float>) {
        Finalize<In, Out>(output, rows, pair_to_row, factors, enable_pdl);
      } else {
        FLASHINFER_THROW(ArgumentError) << op << ": output must be " << rows.dtype()
                                        << " (the dtype of permuted_input) or float32, got " << output.dtype();
      }
    });
  });
}
