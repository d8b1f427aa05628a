// SPDX-License-Identifier: Apache-2.0
// Launcher of the fused all-reduce: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/comm/allreduce/params.h>
#ifdef FLASHINFER_CPU
#include <flashinfer/comm/allreduce/one_shot_cpu.h>
#endif
// clang-format on

using flashinfer::comm::AllReduceParams;
using flashinfer::comm::MAX_RANKS;
using MaybeTensor = Optional<TensorView>;

namespace {

constexpr const char* OP = "allreduce_fusion";

/// Check an optional tensor of the rows and element type of `input`.
void CheckRows(const char* name, const MaybeTensor& t, const TensorView& input) {
  if (!t.has_value()) return;
  const TensorView x = t.value();
  Expect(OP, name, x).same_device(input, "input").same_dtype(input, "input").same_shape(input, "input").contiguous();
}

/// Check that an output lies apart from other tensors, or in the very place of one that is read row by row before.
void CheckPlaces(const char* name, const MaybeTensor& out, const TensorView& input, const MaybeTensor& residual_in,
                 const MaybeTensor& gamma) {
  if (!out.has_value()) return;
  const TensorView x = out.value();
  Expect expect(OP, name, x);
  expect.apart_or_in_place(input, "input").apart(gamma, "rms_gamma");
  if (residual_in.has_value()) expect.apart_or_in_place(residual_in.value(), "residual_in");
}

/// Check the address of a tensor whose rows are read or written in whole vectors of `bytes`. The CPU takes any address.
void CheckAligned(const char* name, const MaybeTensor& t, int64_t bytes) {
#ifndef FLASHINFER_CPU
  if (!t.has_value() || reinterpret_cast<uintptr_t>(t.value().data_ptr()) % bytes == 0) return;
  FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must be aligned to " << bytes
                                  << " bytes, got another address (a view that begins inside of a vector)";
#endif
}

template <typename T>
T* Pointer(const MaybeTensor& t) {
  return t.has_value() ? t.value().data_ptr<T>() : nullptr;
}

}  // namespace

