// SPDX-License-Identifier: Apache-2.0
// Launchers of index scores and of their schedule, for the CPU and for CUDA.
#include "mqa_logits_arguments.h"
// clang-format off
#if defined(FLASHINFER_CPU)
#include <flashinfer/indexer/mqa_logits_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/indexer/mqa_logits.cuh>
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
