// SPDX-License-Identifier: Apache-2.0
// Arguments of an attention kernel: tensors, the work list, and the buffers of partial results. Plain host header,
// shared by the planner, the launchers and the kernels of every backend.
//
// A tile is TILE rows of one KV head: row r of a request is query token r / group, query head kv_head * group + r %
// group, so that the query heads that share keys and values read them once. A work item is a tile and a range of keys.
// An item that covers all keys of its tile writes the result. Other items write a partial state (normalised output and
// base-2 log-sum-exp) to a slot, and the merge adds the slots of a tile in order. The order never depends on timing, so
// results are reproducible.
#pragma once
#include <cstdint>

#include "../../backend.h"
#include "../../host_device.h"

namespace flashinfer {

enum class MaskMode : int32_t { kNone = 0, kCausal = 1, kCustom = 2, kMultiItemScoring = 3 };
enum class PosEncodingMode : int32_t { kNone = 0, kRoPELlama = 1, kALiBi = 2 };

/// Tensors of one attention call. Strides are in elements; the last dimension of each tensor is contiguous. A generated
/// struct adds the parameters that a variant declares (csrc/attention_config.jinja).
template <typename DTypeQ_, typename DTypeKV_, typename DTypeO_, typename IdType_ = int32_t>
struct AttentionParams {
  using DTypeQ = DTypeQ_;
  using DTypeKV = DTypeKV_;  ///< uint8_t: two E2M1 codes a byte with scales in k_sf and v_sf (NVFP4)
  using DTypeO = DTypeO_;
  using IdType = IdType_;
  static constexpr int HEAD_DIM_PE = 0;     ///< trailing columns of q and k that are in separate tensors (MlaParams)
  static constexpr bool SHARED_KV = false;  ///< v is the leading columns of k

  DTypeQ* q;  ///< [tokens, num_qo_heads, head_dim_qk]
  DTypeKV* k;
  DTypeKV* v;
  DTypeO* o;   ///< [tokens, num_qo_heads, head_dim_vo]
  float* lse;  ///< [tokens, num_qo_heads] contiguous, or null
  int64_t q_stride_n, q_stride_h;
  int64_t o_stride_n, o_stride_h;
  int64_t k_stride_page, k_stride_n, k_stride_h;  ///< stride_n: distance between tokens (of a page)
  int64_t v_stride_page, v_stride_n, v_stride_h;

  // Scale factors of an NVFP4 cache: e4m3, one per 16 elements of a head.
  const uint8_t* k_sf;
  const uint8_t* v_sf;
  int64_t k_sf_stride_page, k_sf_stride_n, k_sf_stride_h;
  int64_t v_sf_stride_page, v_sf_stride_n, v_sf_stride_h;

