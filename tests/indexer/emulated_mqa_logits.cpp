// SPDX-License-Identifier: Apache-2.0
// Index scores, for SM90 and for all GPUs, over pages and ragged keys, and the schedule, for tests/emulation.
#include <flashinfer/indexer/mqa_logits.cuh>
#include <flashinfer/indexer/mqa_logits_sm90/kernel.cuh>
#include <flashinfer/indexer/ragged_mqa_logits.cuh>
#include <flashinfer/indexer/schedule.cuh>

using namespace flashinfer;

/// Tensors and sizes of a call, as Python packs them. The scores are float.
struct Call {
  void *q, *kv, *weights, *tables, *lens, *schedule, *out;
  int64_t batch, next_n, heads, dim, block_size, pages, page_stride, width, columns, blocks;
};

EMULATION_EXPORT int schedule(const Call* c) {
  MqaScheduleParams p{};
  p.seq_lens = static_cast<int32_t*>(c->lens), p.lens_stride = 1, p.batch = int32_t(c->batch);
  p.blocks = int32_t(c->blocks), p.out = static_cast<int32_t*>(c->schedule);
  return int(MqaSchedule(p, nullptr));
}

static MqaLogitsParams ParamsOf(const Call* c) {
  MqaLogitsParams p{};
  p.q = static_cast<__nv_fp8_e4m3*>(c->q), p.kv = static_cast<uint8_t*>(c->kv);
  p.weights = static_cast<float*>(c->weights), p.block_tables = static_cast<int32_t*>(c->tables);
  p.seq_lens = static_cast<int32_t*>(c->lens), p.schedule = static_cast<int32_t*>(c->schedule), p.out = c->out;
  p.q_stride_h = c->dim, p.q_stride_t = c->heads * c->dim, p.q_stride_b = c->next_n * c->heads * c->dim;
  p.kv_stride_page = c->page_stride, p.pages = c->pages;
  p.weights_stride = c->heads, p.weights_stride_h = 1, p.table_stride = c->width, p.lens_stride = 1;
  p.out_stride = c->columns;
  p.batch = int32_t(c->batch), p.next_n = int32_t(c->next_n), p.heads = int32_t(c->heads), p.dim = int32_t(c->dim);
  p.block_size = int32_t(c->block_size), p.width = int32_t(c->width);
  p.max_len = int32_t(std::min(c->columns, c->width * c->block_size)), p.blocks = int32_t(c->blocks);
  return p;
}

/// The kernel of all GPUs.
EMULATION_EXPORT int portable_scores(const Call* c) {
  const MqaLogitsParams p = ParamsOf(c);
  return int(c->dim == 128 ? indexer::LaunchMqaLogits<128>(p, nullptr) : indexer::LaunchMqaLogits<96>(p, nullptr));
}

/// Tensors and sizes of scores over ragged keys, all contiguous.
struct RaggedCall {
  void *q, *k, *scales, *weights, *starts, *ends, *out;
  int64_t tokens, heads, dim, keys, columns;
};

EMULATION_EXPORT int ragged_scores(const RaggedCall* c) {
  RaggedMqaLogitsParams p{};
  p.q = static_cast<__nv_fp8_e4m3*>(c->q), p.k = static_cast<__nv_fp8_e4m3*>(c->k);
  p.scales = static_cast<float*>(c->scales), p.weights = static_cast<float*>(c->weights);
  p.starts = static_cast<int32_t*>(c->starts), p.ends = static_cast<int32_t*>(c->ends), p.out = c->out;
  p.q_stride_h = c->dim, p.q_stride_n = c->heads * c->dim, p.k_stride = c->dim, p.scales_stride = 1;
  p.weights_stride = c->heads, p.weights_stride_h = 1, p.out_stride = c->columns;
  p.tokens = int32_t(c->tokens), p.heads = int32_t(c->heads), p.dim = int32_t(c->dim), p.keys = int32_t(c->keys);
  using namespace indexer::ragged;
  return int(c->dim == 128 ? LaunchDim<128>(p, nullptr) : LaunchDim<96>(p, nullptr));
}

EMULATION_EXPORT int scores(const Call* c) {
  const MqaLogitsParams p = ParamsOf(c);
  const auto is = [&](int64_t heads, int64_t dim, int64_t next_n) {
    return c->heads == heads && c->dim == dim && c->next_n == next_n;
  };
  using namespace indexer::sm90;
  if (is(64, 128, 1)) return int(LaunchMqaLogitsSm90<Shape<64, 128, 1>>(p, nullptr));
  if (is(64, 128, 2)) return int(LaunchMqaLogitsSm90<Shape<64, 128, 2>>(p, nullptr));
  if (is(8, 256, 2)) return int(LaunchMqaLogitsSm90<Shape<8, 256, 2>>(p, nullptr));
  if (is(12, 128, 2)) return int(LaunchMqaLogitsSm90<Shape<12, 128, 2, 2>>(p, nullptr));
  return -1;
}
