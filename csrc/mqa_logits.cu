// SPDX-License-Identifier: Apache-2.0
// Launchers of index scores and of their schedule, for the CPU and for CUDA.
#include "mqa_logits_arguments.h"
// clang-format off
#if defined(FLASHINFER_CPU)
#include <flashinfer/indexer/ragged_mqa_logits_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/indexer/mqa_logits.cuh>
#include <flashinfer/indexer/ragged_mqa_logits.cuh>
#endif
// clang-format on

using namespace flashinfer;

namespace {

#ifdef FLASHINFER_CPU  // a CUDA kernel takes what lies outside for zeros: a check would have to wait for the device
void CheckValues(const MqaLogitsParams& p) {
  for (int b = 0; b < p.batch; ++b) {
    const int length = p.seq_lens[b * p.lens_stride];
    if (length > p.max_len) {
      FLASHINFER_THROW(ArgumentError) << indexer::SCORES << ": seq_lens[" << b << "] must be at most " << p.max_len
                                      << " (max_seq_len and block_tables), got " << length;
    }
    for (int i = 0; i < (length + p.block_size - 1) / p.block_size; ++i) {
      const int32_t page = p.block_tables[b * p.table_stride + i];
      if (page >= 0 && page < p.pages) continue;
      FLASHINFER_THROW(ArgumentError) << indexer::SCORES << ": block_tables[" << b << ", " << i << "] must be 0 to "
                                      << p.pages - 1 << ", got " << page;
    }
  }
}
#endif

}  // namespace

void mqa_logits(TensorView out, TensorView q, TensorView kv, TensorView weights, TensorView tables, TensorView lens,
                int64_t max_seq_len) {
  const MqaLogitsParams p = indexer::ParamsOf(out, q, kv, weights, tables, lens, max_seq_len, {});
  if (p.batch == 0 || p.next_n == 0) return;
#ifdef FLASHINFER_CPU
  CheckValues(p);
#endif
  const DeviceGuard guard(q.device());
  CheckStatus(indexer::SCORES, MqaLogits(p, get_stream(q.device())));
}

/// Scores of keys that are rows of one tensor: token t sees those from starts[t] up to ends[t].
void ragged_mqa_logits(TensorView out, TensorView q, TensorView k, TensorView scales, TensorView weights,
                       TensorView starts, TensorView ends) {
  const char* op = "fp8_ragged_mqa_logits";
  Expect(op, "q", q).on_device().rank(3).dtype({dl_float8_e4m3fn}).last_dim_contiguous();
  const int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2), keys = k.size(0);
  Expect(op, "k", k).same_device(q, "q").dtype({dl_float8_e4m3fn}).rank(2).dim(1, dim, "q.shape[2]");
  Expect(op, "k", k).last_dim_contiguous();
  Expect(op, "k_scales", scales).same_device(q, "q").dtype({dl_float32}).rank(1).dim(0, keys, "k.shape[0]");
  Expect(op, "weights", weights).same_device(q, "q").dtype({dl_float32}).rank(2).dim(0, tokens, "q.shape[0]");
  Expect(op, "weights", weights).dim(1, heads, "q.shape[1]");
  Expect(op, "k_starts", starts).same_device(q, "q").dtype({dl_int32}).rank(1).dim(0, tokens, "q.shape[0]");
  Expect(op, "k_starts", starts).contiguous();
  Expect(op, "k_ends", ends).same_device(q, "q").dtype({dl_int32}).rank(1).dim(0, tokens, "q.shape[0]").contiguous();
  Expect(op, "out", out).same_device(q, "q").dtype({dl_float32, dl_float16}).rank(2).last_dim_contiguous();
  Expect(op, "out", out).dim(0, tokens, "q.shape[0]").dim(1, keys, "k.shape[0]").distinct();
  Expect(op, "out", out).apart(q, "q").apart(k, "k").apart(scales, "k_scales").apart(weights, "weights");
  Expect(op, "out", out).apart(starts, "k_starts").apart(ends, "k_ends");
  RaggedMqaLogitsParams p{};
  p.q = q.data_ptr<float8_e4m3_t>(), p.k = k.data_ptr<float8_e4m3_t>();
  p.scales = scales.data_ptr<float>(), p.weights = weights.data_ptr<float>();
  p.starts = starts.data_ptr<int32_t>(), p.ends = ends.data_ptr<int32_t>();
  p.out = out.data_ptr();
  p.q_stride_n = q.stride(0), p.q_stride_h = q.stride(1), p.k_stride = k.stride(0), p.scales_stride = scales.stride(0);
  p.weights_stride = weights.stride(0), p.weights_stride_h = weights.stride(1), p.out_stride = out.stride(0);
  p.tokens = int32_t(tokens), p.heads = int32_t(heads), p.dim = int32_t(dim), p.keys = int32_t(keys);
  p.is_half = encode_dlpack_dtype(out.dtype()) == encode_dlpack_dtype(dl_float16);
  p.enable_pdl = UsePdl(true, q.device());
  if (tokens == 0) return;
#ifdef FLASHINFER_CPU
  for (int t = 0; t < p.tokens; ++t) {
    if (p.starts[t] >= 0 && p.ends[t] <= p.keys) continue;
    FLASHINFER_THROW(ArgumentError) << op << ": k_starts and k_ends must be 0 to " << p.keys << " (k.shape[0]), got "
                                    << p.starts[t] << " and " << p.ends[t] << " for token " << t;
  }
#endif
  const DeviceGuard guard(q.device());
  CheckStatus(op, RaggedMqaLogits(p, get_stream(q.device())));
}

void mqa_schedule(TensorView out, TensorView lens) {
  const char* op = "compute_paged_mqa_logits_schedule";
  Expect(op, "seq_lens", lens).on_device().rank(1).dtype({dl_int32});
  Expect(op, "out", out).same_device(lens, "seq_lens").dtype({dl_int32}).rank(2).dim(1, 2, "request, split");
  Expect(op, "out", out).contiguous().apart(lens, "seq_lens");
  if (out.size(0) < 2) {
    FLASHINFER_THROW(ArgumentError) << op << ": out.shape[0] must be at least 2 (blocks + 1), got " << out.size(0);
  }
  MqaScheduleParams p{};
  p.seq_lens = lens.data_ptr<int32_t>();
  p.lens_stride = lens.stride(0);
  p.batch = int32_t(lens.size(0));
  p.blocks = int32_t(out.size(0) - 1);
  p.out = out.data_ptr<int32_t>();
  p.enable_pdl = UsePdl(true, lens.device());
  const DeviceGuard guard(lens.device());
  CheckStatus(op, MqaSchedule(p, get_stream(lens.device())));
}
