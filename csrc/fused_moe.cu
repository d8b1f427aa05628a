// SPDX-License-Identifier: Apache-2.0
// Launcher of the mixture of experts: checks, one workspace, and all stages on the caller's stream.
#include "fused_moe_arguments.h"
// clang-format off
#include "stream_memory.h"
#if defined(FLASHINFER_CPU)
#include <flashinfer/moe/cpu/product.h>
#include <flashinfer/moe/cpu/layer.h>
#include <flashinfer/moe/cpu/sort.h>
#else
#include "fused_moe_mono.h"
#include "fused_moe_product.h"
#endif
// clang-format on

using namespace moe_arguments;
using tvm::ffi::Function;

namespace {

#if defined(FLASHINFER_CPU)
constexpr bool IS_CPU = true;
#else
constexpr bool IS_CPU = false;
#endif

/// Return true if GEMM 1 applies the activation, so that its sums are never stored: SM90, where hidden values are
/// rounded to the operand's element alone or with one factor.
bool ActivatesInProduct(const LayerSizes& s, ActivationType type, bool use_sm90) {
  const Rounding rounding = RoundingOf(s.format, 2);
  return use_sm90 && (rounding == Rounding::kElement || rounding == Rounding::kFactor) &&
         (type == ActivationType::kSwiglu || type == ActivationType::kSwigluBias);
}

/// Choose the elements of sums. Sums 1 are fp32, but for block-scaled layers, which are defined with bf16. Sums 2, of
/// which a layer stores top_k rows per token, have the output's element on CUDA, because their traffic counts at every
/// size. The general product has no factors of experts: sums of raw codes, which fp16 could not hold, stay fp32.
LayerSizes WithSums(LayerSizes s, ActivationType type, bool use_sm90, Element output) {
  s.sums1 = s.format == Format::kFp8Block ? Element::kBFloat16 : Element::kFloat32;
  s.sums2 = !IS_CPU && (use_sm90 || s.format == Format::kPlain) ? output : Element::kFloat32;
  s.has_wide_codes = !IS_CPU && s.format == Format::kInt4Fp8;
  s.has_sums1 = !ActivatesInProduct(s, type, use_sm90);
  return s;
}

#if defined(FLASHINFER_CPU)
/// Products on the CPU, with the interface of GroupedProduct.
struct CpuProduct {
  Weights weights[2];
  int64_t weights_per_tile[2] = {WEIGHTS_PER_TILE, WEIGHTS_PER_TILE};

  bool MultiplyAndActivate(const Operand&, const SortedPairs&, const Sums&, const ActivationParams&,
                           const Operand&) const {
    return false;
  }
  bool GatherAndActivate(const PermuteParams&, const Sums&, const ActivationParams&, const Operand&,
                         flashinfer::Stream) const {
    return false;
  }
  void Multiply(const Operand& a, int index, const SortedPairs& pairs, Sums* d) const {
    flashinfer::fused_moe::Multiply(a, weights[index - 1], pairs, *d, weights_per_tile[index - 1]);
  }
};

int64_t CheckedTile(int64_t weights) {
  if (weights <= 0 || weights % WEIGHTS_PER_TILE != 0 || weights > MOST_WEIGHTS_PER_TILE) {
    Refuse("weights per tile must be a multiple of " + std::to_string(WEIGHTS_PER_TILE) + " of at most " +
           std::to_string(MOST_WEIGHTS_PER_TILE) + ", got " + std::to_string(weights));
  }
  return weights;
}
#endif

/// Return the buffer: the caller's, if it is large enough, or one that `memory` keeps.
char* Buffer(const Optional<TensorView>& given, const TensorView& input, int64_t bytes,
             flashinfer::CallMemory* memory) {
  constexpr int64_t KEPT_BYTES = 16 << 20;  // enough for 64 tokens; more take the GPU longer than the host
  if (!given.has_value()) return static_cast<char*>(memory->Take(input.device(), bytes, KEPT_BYTES));
  const TensorView& x = given.value();
  if (x.dtype().bits != 8 || (x.dtype().code != kDLInt && x.dtype().code != kDLUInt)) {
    Refuse("workspace_buffer dtype must be int8 or uint8, got " + DTypeName(x.dtype()));
  }
  if (x.device().device_type != input.device().device_type) {
    Refuse("workspace_buffer must be a " + std::string(input.device().device_type == kDLCUDA ? "CUDA" : "CPU") +
           " tensor, got one on " + DeviceName(x.device()));
  }
  if (x.ndim() != 1) Refuse("workspace_buffer must be 1-D, got " + std::to_string(x.ndim()) + " dimensions");
  if (!x.IsContiguous()) Refuse("workspace_buffer must be contiguous, got stride " + std::to_string(x.stride(0)));
  if (!SameDevice(x.device(), input.device())) {
    Refuse("workspace_buffer device " + DeviceName(x.device()) + " does not match input device " +
           DeviceName(input.device()));
  }
  const int64_t alignment = input.device().device_type == kDLCUDA ? 128 : 64;  // what torch gives on either
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % alignment != 0) {
    Refuse("workspace_buffer must be aligned to " + std::to_string(alignment) + " bytes");
  }
  if (x.numel() < bytes) {
    Refuse("workspace_buffer too small: it must have " + std::to_string(bytes) + " bytes, got " +
           std::to_string(x.numel()));
  }
  return static_cast<char*>(x.data_ptr());
}

