// SPDX-License-Identifier: Apache-2.0
// What an attention kernel is given: tensors, the work list and where partial results go. Plain host header, shared by
// the planner, the launchers and the kernels of every backend.
//
// A tile is TILE rows of one KV head: row r of a request is query token r / group, query head kv_head * group + r % group,
// so that the heads which share keys and values read them once. A work item is a tile and a range of keys. An item that
// covers all keys of its tile writes the result; others write a partial state (normalised output and base-2 score) to a
// slot, and the merge adds the slots of a tile in order. The order never depends on timing: results are reproducible.
#pragma once
#include <cstdint>

#include "../backend.h"
#include "../host_device.h"

namespace flashinfer {

enum class MaskMode : int32_t { kNone = 0, kCausal = 1, kCustom = 2, kMultiItemScoring = 3 };
enum class PosEncodingMode : int32_t { kNone = 0, kRoPELlama = 1, kALiBi = 2 };

/// Tensors of one attention call. Strides are in elements; the last dimension of each is contiguous.
/// A generated struct adds what a variant declares (csrc/attention_config.jinja).
template <typename DTypeQ_, typename DTypeKV_, typename DTypeO_, typename IdType_ = int32_t>
struct AttentionParams {
  using DTypeQ = DTypeQ_;
  using DTypeKV = DTypeKV_;  ///< uint8_t: two E2M1 codes a byte with scales in k_sf and v_sf (NVFP4)
  using DTypeO = DTypeO_;
  using IdType = IdType_;
  static constexpr int HEAD_DIM_PE = 0;     ///< last columns of q and k that lie in tensors of their own (MlaParams)
  static constexpr bool SHARED_KV = false;  ///< v is the first columns of k

  DTypeQ* q;  ///< [tokens, num_qo_heads, head_dim_qk]
  DTypeKV* k;
  DTypeKV* v;
  DTypeO* o;   ///< [tokens, num_qo_heads, head_dim_vo]
  float* lse;  ///< [tokens, num_qo_heads] contiguous, or null
  int64_t q_stride_n, q_stride_h;
  int64_t o_stride_n, o_stride_h;
  int64_t k_stride_page, k_stride_n, k_stride_h;  ///< stride_n: between tokens (of a page)
  int64_t v_stride_page, v_stride_n, v_stride_h;

  // Scale factors of an NVFP4 cache: e4m3, one per 16 elements of a head.
  const uint8_t* k_sf;
  const uint8_t* v_sf;
  int64_t k_sf_stride_page, k_sf_stride_n, k_sf_stride_h;
  int64_t v_sf_stride_page, v_sf_stride_n, v_sf_stride_h;

  // Lengths of the requests. Kernels take them from the work items; variants through get_qo_len and get_kv_len.
  const IdType* qo_indptr;      ///< [batch + 1], or null: one request of qo_len rows
  const IdType* kv_indptr;      ///< [batch + 1] pages (paged) or tokens (ragged), or null: one request of kv_len keys
  const IdType* kv_indices;     ///< page table, null unless paged
  const IdType* last_page_len;  ///< [batch], or null
  const IdType* kv_lens;        ///< [batch], or null: instead of last_page_len
  int32_t qo_len, kv_len;
  FastDivisor page_size;
  FastDivisor kv_heads;  ///< num_kv_heads, to divide by
  FastDivisor group;     ///< query heads per KV head
  int32_t num_qo_heads, num_kv_heads;
  int32_t window_left;  ///< keys left of the diagonal that are visible, negative: all
  int32_t mask_mode;
  float out_scale;  ///< multiplies the output
  float lse_scale;  ///< multiplies what is written to lse: 1, or ln(2) for natural logarithms

