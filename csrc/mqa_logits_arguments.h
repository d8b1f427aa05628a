// SPDX-License-Identifier: Apache-2.0
// Arguments of index scores, which the general launcher and the one for Hopper share. Python has checked the call and words
// what is wrong (flashinfer/indexer/checks.py); what is checked here keeps a kernel within its tensors.
#pragma once
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/indexer/mqa_logits.h>
// clang-format on

namespace flashinfer {
namespace indexer {

constexpr const char* SCORES = "fp8_paged_mqa_logits";

inline MqaLogitsParams ParamsOf(const TensorView& out, const TensorView& q, const TensorView& kv,
                                const TensorView& weights, const TensorView& tables, const TensorView& lens,
                                int64_t max_seq_len, const Optional<TensorView>& schedule) {
  Expect(SCORES, "q", q).on_device().rank(4).dtype({dl_float8_e4m3fn}).last_dim_contiguous();
  const int64_t batch = q.size(0), next_n = q.size(1), heads = q.size(2), dim = q.size(3);
  Expect(SCORES, "kv_fused", kv).same_device(q, "q").dtype({dl_uint8}).rank(4).dim(2, 1, "one head of keys");
  Expect(SCORES, "kv_fused", kv).dim(3, dim + 4, "head_dim + 4");
  Expect(SCORES, "weights", weights).same_device(q, "q").dtype({dl_float32}).rank(2);
  Expect(SCORES, "weights", weights).dim(0, batch * next_n, "rows of q").dim(1, heads, "heads of q");
  Expect(SCORES, "block_tables", tables).same_device(q, "q").dtype({dl_int32}).rank(2).dim(0, batch, "q.shape[0]");
  Expect(SCORES, "block_tables", tables).last_dim_contiguous();
  Expect(SCORES, "seq_lens", lens).same_device(q, "q").dtype({dl_int32}).rank(1).dim(0, batch, "q.shape[0]");
  Expect(SCORES, "out", out).same_device(q, "q").dtype({dl_float32, dl_float16}).rank(2).last_dim_contiguous();
  Expect(SCORES, "out", out).apart(kv, "kv_fused").apart(q, "q");
  const int64_t columns = (max_seq_len + SPLIT - 1) / SPLIT * SPLIT;
  if (max_seq_len < 0 || out.size(0) < batch * next_n || out.size(1) < columns) {
    FLASHINFER_THROW(ArgumentError) << SCORES << ": out must be at least " << batch * next_n << " x " << columns
                                    << ", got " << out.size(0) << " x " << out.size(1);
  }
  MqaLogitsParams p{};
  p.q = q.data_ptr<float8_e4m3_t>();
  p.kv = kv.data_ptr<uint8_t>();
  p.weights = weights.data_ptr<float>();
  p.block_tables = tables.data_ptr<int32_t>();
  p.seq_lens = lens.data_ptr<int32_t>();
  p.out = out.data_ptr();
  p.q_stride_b = q.stride(0), p.q_stride_t = q.stride(1), p.q_stride_h = q.stride(2);
  p.kv_stride_page = kv.stride(0);
  p.weights_stride = weights.stride(0), p.weights_stride_h = weights.stride(1);
  p.table_stride = tables.stride(0), p.lens_stride = lens.stride(0), p.out_stride = out.stride(0);
  p.pages = kv.size(0);
  p.batch = int32_t(batch), p.next_n = int32_t(next_n), p.heads = int32_t(heads), p.dim = int32_t(dim);
  p.block_size = int32_t(kv.size(1)), p.width = int32_t(tables.size(1));
  const int64_t covered = tables.size(1) * kv.size(1);
  p.max_len = int32_t(kv.size(0) == 0 ? 0 : max_seq_len < covered ? max_seq_len : covered);
  p.is_half = encode_dlpack_dtype(out.dtype()) == encode_dlpack_dtype(dl_float16);
  if (schedule.has_value()) {
    const TensorView& rows = *schedule;
    Expect(SCORES, "schedule_meta", rows).same_device(q, "q").dtype({dl_int32}).rank(2).dim(1, 2, "request, split");
    Expect(SCORES, "schedule_meta", rows).contiguous();
    p.schedule = rows.data_ptr<int32_t>();
    p.blocks = int32_t(rows.size(0) - 1);
  }
  p.enable_pdl = UsePdl(true, q.device());
  return p;
}

}  // namespace indexer
}  // namespace flashinfer