int64_t allreduce_fusion(TensorView input, TensorView ptrs, int64_t rank, int64_t slot_bytes, int64_t pattern,
                         MaybeTensor output, MaybeTensor residual_in, MaybeTensor residual_out, MaybeTensor gamma,
                         MaybeTensor norm_out, MaybeTensor quant_out, MaybeTensor scale, MaybeTensor scale_out,
                         MaybeTensor packed_out, int64_t group, MaybeTensor fp4_out, MaybeTensor fp4_scales,
                         int64_t fp4_layout, MaybeTensor index, MaybeTensor weights, MaybeTensor add, double factor,
                         bool is_two_shot, double scale_value, double eps, double weight_bias, bool resume,
                         int64_t wait_us, int64_t max_blocks, int64_t timeout_ns, int64_t record, bool enable_pdl,
                         bool trigger_early) {
  Expect(OP, "input", input).on_device().rank(2).dtype({dl_float16, dl_bfloat16, dl_float32}).contiguous();
  // The rows of patterns 6 and 7 are sums of rows of `input`: there are as many as residual_in has.
  const bool is_sum = index.has_value() || weights.has_value();
  const int64_t tokens = is_sum && residual_in.has_value() ? residual_in.value().size(0) : input.size(0);
  const int64_t hidden = input.size(1), element = input.dtype().bits / 8;
  const TensorView like = is_sum && residual_in.has_value() ? residual_in.value() : input;
  Expect(OP, "workspace pointers", ptrs).rank(1).dtype({dl_int64}).contiguous();
  const int64_t world = ptrs.size(0);
  if (world > MAX_RANKS || rank < 0 || rank >= world) {
    FLASHINFER_THROW(ArgumentError) << OP << ": workspace must have at most " << MAX_RANKS << " ranks, got rank "
                                    << rank << " of " << world;
  }
  if (hidden == 0 || hidden * element % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": input must have rows of a positive multiple of 16 bytes, got "
                                    << hidden * element << " bytes (hidden " << hidden << ")";
  }
  if (tokens > slot_bytes / (hidden * element)) {
    FLASHINFER_THROW(ArgumentError) << OP << ": input must fit in the workspace (" << slot_bytes / (hidden * element)
                                    << " tokens of hidden " << hidden << "), got " << tokens << " tokens";
  }
  for (auto [name, t] : {std::pair{"output", &output}, std::pair{"residual_in", &residual_in},
                         std::pair{"residual_out", &residual_out}, std::pair{"norm_out", &norm_out}}) {
    CheckRows(name, *t, like);
  }
  if (quant_out.has_value()) {
    const TensorView q = quant_out.value();
    Expect(OP, "quant_out", q)
        .same_device(input, "input")
        .dtype({dl_float8_e4m3fn})
        .same_shape(like, "input")
        .contiguous();
  }
  if (gamma.has_value()) {
    const TensorView g = gamma.value();
    Expect(OP, "rms_gamma", g).same_device(input, "input").same_dtype(input, "input").rank(1).contiguous();
    Expect(OP, "rms_gamma", g).dim(0, hidden, "input.shape[1]");
  }
  if (scale.has_value()) {
    const TensorView s = scale.value();
    Expect(OP, "scale_factor", s).same_device(input, "input").dtype({dl_float32}).numel(1);
  }
  if (scale_out.has_value()) {
    const TensorView s = scale_out.value();
    Expect(OP, "scale_out", s).same_device(input, "input").dtype({dl_float32}).numel(tokens).contiguous();
    Expect(OP, "scale_out", s).apart(input, "input").apart(residual_in, "residual_in").apart(gamma, "rms_gamma");
  }
  if (packed_out.has_value()) {
    const TensorView s = packed_out.value();
    Expect(OP, "scale_out", s).same_device(input, "input").dtype({dl_int32}).rank(2);
    Expect(OP, "scale_out", s).apart(input, "input").apart(residual_in, "residual_in").apart(gamma, "rms_gamma");
    if (group < 16 || group > 128 || (group & (group - 1)) != 0) {
      FLASHINFER_THROW(ArgumentError) << OP << ": block_quant_group_size must be 16, 32, 64 or 128, got " << group;
    }
  }
  const flashinfer::ScaleGrid grid{tokens, hidden / flashinfer::comm::FP4_BLOCK, flashinfer::ScaleLayout(fp4_layout)};
  if (fp4_out.has_value()) {
    for (auto [name, t, size] :
         {std::tuple{"quant_out", &fp4_out, tokens * hidden / 2}, std::tuple{"scale_out", &fp4_scales, grid.Size()}}) {
      const TensorView x = t->value();
      Expect expect(OP, name, x);
      expect.same_device(input, "input").dtype({dl_uint8}).rank(1).contiguous();
      expect.apart(input, "input").apart(residual_in, "residual_in").apart(gamma, "rms_gamma");
      expect.apart(residual_out, "residual_out").apart(norm_out, "norm_out").apart(output, "output");
      if (x.numel() < size) {
        FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must have " << size << " bytes, got " << x.numel();
      }
    }
    Expect(OP, "scale_out", fp4_scales.value()).apart(fp4_out, "quant_out");
    if (element != 2 || hidden % flashinfer::comm::FP4_BLOCK != 0) {
      FLASHINFER_THROW(ArgumentError) << OP << ": input must be float16 or bfloat16 with rows of a multiple of "
                                      << flashinfer::comm::FP4_BLOCK << " columns for FP4 outputs, got "
                                      << input.dtype() << " with " << hidden;
    }
  }
  int64_t count = 0;
  if (index.has_value()) {
    const TensorView x = index.value();
    Expect(OP, "expanded_idx_to_permuted_idx", x).same_device(input, "input").dtype({dl_int32}).contiguous();
    count = tokens == 0 ? 0 : x.numel() / tokens;
    Expect(OP, "expanded_idx_to_permuted_idx", x).numel(tokens * count);
#ifdef FLASHINFER_CPU
    for (int64_t i = 0; i < x.numel(); ++i) {
      if (x.data_ptr<int32_t>()[i] >= input.size(0)) {
        FLASHINFER_THROW(ArgumentError) << OP << ": expanded_idx_to_permuted_idx must be below the rows of input, "
                                        << input.size(0) << ", got " << x.data_ptr<int32_t>()[i];
      }
    }
#endif
  }
  if (weights.has_value()) {
    const TensorView x = weights.value();
    const char* const name = index.has_value() ? "expert_scale_factor" : "moe_reduction_scale_input";
    Expect(OP, name, x).same_device(input, "input").dtype({dl_float32, input.dtype()}).contiguous();
    if (!index.has_value() && tokens != 0) count = x.numel() / tokens;
    Expect(OP, name, x).numel(tokens * count);
    if (!index.has_value() && input.size(0) != tokens * count) {
      FLASHINFER_THROW(ArgumentError) << OP << ": moe_reduction_active_experts_token_input must have " << tokens * count
                                      << " rows (experts * tokens), got " << input.size(0);
    }
  }
  if (add.has_value()) {
    const TensorView x = add.value();
    const char* const name = index.has_value() ? "shared_expert_output" : "moe_reduction_token_input";
    Expect(OP, name, x).same_device(input, "input").same_dtype(input, "input").contiguous().numel(tokens * hidden);
  }
  const std::pair<const char*, const MaybeTensor*> outputs[] = {
      {"output", &output}, {"residual_out", &residual_out}, {"norm_out", &norm_out}, {"quant_out", &quant_out}};
  for (int i = 0; i < 4; ++i) {
    CheckPlaces(outputs[i].first, *outputs[i].second, input, residual_in, gamma);
    if (is_sum && outputs[i].second->has_value()) {
      const TensorView x = outputs[i].second->value();
      Expect(OP, outputs[i].first, x).apart(input, "input").apart(add, "added rows");
    }
    for (int j = 0; j < i; ++j) {
      if (!outputs[i].second->has_value()) continue;
      const TensorView x = outputs[i].second->value();
      Expect(OP, outputs[i].first, x).apart(*outputs[j].second, outputs[j].first);
    }
  }

  for (auto [name, t] :
       {std::pair{"output", &output}, std::pair{"residual_in", &residual_in}, std::pair{"residual_out", &residual_out},
        std::pair{"norm_out", &norm_out}, std::pair{"rms_gamma", &gamma}, std::pair{"added rows", &add}}) {
    CheckAligned(name, *t, 16);
  }
  CheckAligned("input", MaybeTensor(input), 16);
  CheckAligned("quant_out", quant_out, 16 / element);
  CheckAligned("quant_out", fp4_out, 4);

  DeviceGuard guard(input.device());
  int64_t outcome = -1;
  DispatchFloat(input.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    AllReduceParams<T> p{};
    for (int i = 0; i < world; ++i) p.peers.memory[i] = reinterpret_cast<char*>(ptrs.data_ptr<int64_t>()[i]);
    p.peers.rank = int(rank);
    p.peers.world = int(world);
    p.slot_bytes = slot_bytes;
    p.tokens = tokens;
    p.hidden = hidden;
    p.pattern = int32_t(pattern);
    p.input = input.data_ptr<T>();
    p.output = Pointer<T>(output);
    p.residual_in = Pointer<T>(residual_in);
    p.residual_out = Pointer<T>(residual_out);
    p.gamma = Pointer<T>(gamma);
    p.norm_out = Pointer<T>(norm_out);
    p.quant_out = Pointer<flashinfer::float8_e4m3_t>(quant_out);
    p.scale = Pointer<float>(scale);
    p.scale_out = Pointer<float>(scale_out);
    if (packed_out.has_value()) {
      p.packed_out = reinterpret_cast<uint8_t*>(packed_out.value().data_ptr());
      p.packed_stride = (tokens + 3) / 4 * 4;
      p.group = int32_t(group);
    }
    p.fp4_out = Pointer<uint8_t>(fp4_out);
    p.fp4_scales = Pointer<uint8_t>(fp4_scales);
    p.fp4_grid = grid;
    p.source.count = int32_t(count);
    p.source.index = Pointer<int32_t>(index);
    if (weights.has_value()) {
      const bool is_wide = encode_dlpack_dtype(weights.value().dtype()) == encode_dlpack_dtype(dl_float32);
      p.source.weights = is_wide ? weights.value().data_ptr<float>() : nullptr;
      p.source.typed_weights = is_wide ? nullptr : weights.value().data_ptr<T>();
    }
    p.source.add = Pointer<T>(add);
    p.source.factor = float(factor);
    // Both steps of a row must fit in a slot, and every rank must own a row.
    p.is_two_shot =
        is_two_shot && tokens > world && 2 * ((tokens + world - 1) / world) * hidden * element <= slot_bytes;
    p.scale_value = float(scale_value);
    p.eps = float(eps);
    p.weight_bias = float(weight_bias);
    p.resume = resume;
    p.wait_us = wait_us;
    p.max_blocks = int32_t(max_blocks);
    p.timeout_ns = uint64_t(timeout_ns);
    p.record = reinterpret_cast<uint32_t*>(record);
    p.trigger_early = trigger_early;
#ifdef FLASHINFER_CPU
    (void)enable_pdl;
    outcome = flashinfer::comm::AllReduceOnHost<T>(p);
#else
    p.enable_pdl = UsePdl(enable_pdl, input.device());
    CheckStatus(OP, flashinfer::comm::AllReduce<T>(p, get_stream(input.device())));
#endif
  });
  return outcome;
}