  FLASHINFER_HD uint32_t get_qo_len(uint32_t batch_idx) const {
    return qo_indptr != nullptr ? uint32_t(qo_indptr[batch_idx + 1] - qo_indptr[batch_idx]) : uint32_t(qo_len);
  }
  FLASHINFER_HD uint32_t get_kv_len(uint32_t batch_idx) const {
    if (kv_lens != nullptr) return uint32_t(kv_lens[batch_idx]);
    if (kv_indptr == nullptr) return uint32_t(kv_len);
    const int32_t n = int32_t(kv_indptr[batch_idx + 1] - kv_indptr[batch_idx]);
    if (last_page_len == nullptr) return uint32_t(n);
    return n <= 0 ? 0u : uint32_t((n - 1) * int32_t(page_size.divisor) + int32_t(last_page_len[batch_idx]));
  }
};

/// Latent attention: one key for all heads, [k | k_pe], whose first part is the value too.
template <typename DTypeQ, typename DTypeKV, typename DTypeO, typename IdType = int32_t>
struct MlaParams : AttentionParams<DTypeQ, DTypeKV, DTypeO, IdType> {
  static constexpr bool SHARED_KV = true;
  DTypeQ* q_pe;
  DTypeKV* k_pe;
  int64_t q_pe_stride_n, q_pe_stride_h;
  int64_t k_pe_stride_page, k_pe_stride_n;
};

namespace attention {
constexpr int32_t GRANULE = 64;  ///< items start at multiples of so many keys
}

/// A tile and the keys [kv_start, kv_end) it attends to here.
struct alignas(16) WorkItem {
  int32_t request;    ///< negative: a block that has nothing to do
  int16_t kv_head;    ///< set by who takes it out of a list, where it stands for one of each KV head
  int16_t is_first;   ///< 1 if no other item of the tile comes before it
  int32_t qo_begin;   ///< first row of the request in q
  int32_t qo_len;     ///< its tokens
  int32_t kv_begin;   ///< first entry of its page table (paged) or first token (ragged)
  int32_t kv_len;     ///< its keys; negative: known on the device only (AttentionParams::get_kv_len)
  int32_t row_begin;  ///< first row of the tile
  int32_t kv_start, kv_end;
  int32_t slot;   ///< where the partial state goes (in a list: that of head 0); negative: the result is complete
  int32_t merge;  ///< the MergeItem it is a part of, if it has a slot
  int32_t next;   ///< what comes next in the same share; negative: nothing
};

/// Slots first_slot + i * step of one tile, i < count, make its result.
struct alignas(16) MergeItem {
  int32_t kv_head;  ///< as that of a WorkItem; in a list, slots of head h begin at first_slot + h
  int32_t qo_begin, qo_len;
  int32_t row_begin;
  int32_t first_slot, count, step;
  int32_t unused;
};

/// Work for one launch. Counts that change between replays of a CUDA graph are read from device memory.
struct WorkList {
  const WorkItem* items;  ///< null: one request cut evenly (the fields under `uniform`)
  /// Item i begins share i, which is what follows from it (`next`). Block i does share i and then one after the other of
  /// those that no block has begun. Without: block i does item i / heads, for head i % heads.
  bool has_shares;
  const int32_t* num_items;  ///< shares, if the list has them
  int32_t* tickets;          ///< shares that were taken by blocks that had done another; 0 between launches
  int32_t* arrivals;  ///< parts that are done, of each merge (and head); 0 between launches. Null: LaunchMerge merges
  bool in_clusters;   ///< the parts of a tile are those of a cluster's blocks, which merge them (LaunchNarrow)
  bool reads_past_cache;  ///< keys are not kept in L2, where they would push out what others wrote
  const MergeItem* merges;
  const int32_t* num_merges;
  int32_t blocks;        ///< of the launch; upper bound in a CUDA graph
  int32_t merge_blocks;  ///< likewise; 0: nothing was split
  /// Requests of `pages` pages, `qo_len` rows and `kv_len` keys each, cut after every `chunk_size` keys: what `items` says
  /// too, but blocks that compute it begin up to 1 us earlier (H200, when nothing is in L2). chunk_size 0: they differ.
  struct {
    FastDivisor chunks;
    int32_t chunk_size, pages, qo_len, kv_len;
  } regular;
  float* partial_o;    ///< [slot][TILE][head_dim_vo]
  float* partial_lse;  ///< [slot][TILE]
  struct {
    int32_t tiles, chunks, chunk_size;  ///< item ((tile * chunks) + chunk) * heads + head, last tile first
  } uniform;
};

}  // namespace flashinfer