Operand OperandAt(char* buffer, const LayerSizes& s, const Workspace& w, int product, Element element) {
  Operand x{};
  x.rounding = RoundingOf(s.format, product);
  x.element = s.format == Format::kPlain || s.format == Format::kMxfp4 ? element
              : s.has_wide_codes                                       ? Element::kBFloat16
                                                                       : Element::kE4M3;
  x.data = buffer + (product == 1 ? w.operand1 : w.operand2);
  x.columns = product == 1 ? s.hidden : s.intermediate;
  x.scales = reinterpret_cast<float*>(buffer + (product == 1 ? w.scales1 : w.scales2));
  x.scale_stride = w.scale_stride;
  return x;
}

/// Sort the pairs by expert and copy tokens to the rows of GEMM 1, unless `gather` enqueues that product without copies;
/// return the tables of pairs.
template <typename Gather>
SortedPairs SortAndCopy(const Tensors& x, const LayerSizes& s, char* buffer, const Workspace& w, int64_t first_expert,
                        const Operand& to, bool has_clusters, bool enable_pdl, flashinfer::Stream stream,
                        const Gather& gather) {
  if (s.pairs() >= (int64_t{1} << 31) - (1 << 20))
    Refuse("tokens times top_k must be below 2^31, got " + std::to_string(s.pairs()));
  const auto ints = [&](int64_t offset) { return reinterpret_cast<int32_t*>(buffer + offset); };
  flashinfer::MoeSortParams p{};
  p.experts = x.experts.value().data_ptr<int32_t>();
  p.pairs = int32_t(s.pairs());
  p.first_expert = int32_t(first_expert), p.num_experts = int32_t(s.num_experts);
  p.align = 1;
  p.expert_offsets = ints(w.expert_offsets);
  p.pair_to_row = ints(w.pair_to_row), p.row_to_pair = ints(w.row_to_pair);
  p.max_rows = p.pairs;
  p.workspace = ints(w.sort), p.counters = ints(w.counters);
  p.enable_pdl = enable_pdl, p.has_clusters = has_clusters;
  const SortedPairs pairs{p.experts,        p.expert_offsets, p.pair_to_row, p.row_to_pair, s.tokens,
                          int32_t(s.top_k), p.first_expert,   p.num_experts, p.counters};
  const PermuteParams copies{x.input.data_ptr(), ElementOf(x.input), x.input.stride(0), pairs, to, enable_pdl};
#if !defined(FLASHINFER_CPU)
  if (SupportsOneLaunch(s.pairs(), s.num_experts, to.rounding)) {
    CheckStatus(OP, SortAndPermute(p, copies, stream));
    return pairs;
  }
#endif
  CheckStatus(OP, flashinfer::MoeSort(p, stream));
  if (!gather(copies)) CheckStatus(OP, Permute(copies, stream));
  return pairs;
}

