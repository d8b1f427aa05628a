// SPDX-License-Identifier: Apache-2.0
// A whole mixture of experts for few tokens in one launch on CUDA (kernel.cuh): parameters, and the layers that it takes.
#pragma once
#include "../route.h"
#include "../workspace.h"

namespace flashinfer {
namespace fused_moe {

constexpr int64_t MONO_MAX_PAIRS = 128;  // what the kernel's tables hold
constexpr int64_t MONO_TOKENS = 8;       // at most, of a layer of 16-bit or e4m3 weights that takes this kernel

namespace mono {

/// Warps of a block, and stages of 2 KB of each warp's ring: of 16-bit weights, of e4m3 weights, and of MXFP4 weights and
/// one token.
constexpr int PLAIN_WARPS = 16, PLAIN_STAGES = 4;
constexpr int FP8_WARPS = 16, FP8_STAGES = 4;
constexpr int MXFP4_WARPS = 16, MXFP4_STAGES = 3;

}  // namespace mono

/// Routing by the kernel itself, which finds experts and scales if there are logits.
struct MonoRouting {
  const void* logits = nullptr;  // (tokens, num_experts) bf16
  int64_t logit_stride = 0;
  MoeScore score = MoeScore::kSoftmax;
  MoeWeight weight = MoeWeight::kScore;
};

struct MonoParams {
  const void* input;  // (tokens, hidden)
  int64_t input_stride;
  const int32_t* experts;  // (tokens, top_k) global ids
  const float* scales;     // (tokens, top_k) or null = 1
  int32_t tokens, top_k, first_expert, num_experts, hidden, intermediate;
  const void *fc1, *fc2;                // (num_experts, rows, columns)
  const void *fc1_scales, *fc2_scales;  // null for formats without scales
  const void *bias1, *bias2;            // (num_experts, rows) in the output's element, or null
  ActivationParams activation;
  void* hidden_values;  // (tokens * top_k, intermediate) of the input's 16-bit element, memory between the products
  void* output;         // (tokens, hidden)
  int64_t output_stride;
  Element element, output_element;
  bool enable_pdl;
  MonoRouting routing;           // with logits, experts and scales are not read and first_expert is 0
  const float* factors[2];       // factors of the sums of both products by expert, or null = 1; e4m3 per tensor
  const float* quantizers;       // factors of hidden values before their rounding, with them
  bool has_quantizer_of_expert;  // one per expert, not one for all
};

/// Return true if a layer can be given to this kernel: few tokens of 16-bit or e4m3 weights, or one of MXFP4, whose stages
/// take less time from two tokens on; rows of 16 bytes. Other layers are computed in stages.
inline bool SupportsMono(const LayerSizes& s, int64_t input_stride) {
  const bool is_plain = s.format == Format::kPlain, is_tensor = s.format == Format::kFp8Tensor;
  const bool is_fp8 = is_tensor || s.format == Format::kFp8Block;
  if (!is_plain && !is_fp8 && s.format != Format::kMxfp4) return false;
  if (s.tokens > (is_plain || is_fp8 ? MONO_TOKENS : 1) || s.pairs() > MONO_MAX_PAIRS) return false;
  return s.intermediate > 0 && input_stride % (is_tensor ? 16 : 8) == 0;
}

/// Return true if a layer that SupportsMono takes less time so than in stages, on a GPU of `sms` SMs. Few tokens of
/// e4m3 do if GEMM 1 of the stages, in tiles of 128 weights for each pair, has at most a third more tiles than there
/// are SMs.
inline bool PrefersMono(const LayerSizes& s, int sms) {
  const bool is_few = s.format == Format::kFp8Tensor || (s.format == Format::kFp8Block && s.tokens > 1);
  return !is_few || 3 * s.expected_pairs() * ((s.fc1_rows() + 127) / 128) <= 4 * sms;
}

/// Return true if the kernel of a layer that SupportsMono can route its token too.
inline bool SupportsRouting(const LayerSizes& s) {
  return s.format == Format::kFp8Block && s.tokens == 1 && s.num_experts <= MOE_ROUTE_MAX_EXPERTS && s.top_k >= 1 &&
         s.top_k <= MOE_ROUTE_MAX_TOP_K && s.top_k <= s.num_experts;
}

/// Return the bytes from the beginning of the workspace at which hidden values lie: 16-bit numbers, also where operand 2 has
/// codes of 8 bits.
inline int64_t MonoHiddenOffset(const LayerSizes& s, const Workspace& w) {
  return s.format == Format::kFp8Block ? w.sums1 : w.operand2;
}

/// Enqueue a layer that SupportsMono, by the format of its weights; with logits, one that SupportsRouting. Return
/// cudaErrorNotSupported, with nothing enqueued, on a device that cannot run it (one before SM80 or with less shared memory
/// than the rings take), and for one token of e4m3 blocks or MXFP4 with more than 32 slots.
Status MonoPlain(const MonoParams& params, Stream stream);
Status MonoFp8Block(const MonoParams& params, Stream stream);
/// Up to 8 tokens with e4m3 weights: scales of blocks (called by MonoFp8Block), or factors of experts.
Status MonoFp8Few(const MonoParams& params, bool is_block, Stream stream);
Status MonoMxfp4(const MonoParams& params, Stream stream);

}  // namespace fused_moe
}  // namespace flashinfer
