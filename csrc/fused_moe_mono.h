// SPDX-License-Identifier: Apache-2.0
// Layers for few tokens on CUDA, in one launch.
#pragma once
#include "fused_moe_arguments.h"
// clang-format off
#include <flashinfer/moe/mono/shape.h>
#include <flashinfer/device/sm_count.h>
// clang-format on

namespace moe_arguments {

/// Enqueue a layer as one kernel, which routes its token if there are logits. Returns false, with nothing enqueued, if its
/// stages must run one by one, or take less time.
inline bool EnqueueMono(const Tensors& x, const LayerSizes& s, const void* const* scales, void* hidden_values,
                        const ActivationParams& activation, int64_t first_expert, bool adds_bias2, bool enable_pdl,
                        const MonoRouting& routing = {}) {
  if (!SupportsMono(s, x.input.stride(0))) return false;
  if (!PrefersMono(s, flashinfer::device::SmCount(x.input.device().device_id))) return false;
  MonoParams p{};
  p.input = x.input.data_ptr(), p.input_stride = x.input.stride(0), p.element = ElementOf(x.input);
  p.output = x.output.data_ptr(), p.output_stride = x.output.stride(0), p.output_element = ElementOf(x.output);
  p.experts = x.experts.has_value() ? x.experts.value().data_ptr<int32_t>() : nullptr;
  p.scales = x.token_scales.has_value() ? x.token_scales.value().data_ptr<float>() : nullptr;
  p.tokens = int32_t(s.tokens), p.top_k = int32_t(s.top_k);
  p.first_expert = int32_t(first_expert), p.num_experts = int32_t(s.num_experts);
  p.hidden = int32_t(s.hidden), p.intermediate = int32_t(s.intermediate);
  p.fc1 = x.fc1.data_ptr(), p.fc2 = x.fc2.data_ptr(), p.fc1_scales = scales[0], p.fc2_scales = scales[1];
  p.bias1 = Bias("fc1_expert_biases", x.bias1, x, s.num_experts, s.fc1_rows());
  p.bias2 = Bias("fc2_expert_biases", x.bias2, x, s.num_experts, s.hidden);
  if (!adds_bias2) p.bias2 = nullptr;
  if (s.format == Format::kFp8Tensor) {
    p.factors[0] = ExpertVector("the factor of GEMM 1 in quant_scales", x.factor1, x.input, s.num_experts);
    p.factors[1] = ExpertVector("the factor of GEMM 2 in quant_scales", x.factor2, x.input, s.num_experts);
    p.has_quantizer_of_expert = x.quant2.has_value() && x.quant2.value().numel() != 1;
    p.quantizers = ExpertVector("the quantisation scale of GEMM 2 in quant_scales", x.quant2, x.input,
                                p.has_quantizer_of_expert ? s.num_experts : 1);
    if (p.quantizers == nullptr) return false;
  }
  p.activation = activation;
  p.hidden_values = hidden_values;
  p.enable_pdl = enable_pdl, p.routing = routing;
  const auto stream = get_stream(x.input.device());
  const flashinfer::Status status = s.format == Format::kPlain       ? MonoPlain(p, stream)
                                    : s.format == Format::kFp8Block  ? MonoFp8Block(p, stream)
                                    : s.format == Format::kFp8Tensor ? MonoFp8Few(p, false, stream)
                                                                     : MonoMxfp4(p, stream);
  if (status == cudaErrorNotSupported) return false;
  CheckStatus(OP, status);
  return true;
}

}  // namespace moe_arguments