/// Run all stages. `product` enqueues the products.
template <typename Product>
void RunStages(const Tensors& x, const LayerSizes& s, char* buffer, const Workspace& w, ActivationParams activation,
               int64_t first_expert, bool adds_bias2, bool has_clusters, bool enable_pdl, const Product& product) {
  const auto stream = get_stream(x.input.device());
  const int64_t experts = s.num_experts;
  const bool by_row = s.format == Format::kMxfp4Fp8;
  Operand a1 = OperandAt(buffer, s, w, 1, ElementOf(x.input)), a2 = OperandAt(buffer, s, w, 2, ElementOf(x.input));
  Sums d1{buffer + w.sums1, s.sums1, s.fc1_rows()}, d2{buffer + w.sums2, s.sums2, s.hidden};
  d1.expert_factor = ExpertVector("the factor of GEMM 1 in quant_scales", x.factor1, x.input, experts);
  d2.expert_factor = ExpertVector("the factor of GEMM 2 in quant_scales", x.factor2, x.input, experts);
  d1.row_factor = by_row ? a1.scales : nullptr, d2.row_factor = by_row ? a2.scales : nullptr;
  d1.bias = Bias("fc1_expert_biases", x.bias1, x, experts, d1.columns);
  d2.bias = Bias("fc2_expert_biases", x.bias2, x, experts, d2.columns);
  if (!adds_bias2) d2.bias = nullptr;
  d1.bias_element = d2.bias_element = ElementOf(x.output);
  if (s.format == Format::kFp8Tensor) {
    if (!x.quant2.has_value()) Refuse("quant_scales must have 4 tensors, got None for the second");
    const TensorView& q = x.quant2.value();
    a2.is_factor_of_expert = q.numel() != 1;
    a2.factor = ExpertVector("the quantisation scale of GEMM 2 in quant_scales", x.quant2, x.input,
                             q.numel() == 1 ? 1 : experts);
  } else if (s.format == Format::kInt4Fp8) {
    a1.column_factors = ColumnFactors("the activation scale of GEMM 1 in quant_scales", x.quant1, x.input, s.hidden);
    a2.column_factors =
        ColumnFactors("the activation scale of GEMM 2 in quant_scales", x.quant2, x.input, s.intermediate);
  }
  bool is_activated = false;
  const auto gather = [&](const PermuteParams& tokens) {
    is_activated = product.GatherAndActivate(tokens, d1, activation, a2, stream);
    return is_activated;
  };
  const SortedPairs pairs = SortAndCopy(x, s, buffer, w, first_expert, a1, has_clusters, enable_pdl, stream, gather);
  if (!is_activated && !product.MultiplyAndActivate(a1, pairs, d1, activation, a2)) {
    product.Multiply(a1, 1, pairs, &d1);
    CheckStatus(OP, Activate({d1, activation, pairs, a2, enable_pdl}, stream));
  }
  product.Multiply(a2, 2, pairs, &d2);
  const float* scales = x.token_scales.has_value() ? x.token_scales.value().data_ptr<float>() : nullptr;
  CheckStatus(
      OP,
      Finalize({d2, pairs, scales, x.output.data_ptr(), ElementOf(x.output), x.output.stride(0), enable_pdl}, stream));
}

}  // namespace

int64_t fused_moe_workspace_size(int64_t tokens, int64_t top_k, int64_t hidden, int64_t intermediate, int64_t experts,
                                 int64_t format, int64_t activation, bool use_sm90) {
  LayerSizes s{tokens, top_k, hidden, intermediate, experts};
  const auto type = ActivationType(activation);
  s.format = Format(format), s.is_gated = IsGated(type);
  return LayOut(WithSums(s, type, use_sm90, Element::kBFloat16)).bytes;  // fp16 has as many bytes
}

