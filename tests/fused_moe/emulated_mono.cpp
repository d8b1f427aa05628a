// SPDX-License-Identifier: Apache-2.0
// A layer of experts on the CPU with the kernel for few tokens; called by test_emulated_mono.py.
#include <flashinfer/moe/mono/fp8_few.cuh>
#include <flashinfer/moe/mono/fp8_one.cuh>
#include <flashinfer/moe/mono/mxfp4_one.cuh>
#include <flashinfer/moe/mono/plain.cuh>

using namespace flashinfer;
using namespace flashinfer::fused_moe;

/// Compute a layer on a device of so many SMs; `x` has the fields in the order below.
EMULATION_EXPORT int layer(int64_t multiprocessors, const int64_t* x) {
  const auto next = [&] { return *x++; };
  const auto number = [&] { return int32_t(*x++); };
  const auto pointer = [&] { return reinterpret_cast<void*>(*x++); };
  const auto floats = [&] { return static_cast<const float*>(reinterpret_cast<void*>(*x++)); };
  MonoParams p{};
  p.tokens = number(), p.top_k = number(), p.num_experts = number(), p.first_expert = number();
  p.hidden = number(), p.intermediate = number();
  p.input = pointer(), p.input_stride = next();
  p.experts = static_cast<const int32_t*>(pointer()), p.scales = floats();
  p.fc1 = pointer(), p.fc2 = pointer(), p.fc1_scales = pointer(), p.fc2_scales = pointer();
  p.bias1 = pointer(), p.bias2 = pointer();
  p.hidden_values = pointer(), p.output = pointer(), p.output_stride = next();
  p.element = Element(next()), p.output_element = Element(next());
  p.activation.type = ActivationType(next());
  p.activation.alpha = floats(), p.activation.beta = floats(), p.activation.limit = floats();
  emulation::device.multiprocessors = int(multiprocessors);
  const auto format = Format(next());
  p.factors[0] = floats(), p.factors[1] = floats(), p.quantizers = floats();
  p.has_quantizer_of_expert = next() != 0;
  if (format == Format::kFp8Tensor) return int(MonoFp8Few(p, false, nullptr));
  if (format == Format::kPlain && p.tokens > MONO_TOKENS) {  // two tiles of tokens, which no layer takes
    return int(LaunchMono<mono::PlainWeights<__nv_bfloat16>, 2>(p, nullptr));
  }
  return int((format == Format::kPlain      ? MonoPlain
              : format == Format::kFp8Block ? MonoFp8Block
                                            : MonoMxfp4)(p, nullptr));
}

/// Return 1 if a layer is computed by one kernel on a GPU of 132 SMs. `ranks`: those that share its experts.
EMULATION_EXPORT int takes_one_kernel(int64_t format, int64_t tokens, int64_t top_k, int64_t inner, int64_t ranks) {
  LayerSizes s{tokens, top_k, 256, inner, 8};
  s.format = Format(format), s.is_gated = true, s.ranks = ranks;
  return SupportsMono(s, s.hidden) && PrefersMono(s, 132);
}
