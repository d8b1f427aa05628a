// SPDX-License-Identifier: Apache-2.0
// Launchers of draws and softmax: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include "sampling_arguments.h"
#if defined(FLASHINFER_CPU)
#include <flashinfer/sampling_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/sampling/softmax.cuh>
#include <flashinfer/sampling/speculative.cuh>
#include <flashinfer/sampling/sample_unfiltered.cuh>
#include <flashinfer/sampling/sample_many_per_row.cuh>
#include <flashinfer/sampling/sample_top_k_top_p.cuh>
#endif
// clang-format on

using namespace flashinfer;
using namespace flashinfer::sampling;

namespace {

constexpr DLDataType dl_uint64{kDLUInt, 64, 1};

/// Sampling method, in the numbering that Python passes. NameOf maps a method to the public function for error
/// messages.
enum Method { kFromAll, kFromMinP, kFromTopP, kFromTopK, kFromJoint, kFromTopKFirst };

const char* NameOf(int64_t method, bool is_logits) {
  switch (method) {
    case kFromAll:
      return is_logits ? "sampling_from_logits" : "sampling_from_probs";
    case kFromMinP:
      return "min_p_sampling_from_probs";
    case kFromTopP:
      return "top_p_sampling_from_probs";
    case kFromTopK:
      return "top_k_sampling_from_probs";
    default:
      return is_logits ? "top_k_top_p_sampling_from_logits" : "top_k_top_p_sampling_from_probs";
  }
}

PerRow<uint64_t> Seed(const char* op, const char* name, const Optional<TensorView>& values, int64_t value,
                      const TensorView& input) {
  if (!values.has_value()) return Constant(uint64_t(value));
  Expect(op, name, *values).same_device(input, "the input").dtype({dl_int64, dl_uint64}).rank(1).contiguous();
  return {(*values).data_ptr<uint64_t>(), 0, (*values).size(0)};
}

/// Validate `indices`, the input row of each output, and set them in `p`.
void ReadIndices(const char* op, const char* name, const TensorView& indices, const TensorView& input,
                 SampleParams& p) {
  Expect(op, "indices", indices).same_device(input, name).dtype({dl_int32, dl_int64}).rank(1).contiguous();
  p.indices = indices.data_ptr();
  p.wide = indices.dtype().bits == 64;
  p.batch = indices.size(0);
  if (p.rows == 0 && p.batch > 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have rows for " << p.batch
                                    << " indices, got shape[0] = 0";
  }
#ifdef FLASHINFER_CPU  // CUDA kernels clamp an index to the valid range: a check here would have to synchronise
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t row = p.wide ? indices.data_ptr<int64_t>()[i] : indices.data_ptr<int32_t>()[i];
    if (row < 0 || row >= p.rows) {
      FLASHINFER_THROW(ArgumentError) << op << ": indices[" << i << "] must be a row of " << name << ", which has "
                                      << p.rows << ", got " << row;
    }
  }
#endif
}

FilterParams FilterOfMethod(int64_t method, PerRow<int32_t> k, PerRow<float> probability) {
  switch (method) {
    case kFromAll:
      return FilterOf(Filter::kNone, Constant(0), Constant(0.f), false);
    case kFromMinP:
      return FilterOf(Filter::kMinP, Constant(0), probability, true);
    case kFromTopP:
      return TopP(probability);
    case kFromTopK:
      return TopK(k, true);
    default:
      return FilterOf(method == kFromJoint ? Filter::kBoth : Filter::kTopKFirst, k, probability, false);
  }
}

/// Replace the logits in `p` by their probabilities, written to `probs`.
void TakeSoftmax(const char* op, float* probs, SampleParams& p, Stream stream) {
  RowParams<float> rows{};
  rows.input = p.input;
  rows.out = probs;
  rows.input_stride = p.row_stride;
  rows.rows = p.rows;
  rows.vocab = rows.out_stride = p.vocab;
  rows.temperature = Constant(1.f);
  rows.enable_pdl = p.enable_pdl;
  CheckStatus(op, SoftmaxRows<float>(rows, stream));
  p.input = probs;
  p.row_stride = p.vocab;
  p.is_logits = false;
}

}  // namespace

void softmax(TensorView out, TensorView logits, Optional<TensorView> temperatures, double temperature,
             bool enable_pdl) {
  const char* op = "softmax";
  CheckRows(op, "logits", logits, {dl_float32});
  Expect(op, "out", out).same_device(logits, "logits").dtype({dl_float32}).same_shape(logits, "logits").contiguous();
  RowParams<float> p = RowsOf<float>(out, logits);
  p.temperature = Parameter<float>(op, "temperature", temperatures, float(temperature), dl_float32, logits);
  p.enable_pdl = UsePdl(enable_pdl, logits.device());
  if (p.rows == 0) return;
  DeviceGuard guard(logits.device());
  CheckStatus(op, SoftmaxRows<float>(p, get_stream(logits.device())));
}