void fused_moe(TensorView output, TensorView input, TensorView experts, Optional<TensorView> token_scales,
               TensorView fc1, TensorView fc2, Optional<TensorView> bias1, Optional<TensorView> bias2,
               Optional<TensorView> scale1, Optional<TensorView> scale2, Optional<TensorView> factor1,
               Optional<TensorView> factor2, Optional<TensorView> quant1, Optional<TensorView> quant2,
               Optional<TensorView> alpha, Optional<TensorView> beta, Optional<TensorView> limit,
               Optional<TensorView> situ_beta, Optional<TensorView> situ_linear_beta, Optional<TensorView> workspace,
               [[maybe_unused]] Optional<Function> product, int64_t format_number, int64_t activation_number,
               int64_t first_expert, bool adds_bias2, bool use_sm90, bool enable_pdl, int64_t ranks) {
  const Tensors x{output, input,  experts, token_scales, fc1,     fc2,    bias1,
                  bias2,  scale1, scale2,  factor1,      factor2, quant1, quant2};
  const Format format = Format(format_number);
  ActivationParams activation{ActivationType(activation_number)};
  CheckDtypes(x, format);
  LayerSizes s = WithSums(SizesOf(x, format, activation.type), activation.type, use_sm90, ElementOf(x.output));
  s.ranks = std::max<int64_t>(1, ranks);
  if (bias1.has_value() != bias2.has_value()) Refuse("fc1_expert_biases and fc2_expert_biases must be given together");
  const int64_t n = s.num_experts;
  activation.alpha = ExpertVector("swiglu_alpha", alpha, input, n);
  activation.beta = ExpertVector("swiglu_beta", beta, input, n);
  activation.limit = ExpertVector("swiglu_limit", limit, input, n);
  activation.situ_beta = ExpertVector("situ_beta", situ_beta, input, n);
  activation.situ_linear_beta = ExpertVector("situ_linear_beta", situ_linear_beta, input, n);
  const void* scales[] = {
      WeightScales("the scale of fc1_expert_weights", scale1, input, format, n, s.fc1_rows(), s.hidden),
      WeightScales("the scale of fc2_expert_weights", scale2, input, format, n, s.hidden, s.intermediate)};
  const Workspace w = LayOut(s);
  DeviceGuard guard(input.device());
  flashinfer::CallMemory memory;
  char* buffer = Buffer(workspace, input, w.bytes, &memory);
  Expect(OP, "output", output).apart(workspace, "workspace_buffer");
  Expect(OP, "input", input).apart(workspace, "workspace_buffer");
  if (s.tokens == 0 || s.hidden == 0) return;
  const bool pdl = UsePdl(enable_pdl, input.device());
#if defined(FLASHINFER_CPU)
  CpuProduct products{{{fc1.data_ptr(), format, ElementOf(input), s.fc1_rows(), s.hidden, scales[0]},
                       {fc2.data_ptr(), format, ElementOf(input), s.hidden, s.intermediate, scales[1]}}};
  for (int i = 0; i < 2 && product.has_value(); ++i) {  // tiles that were measured (fused_moe/cutlass/tuning.py)
    products.weights_per_tile[i] = CheckedTile(product.value()(i + 1).cast<int64_t>());
  }
#else
  void* const hidden_values = buffer + MonoHiddenOffset(s, w);
  const bool has_mono = use_sm90 || format != Format::kFp8Tensor;  // e4m3 is converted by SM89 and later
  if (has_mono && EnqueueMono(x, s, scales, hidden_values, activation, first_expert, adds_bias2, pdl)) return;
  const GroupedProduct products{x, s, scales, product, use_sm90, pdl};
#endif
  RunStages(x, s, buffer, w, activation, first_expert, adds_bias2, use_sm90, pdl, products);
}

#if !defined(FLASHINFER_CPU)
/// Route one token by its logits and compute a layer of e4m3 blocks with Swiglu, in one kernel. Returns false, with nothing
/// enqueued, for a layer that takes several; `workspace` is not used if it is too small.
bool mono_moe(TensorView output, TensorView input, TensorView logits, TensorView fc1, TensorView fc2, TensorView scale1,
              TensorView scale2, Optional<TensorView> workspace, int64_t top_k, bool is_sigmoid, bool is_normalized) {
  const Format format = Format::kFp8Block;
  const ActivationParams activation{ActivationType::kSwiglu};
  const Optional<TensorView> none;
  const Tensors x{output, input, none, none, fc1, fc2, none, none, scale1, scale2};
  CheckDtypes(x, format);
  const LayerSizes s = SizesOf(x, format, activation.type, top_k);
  const char* const name = "router_logits";
  Expect("mono_moe", name, logits).same_device(input, "activations_in").dtype({dl_bfloat16}).rank(2);
  Expect("mono_moe", name, logits).dim(0, s.tokens, "tokens of activations_in").dim(1, s.num_experts, "experts");
  Expect("mono_moe", name, logits).last_dim_contiguous();
  if (!SupportsRouting(s) || !SupportsMono(s, input.stride(0))) return false;
  const int64_t n = s.num_experts;
  const void* scales[] = {
      WeightScales("the scale of fc1_expert_weights", scale1, input, format, n, s.fc1_rows(), s.hidden),
      WeightScales("the scale of fc2_expert_weights", scale2, input, format, n, s.hidden, s.intermediate)};
  if (s.hidden == 0) return true;
  const int64_t bytes = s.pairs() * s.intermediate * 2;
  DeviceGuard guard(input.device());
  flashinfer::CallMemory memory;
  void* const hidden_values =
      Buffer(workspace.has_value() && workspace.value().numel() >= bytes ? workspace : none, input, bytes, &memory);
  const MonoRouting routing{logits.data_ptr(), logits.stride(0),
                            is_sigmoid ? flashinfer::MoeScore::kSigmoid : flashinfer::MoeScore::kSoftmax,
                            is_normalized ? flashinfer::MoeWeight::kNormalized : flashinfer::MoeWeight::kScore};
  return EnqueueMono(x, s, scales, hidden_values, activation, 0, true, false, routing);
}
#endif