/// Compare `digest` with that of all ranks, on CUDA; the record is read when the stream has come to its end.
void allreduce_check(TensorView ptrs, int64_t rank, int64_t digest, int64_t timeout_ns, int64_t record,
                     TensorView on_device) {
  Expect(OP, "workspace pointers", ptrs).rank(1).dtype({dl_int64}).contiguous();
  const int64_t world = ptrs.size(0);
  if (world > MAX_RANKS || rank < 0 || rank >= world) {
    FLASHINFER_THROW(ArgumentError) << OP << ": workspace must have at most " << MAX_RANKS << " ranks, got rank "
                                    << rank << " of " << world;
  }
  flashinfer::comm::CheckParams p{};
  for (int i = 0; i < world; ++i) p.peers.memory[i] = reinterpret_cast<char*>(ptrs.data_ptr<int64_t>()[i]);
  p.peers.rank = int(rank);
  p.peers.world = int(world);
  p.digest = uint32_t(digest);
  p.timeout_ns = uint64_t(timeout_ns);
  p.record = reinterpret_cast<uint32_t*>(record);
#ifdef FLASHINFER_CPU
  (void)on_device;  // calls on the CPU compare what the ranks ask for anyway
#else
  DeviceGuard guard(on_device.device());
  CheckStatus(OP, flashinfer::comm::Check(p, get_stream(on_device.device())));
#endif
}