  // Lengths of the requests. Kernels read them from the work items; variants call get_qo_len and get_kv_len.
  const IdType* qo_indptr;      ///< [batch + 1], or null: one request of qo_len rows
  const IdType* kv_indptr;      ///< [batch + 1] pages (paged) or tokens (ragged), or null: one request of kv_len keys
  const IdType* kv_indices;     ///< page table, null unless paged
  const IdType* last_page_len;  ///< [batch], or null
  const IdType* kv_lens;        ///< [batch] keys of each request, or null; replaces last_page_len
  int32_t qo_len, kv_len;       ///< rows of q; keys of k, or of a page
  FastDivisor page_size;
  FastDivisor kv_heads;  ///< num_kv_heads as a divisor
  FastDivisor group;     ///< query heads per KV head
  int32_t num_qo_heads, num_kv_heads;
  int32_t window_left;  ///< number of visible keys left of the diagonal; negative: all
  int32_t mask_mode;
  float out_scale;  ///< multiplies the output
  float lse_scale;  ///< multiplies lse: 1, or ln(2) for natural logarithms

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

/// Multi-head latent attention: one key for all heads, [k | k_pe]; its first part is also the value.
template <typename DTypeQ, typename DTypeKV, typename DTypeO, typename IdType = int32_t>
struct MlaParams : AttentionParams<DTypeQ, DTypeKV, DTypeO, IdType> {
  static constexpr bool SHARED_KV = true;
  DTypeQ* q_pe;
  DTypeKV* k_pe;
  int64_t q_pe_stride_n, q_pe_stride_h;
  int64_t k_pe_stride_page, k_pe_stride_n;
  int64_t num_pages;  ///< pages of the cache
  /// Hopper, fp8 cache: scales of each key and 128 columns, [pages, page_size, columns / 128] contiguous; or null.
  const float* latent_scales;
};

namespace attention {
constexpr int32_t KV_UNIT = 64;  ///< work items start at multiples of this many keys
}

/// Work item: a tile and the range of keys [kv_start, kv_end) that it attends to.
struct alignas(16) WorkItem {
  int32_t request;    ///< index of the request; negative: the block has no work
  int16_t kv_head;    ///< set on the device: an item of a list stands for one item per KV head
  int16_t is_first;   ///< 1 for the first item of its tile
  int32_t qo_begin;   ///< first row of the request in q
  int32_t qo_len;     ///< query tokens of the request
  int32_t kv_begin;   ///< first entry of its page table (paged) or first token (ragged)
  int32_t kv_len;     ///< keys of the request; negative: known on the device only (AttentionParams::get_kv_len)
  int32_t row_begin;  ///< first row of the tile within the request
  int32_t kv_start, kv_end;
  int32_t slot;   ///< slot of the partial state (in a list: that of head 0); negative: the item writes the final result
  int32_t merge;  ///< index of its MergeItem, if it has a slot
  int32_t next;   ///< next item of the same share; negative: none
};

/// Merge of one tile: the partial states in slots first_slot + i * step, i < count.
struct alignas(16) MergeItem {
  int32_t kv_head;  ///< as in WorkItem; in a list, the slots of head h begin at first_slot + h
  int32_t qo_begin, qo_len;
  int32_t row_begin;
  int32_t first_slot, count, step;
  int32_t unused;
};

/// Work of one launch. Counts that change between replays of a CUDA graph are read from device memory.
struct WorkList {
  const WorkItem* items;  ///< null: one request, split evenly (`single_request`)
  /// True: the items form linked lists (`next`), called shares. Item i is the head of share i. Block i runs share i and
  /// then takes unstarted shares from the counter `tickets`. False: block i runs item i / heads for head i % heads.
  bool has_shares;
  const int32_t* num_items;  ///< number of items; number of shares if has_shares
  /// Number of shares (items in the Hopper prefill kernel) that blocks took after their first one; 0 between launches.
  int32_t* tickets;
  /// Number of blocks that come to the items late, after the decode list (fused/kernel_sm90.cuh): they have no first
  /// item.
  int32_t late_blocks;
  bool is_by_head;  ///< Hopper prefill kernel: all items of a head precede those of the next, so that L2 keeps its keys
  int32_t* arrivals;  ///< finished parts of each merge (and head); 0 between launches. Null: LaunchMerge merges
  bool in_clusters;   ///< the blocks of a cluster hold all parts of a tile and merge them (LaunchDecode)
  /// Ends of the items' keys as serving engines rewrote them in a plan of MLA (PublishedWorks); null: those of the items.
  const int32_t* kv_ends;
  bool reads_past_cache;  ///< load keys with evict-first so that they do not displace other data in L2
  const MergeItem* merges;
  const int32_t* num_merges;
  int32_t blocks;        ///< blocks of the launch; an upper bound in a CUDA graph
  int32_t merge_blocks;  ///< blocks of the merge, likewise; 0: nothing was split
  /// Batch of equal requests: `pages` pages, `qo_len` rows and `kv_len` keys each, split after every `chunk_size` keys.
  /// The same work as `items`, but blocks compute their item instead of loading it and start up to 1 us earlier (H200,
  /// cold L2). chunk_size 0: the requests differ.
  struct {
    FastDivisor chunks;
    int32_t chunk_size, pages, qo_len, kv_len;
  } equal_requests;
  float* partial_o;    ///< [slot][TILE][head_dim_vo]
  float* partial_lse;  ///< [slot][TILE]
  struct {
    int32_t tiles, chunks, chunk_size;  ///< item index ((tile * chunks) + chunk) * heads + head, last tile first
  } single_request;
};

}  // namespace flashinfer
