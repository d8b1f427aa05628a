// SPDX-License-Identifier: Apache-2.0
// The plan of two lists for one launch, read back the way the kernels read it, for test_fused_plan.py.
#include "tvm_ffi_utils.h"
// clang-format off
#include <tvm/ffi/container/array.h>

#include <flashinfer/attention/fused/plan.h>
// clang-format on

using namespace flashinfer;
using namespace flashinfer::attention;
using Numbers = tvm::ffi::Array<int64_t>;

namespace {

struct Batch {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_lens;

  Batch(const Numbers& rows, const Numbers& keys) {
    for (size_t b = 0; b < rows.size(); ++b) {
      qo_indptr.push_back(qo_indptr.back() + int32_t(rows[b]));
      kv_indptr.push_back(kv_indptr.back() + int32_t(keys[b]));
      kv_lens.push_back(int32_t(keys[b]));
    }
  }
  int RequestOf(int token) const {
    return int(std::upper_bound(qo_indptr.begin(), qo_indptr.end(), token) - qo_indptr.begin()) - 1;
  }
};

PlanInput InputOf(const Batch& batch, int64_t heads, int64_t kv_heads, int64_t graph_rows) {
  PlanInput in{};
  in.batch_size = int32_t(batch.kv_lens.size());
  in.qo_indptr = batch.qo_indptr.data();
  in.kv_indptr = batch.kv_indptr.data();
  in.kv_lens = batch.kv_lens.data();
  in.page_size = 1;
  in.num_qo_heads = int32_t(heads);
  in.num_kv_heads = int32_t(kv_heads);
  in.head_dim_vo = 64;
  in.window_left = -1;
  in.cuda_graph = graph_rows > 0;
  in.max_rows = graph_rows > 0 ? int32_t(graph_rows) : batch.qo_indptr.back();
  in.decode_tile = DECODE_TILE;
  in.prefill_tiles[0] = PREFILL_TILE;
  in.prefill_tiles[1] = LARGE_PREFILL_TILE;
  return in;
}

/// Keys that the items of slots first + i * step cover, one after the other; -1 if they leave a gap or overlap.
int64_t Covered(const std::vector<WorkItem>& by_slot, int64_t first, int64_t step, int64_t count, int request) {
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    const WorkItem& item = by_slot[first + i * step];
    if (item.request != request || item.kv_start != at) return -1;
    at = item.kv_end;
  }
  return at;
}

/// {rows of q whose parts are not all keys of their requests, float bytes, int bytes, blocks of either list}
Numbers Check(Numbers shared_rows, Numbers shared_keys, Numbers rows, Numbers keys, int64_t heads, int64_t kv_heads,
              int64_t blocks, int64_t graph_rows) {
  const Batch shared(shared_rows, shared_keys), own(rows, keys);
  const int group = int(heads / kv_heads), tokens = own.qo_indptr.back();
  static FusedPlan plan;
  PlanFused(InputOf(shared, heads, kv_heads, graph_rows), InputOf(own, heads, kv_heads, graph_rows), int32_t(blocks),
            plan);
  std::vector<char> buffer(plan.int_bytes);
  WriteFused(plan, buffer.data());
  const PlanInfo &decode = plan.decode.info, &prefill = plan.prefill.info;
  const char* const prefill_ints = buffer.data() + plan.prefill_ints;
  const auto* prefill_header = reinterpret_cast<const PlanHeader*>(prefill_ints);
  const auto* decode_items = reinterpret_cast<const WorkItem*>(buffer.data() + decode.decode_items);
  const auto* decode_merges = reinterpret_cast<const MergeItem*>(buffer.data() + decode.decode_merges);
  const auto* prefill_items = reinterpret_cast<const WorkItem*>(prefill_ints + prefill.prefill_items);
  const auto* prefill_merges = reinterpret_cast<const MergeItem*>(prefill_ints + prefill.prefill_merges);
  const auto* places = reinterpret_cast<const TokenPlace*>(buffer.data() + plan.place_ints);
  auto slots = [](int64_t bytes, int64_t tile) { return bytes / int64_t(sizeof(float)) / (tile * 65); };
  std::vector<WorkItem> decode_slots(slots(decode.float_bytes, DECODE_TILE), WorkItem{-1});
  std::vector<WorkItem> prefill_slots(slots(prefill.float_bytes, prefill.tile), WorkItem{-1});
  for (size_t i = 0; i < plan.decode.decode.Size(); ++i) {
    if (decode_items[i].request < 0) continue;
    for (int head = 0; head < kv_heads; ++head) decode_slots.at(decode_items[i].slot + head) = decode_items[i];
  }
  for (int i = 0; i < prefill_header->prefill_items; ++i) {
    for (int head = 0; head < kv_heads; ++head) prefill_slots.at(prefill_items[i].slot + head) = prefill_items[i];
  }
  int64_t wrong = 0;
  for (int token = 0; token < tokens; ++token) {
    const TokenPlace& place = places[token];
    const int a = shared.RequestOf(token), b = own.RequestOf(token);
    for (int head = 0; head < heads; ++head) {
      const int kv_head = head / group, prefill_row = place.prefill_row + head % group,
                decode_row = place.decode_row + head % group;
      const MergeItem& x = prefill_merges[place.prefill_tile + prefill_row / prefill.tile];
      const MergeItem& y = decode_merges[place.decode_tile + decode_row / DECODE_TILE];
      wrong += Covered(prefill_slots, x.first_slot + kv_head, x.step, x.count, a) != shared.kv_lens[a] ||
               x.row_begin != prefill_row / prefill.tile * prefill.tile ||
               Covered(decode_slots, y.first_slot + kv_head, y.step, y.count, b) != own.kv_lens[b] ||
               y.row_begin != decode_row / DECODE_TILE * DECODE_TILE;
    }
  }
  for (int64_t token = tokens; token < graph_rows; ++token) wrong += places[token].prefill_tile >= 0;
  return Numbers{wrong, plan.float_bytes, plan.int_bytes, decode.decode_blocks, prefill.prefill_blocks};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, Check)
