// SPDX-License-Identifier: Apache-2.0
// Index scores of sparse attention over a paged fp8 cache: parameters and entries shared by all backends.
//   logits[b * next_n + t][pos] = scale[pos] * sum_h weights[b * next_n + t][h] * relu(q[b][t][h] . k[pos])
// A page holds block_size keys of D e4m3 numbers, then block_size fp32 scales. Slot t of request b sees positions
// 0 .. length[b] - next_n + t; columns after them are unspecified.
//
// The sum over heads has four chains, h % 4, in ascending order by fused multiply-add, added as ((c0 + c1) + c2) + c3:
// the order of the published kernels' callers, so that results agree bit by bit where the products do.
//
// Defined in mqa_logits.cuh (CUDA), mqa_logits_sm90/ (Hopper) and mqa_logits_cpu.h.
//   test  pytest tests/indexer      bench  python benchmarks/bench_indexer.py
#pragma once
#include "../backend.h"
#include "../host_device.h"

namespace flashinfer {

namespace indexer {

constexpr int SPLIT = 256;  // keys of a split, the unit of the schedule
constexpr int CHAINS = 4;   // chains of the sum over heads

/// Return the splits of a request of `length` keys.
FLASHINFER_HD int SplitsOf(int length) { return length > 0 ? (length - 1) / SPLIT + 1 : 0; }

}  // namespace indexer

struct MqaLogitsParams {
  const float8_e4m3_t* q;       ///< (batch, next_n, heads, D)
  const uint8_t* kv;            ///< pages
  const float* weights;         ///< (batch * next_n, heads)
  const int32_t* block_tables;  ///< (batch, width)
  const int32_t* seq_lens;      ///< (batch)
  const int32_t* schedule;      ///< (blocks + 1, 2); null: not given
  void* out;                    ///< (batch * next_n, at least `columns`), float or half
  int64_t q_stride_b, q_stride_t, q_stride_h, kv_stride_page, weights_stride, weights_stride_h, table_stride;
  int64_t lens_stride, out_stride;
  int64_t pages;
  int32_t batch, next_n, heads, dim, block_size, width;
  int32_t max_len;  ///< longest request that table and result have room for
  int32_t blocks;   ///< blocks of the schedule
  bool is_half;     ///< type of `out`
  bool enable_pdl;
};

/// Scores of prefill: keys are rows of one tensor, and token t sees those from starts[t] up to ends[t].
///   logits[t][j] = scales[j] * sum_h weights[t][h] * relu(q[t][h] . k[j])
struct RaggedMqaLogitsParams {
  const float8_e4m3_t* q;  ///< (tokens, heads, D)
  const float8_e4m3_t* k;  ///< (keys, D)
  const float* scales;     ///< (keys)
  const float* weights;    ///< (tokens, heads)
  const int32_t *starts, *ends;
  void* out;  ///< (tokens, at least `keys`), float or half
  int64_t q_stride_n, q_stride_h, k_stride, scales_stride, weights_stride, weights_stride_h, out_stride;
  int32_t tokens, heads, dim, keys;
  bool is_half;  ///< type of `out`
  bool enable_pdl;
};

struct MqaScheduleParams {
  const int32_t* seq_lens;
  int64_t lens_stride;
  int32_t batch, blocks;
  int32_t* out;  ///< (blocks + 1, 2)
  bool enable_pdl;
};

namespace indexer {

/// Length of request `b`, within what table and result have room for.
FLASHINFER_HD int LengthOf(const MqaLogitsParams& p, int b) {
  const int length = p.seq_lens[b * p.lens_stride];
  return length < p.max_len ? (length > 0 ? length : 0) : p.max_len;
}

/// Rows of the schedule, whose row i stands for split i * quotient + min(i, remainder) of all splits in order.
struct Shares {
  int quotient, remainder;

  FLASHINFER_HD Shares(int total, int blocks) : quotient(total / blocks), remainder(total % blocks) {}
  FLASHINFER_HD int64_t SplitOf(int row) const { return int64_t(row) * quotient + (row < remainder ? row : remainder); }
  /// First row whose split is `split` or a later one; `split` is below the total.
  FLASHINFER_HD int RowOf(int split) const {
    const int longer = remainder * (quotient + 1);  // splits of the rows that have one more
    if (split <= longer || quotient == 0) return (split + quotient) / (quotient + 1);
    return remainder + (split - longer + quotient - 1) / quotient;
  }
};

/// Write the rows of the schedule that begin within the splits [begin, begin + count) of request `b`.
FLASHINFER_HD void WriteRows(const MqaScheduleParams& p, const Shares& shares, int b, int begin, int count) {
  if (count <= 0) return;
  for (int row = shares.RowOf(begin); row <= p.blocks; ++row) {
    const int64_t split = shares.SplitOf(row);
    if (split >= int64_t(begin) + count) return;
    p.out[2 * row] = b;
    p.out[2 * row + 1] = int32_t(split - begin);
  }
}

/// Return true if TMA can read the cache, and cp.async of 16 bytes the queries.
inline bool IsReadableByTma(const MqaLogitsParams& p) {
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  return aligned(p.kv) && p.kv_stride_page % 16 == 0 && aligned(p.q) && p.q_stride_b % 16 == 0 &&
         p.q_stride_t % 16 == 0 && p.q_stride_h % 16 == 0;
}

/// First key and end of the keys of token `t`, within the tensor.
FLASHINFER_HD int StartOf(const RaggedMqaLogitsParams& p, int t) { return p.starts[t] > 0 ? p.starts[t] : 0; }
FLASHINFER_HD int EndOf(const RaggedMqaLogitsParams& p, int t) { return p.ends[t] < p.keys ? p.ends[t] : p.keys; }

}  // namespace indexer

Status MqaLogits(const MqaLogitsParams& params, Stream stream);
Status RaggedMqaLogits(const RaggedMqaLogitsParams& params, Stream stream);
/// Hopper: the kernel that a module was built for, which has one shape.
Status MqaLogitsSm90(const MqaLogitsParams& params, Stream stream);
Status MqaSchedule(const MqaScheduleParams& params, Stream stream);

}  // namespace flashinfer