void sample(TensorView out, Optional<TensorView> valid, TensorView input, Optional<TensorView> indices, bool is_logits,
            int64_t method, Optional<TensorView> top_ks, int64_t top_k, Optional<TensorView> top_ps, double top_p,
            Optional<TensorView> seeds, int64_t seed, Optional<TensorView> offsets, int64_t offset) {
  const char *op = NameOf(method, is_logits), *name = is_logits ? "logits" : "probs";
  CheckRows(op, name, input, {dl_float32});
  SampleParams p{};
  p.input = input.data_ptr<float>();
  p.row_stride = input.stride(0);
  p.rows = p.batch = input.size(0);
  p.vocab = input.size(1);
  p.is_logits = is_logits;
  if (indices.has_value()) ReadIndices(op, name, *indices, input, p);
  Expect(op, "out", out)
      .same_device(input, name)
      .dtype({p.wide ? dl_int64 : dl_int32})
      .rank(1)
      .dim(0, p.batch, "one for each output")
      .contiguous();
  p.out = out.data_ptr();
  if (valid.has_value()) {
    Expect(op, "valid", *valid)
        .same_device(input, name)
        .dtype({dl_bool})
        .rank(1)
        .dim(0, p.batch, "one for each output");
    p.valid = static_cast<uint8_t*>((*valid).data_ptr());
  }
  if (p.batch == 0) return;
  const auto k = TopKParameter(op, top_ks, top_k, input);
  const char* const second = method == kFromMinP ? "min_p" : "top_p";
  const auto probability = Parameter<float>(op, second, top_ps, float(top_p), dl_float32, input);
  p.filter = FilterOfMethod(method, k, probability);
  p.random = {Seed(op, "seed", seeds, seed, input), Seed(op, "offset", offsets, offset, input)};
  p.enable_pdl = UsePdl(true, input.device());
  DeviceGuard guard(input.device());
  const Stream stream = get_stream(input.device());
  const bool is_searched = p.filter.filter == Filter::kBoth || p.filter.filter == Filter::kTopKFirst;
  Optional<Tensor> probs;  // softmax of logits, computed first: exponentials inside the search took twice as long
  if (is_searched && is_logits) {
    probs = alloc_tensor({p.rows, p.vocab}, dl_float32, input.device());
    TakeSoftmax(op, static_cast<float*>((*probs).data_ptr()), p, stream);
  }
  if (const int64_t words = SampleTableSize(p)) {
    const Tensor table = alloc_tensor({words}, dl_int64, input.device());
    CheckStatus(op, SampleByTable(p, static_cast<uint64_t*>(table.data_ptr()), stream));
  } else {
    CheckStatus(op, is_searched ? SampleTop(p, stream) : Sample(p, stream));
  }
}

void chain_speculative_sampling(TensorView out, TensorView accepted, TensorView emitted, TensorView draft_probs,
                                TensorView draft_token_ids, TensorView target_probs, Optional<TensorView> seeds,
                                int64_t seed, Optional<TensorView> offsets, int64_t offset) {
  const char* op = "chain_speculative_sampling";
  Expect(op, "target_probs", target_probs).on_device().dtype({dl_float32}).rank(3).contiguous();
  Expect(op, "draft_probs", draft_probs).same_device(target_probs, "target_probs").dtype({dl_float32}).rank(3);
  const int64_t batch = draft_probs.size(0), drafts = draft_probs.size(1), vocab = draft_probs.size(2);
  Expect(op, "draft_probs", draft_probs).contiguous();
  Expect(op, "target_probs", target_probs)
      .dim(0, batch, "draft_probs.shape[0]")
      .dim(1, drafts + 1, "draft_probs.shape[1] + 1")
      .dim(2, vocab, "draft_probs.shape[2]");
  if (vocab < 1 || vocab > sampling::MAX_VOCAB) {
    FLASHINFER_THROW(ArgumentError) << op << ": draft_probs.shape[2] must be 1 to " << sampling::MAX_VOCAB << ", got "
                                    << vocab;
  }
  Expect(op, "draft_token_ids", draft_token_ids)
      .same_device(target_probs, "target_probs")
      .dtype({dl_int32})
      .rank(2)
      .dim(0, batch, "draft_probs.shape[0]")
      .dim(1, drafts, "draft_probs.shape[1]")
      .contiguous();
  Expect(op, "out", out).same_device(target_probs, "target_probs").dtype({dl_int32}).rank(2).contiguous();
  for (const TensorView* counter : {&accepted, &emitted}) {
    Expect(op, counter == &accepted ? "maybe_output_accepted_token_num" : "maybe_output_emitted_draft_token_num",
           *counter)
        .same_device(target_probs, "target_probs")
        .dtype({dl_int32})
        .rank(1)
        .dim(0, batch, "draft_probs.shape[0]")
        .contiguous();
  }
  SpeculativeParams p{};
  p.draft_probs = draft_probs.data_ptr<float>();
  p.draft_ids = draft_token_ids.data_ptr<int32_t>();
  p.target_probs = target_probs.data_ptr<float>();
  p.out = out.data_ptr<int32_t>();
  p.accepted = accepted.data_ptr<int32_t>();
  p.emitted = emitted.data_ptr<int32_t>();
  p.batch = batch;
  p.drafts = drafts;
  p.vocab = vocab;
  p.random = {Seed(op, "seed", seeds, seed, target_probs), Seed(op, "offset", offsets, offset, target_probs)};
  if (batch == 0) return;
  DeviceGuard guard(target_probs.device());
  CheckStatus(op, ChainSpeculativeSample(p, get_stream(target_probs.device())));
}
