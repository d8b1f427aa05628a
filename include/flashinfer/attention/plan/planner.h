// SPDX-License-Identifier: Apache-2.0
// Work planner: turns a batch of (queries, keys) into lists of work items (common/params.h). Host C++ without CUDA,
// shared by both backends. It reads host arrays, writes into one buffer that is copied to the device at once, and takes
// O(requests + blocks) integer operations: an item stands for one item per KV head.
//
// Requests of few rows (decode) go to the decode list: the keys of the whole batch are split into ranges of equal
// length, across request boundaries, as many ranges as there are resident blocks for all KV heads. This balances any
// skew of lengths; a range has at most two partial tiles, and the number of slots is bounded. A few requests are split
// separately if that gives shorter pieces; where all requests are split alike, blocks compute their items. Requests of
// many rows go to the prefill list: one block per tile and head, longest first; keys are split only where there are too
// few tiles to fill the device. The Hopper kernel takes many tiles in an order that reuses keys in L2.
//   test  pytest tests/attention/test_plan.py
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "types.h"

namespace flashinfer {
namespace attention {

/// Fill a PlanOutput. Keep the PlanOutput for the next plan: growing its lists costs more than planning.
class Planner {
 public:
  Planner(const PlanInput& in, PlanOutput& out)
      : in_(in), group_(in.num_qo_heads / std::max(in.num_kv_heads, 1)), out_(out) {}

  void Run() {
    out_.Clear();
    out_.publishes_works = in_.publishes_works;
    out_.info.is_by_head = false;
    decode_blocks_ = in_.decode_blocks;
    ChoosePrefillTile();
    if (in_.takes_items && in_.fused_blocks > 0) DivideDevice();
    if (in_.fixed_split > 0 || in_.disable_split) {
      PlanFixed();
    } else {
      PlanDecode();
      PlanPrefill();
    }
    Layout();
    DetectEqualRequests();
  }

  /// Return true if fusing the decode and prefill lists into one launch pays off. `fused_sms` is the number of SMs that
  /// hold one block of each. While decode blocks run, prefill blocks have half an SM: that must cost less than the time
  /// of the decode list. The Hopper kernel serves any two lists of a plan that divides the SMs (DivideDevice).
  static bool FusesLists(int64_t prefill_tile, int64_t decode_blocks, int64_t prefill_blocks, int64_t fused_sms,
                         bool is_hopper = false) {
    if (is_hopper) return decode_blocks > 0 && decode_blocks < fused_sms && prefill_blocks > 0;
    return prefill_tile == 128 && decode_blocks > 0 && decode_blocks <= fused_sms && prefill_blocks >= 3 * fused_sms;
  }

  /// Prefill tiles of a head below which a fused launch on Hopper does not pay off.
  static constexpr int64_t LEAST_FUSED_TILES = 8;

  /// Return how many of `sms` SMs begin with the decode list of a fused launch on Hopper: its part of the cost. Costs are
  /// in units of 64 keys: of a decode tile, which an SM reads at about 60 GB/s, and of 128 rows of a prefill tile.
  static int64_t ReadingSms(int64_t decode_units, int64_t prefill_units, int64_t sms) {
    constexpr int64_t DECODE_COST = 2, PREFILL_COST = 3;
    const int64_t decode = decode_units * DECODE_COST, all = decode + prefill_units * PREFILL_COST;
    return std::clamp<int64_t>(DivideUp(sms * decode, std::max<int64_t>(all, 1)), 1, sms - 1);
  }

  /// Offset of kv_indptr (0) and qo_indptr (1) in a plan that keeps them, and of their end (2).
  static int64_t IndptrOffset(int which, int32_t batch_size) {
    return AlignUp(sizeof(PlanHeader)) + which * AlignUp((int64_t(batch_size) + 1) * sizeof(int32_t));
  }

  /// Build the list of decode items, the longest list of most plans, in place: in `buffer`, if `bytes` are enough. Null
  /// reverts to the list's own memory.
  static void Use(PlanOutput& out, const PlanInput& in, char* buffer, int64_t bytes) {
    constexpr int64_t ITEM = sizeof(WorkItem);
    const int64_t offset = ItemsOffset(in);
    const bool fits = buffer != nullptr && bytes >= offset + ITEM && reinterpret_cast<uintptr_t>(buffer) % 16 == 0;
    out.decode.Use(fits ? reinterpret_cast<WorkItem*>(buffer + offset) : nullptr, fits ? (bytes - offset) / ITEM : 0);
  }

  /// Copy the lists to `buffer`, which holds info.int_bytes.
  static void Write(const PlanOutput& out, char* buffer) {
    const int32_t decode = out.info.has_shares != 0 ? out.shares : int32_t(out.decode.Size());
    const PlanHeader header{decode, int32_t(out.decode_merges.Size()), int32_t(out.prefill.Size()),
                            int32_t(out.prefill_merges.Size())};
    Put(buffer + out.info.decode_items, out.decode);  // first, because the items may overlap any part of the buffer
    std::memcpy(buffer, &header, sizeof(header));
    std::memset(buffer + out.info.decode_tickets, 0, out.info.decode_merges - out.info.decode_tickets);
    Put(buffer + out.info.decode_merges, out.decode_merges);
    Put(buffer + out.info.prefill_items, out.prefill);
    Put(buffer + out.info.prefill_merges, out.prefill_merges);
    if (out.publishes_works) WriteWorks(out, buffer);
  }

 private:
  template <typename T>
  static void Put(char* to, const List<T>& list) {
    const char* const from = reinterpret_cast<const char*>(list.begin());
    if (list.Size() > 0 && from != to) std::memmove(to, from, list.Size() * sizeof(T));
  }

  /// Write the arrays of PublishedWorks. Entries that belong to no item get zeros.
  static void WriteWorks(const PlanOutput& out, char* buffer) {
    const PublishedWorks at = PublishedWorks::Of(out.info);
    auto* const rows = reinterpret_cast<int32_t*>(buffer + at.q_indptr);
    auto* const starts = reinterpret_cast<int32_t*>(buffer + at.kv_start);
    auto* const ends = reinterpret_cast<int32_t*>(buffer + at.kv_end);
    auto* const counts = reinterpret_cast<int32_t*>(buffer + at.work_indptr);
    int64_t count = 0;
    auto write = [&](const WorkItem* items, size_t size) {
      for (size_t i = 0; i < size; ++i, ++count) {
        const bool has_work = items[i].request >= 0;
        rows[count] = has_work ? items[i].qo_begin : 0;
        starts[count] = has_work ? items[i].kv_start : 0;
        ends[count] = has_work ? items[i].kv_end : 0;
      }
    };
    write(reinterpret_cast<const WorkItem*>(buffer + out.info.decode_items), out.decode.Size());
    if (out.prefill.Size() > 0) {
      for (; count < at.prefill; ++count) rows[count] = starts[count] = ends[count] = 0;
      write(reinterpret_cast<const WorkItem*>(buffer + out.info.prefill_items), out.prefill.Size());
    }
    counts[0] = 0, counts[1] = int32_t(count);
  }

  int32_t QoBegin(int32_t b) const { return in_.qo_indptr != nullptr ? in_.qo_indptr[b] : b * in_.uniform_qo_len; }
  int32_t QoLen(int32_t b) const {
    return in_.qo_indptr != nullptr ? in_.qo_indptr[b + 1] - in_.qo_indptr[b] : in_.uniform_qo_len;
  }
  int32_t KvLen(int32_t b) const {
    const int64_t room =
        (int64_t(in_.kv_indptr[b + 1]) - in_.kv_indptr[b]) * in_.page_size;  // a request without pages has no keys
    if (in_.kv_lens != nullptr) return int32_t(std::min<int64_t>(in_.kv_lens[b], room));
    return int32_t(in_.max_kv_len > 0 ? std::min<int64_t>(in_.max_kv_len, room) : room);
  }
  bool IsDecode(int64_t rows) const {
    return in_.decode_tile > 0 && (in_.prefill_tiles[0] == 0 || rows <= in_.decode_tile);
  }

  /// Set the fields that all items of a tile share. Writes in place: copying a struct that was just written in parts
  /// stalls on store forwarding.
  void SetTile(WorkItem& item, int32_t b, int32_t row_begin, int32_t tile) const {
    item.request = b;
    item.kv_head = -1;
    item.qo_begin = QoBegin(b);
    item.qo_len = QoLen(b);
    item.kv_begin = in_.kv_indptr != nullptr ? in_.kv_indptr[b] : 0;
    item.kv_len = in_.kv_lens != nullptr ? KvLen(b) : -1;
    item.row_begin = row_begin;
    item.is_first = 1;
    item.slot = item.merge = item.next = -1;
    SetRange(item, tile);
  }

  /// Set the range of keys that at least one row of the tile can see.
  void SetRange(WorkItem& item, int32_t tile) const {
    const int64_t kv_len = KvLen(item.request), qo_len = item.qo_len, shift = kv_len - qo_len;
    int64_t start = 0, end = kv_len;
    if (in_.causal) {
      const int64_t last = std::min<int64_t>(qo_len, DivideUp(item.row_begin + tile, group_)) - 1;
      end = std::clamp<int64_t>(last + shift + 1, 0, kv_len);
    }
    if (in_.window_left >= 0) {
      // Without the exact length (a page may be partly filled) the window could start up to a page earlier.
      const int64_t first = item.row_begin / group_, slack = in_.kv_lens != nullptr ? 0 : in_.page_size;
      start = std::clamp<int64_t>(first + shift - in_.window_left - slack, 0, end);
    }
    item.kv_start = int32_t(start / KV_UNIT * KV_UNIT);
    item.kv_end = int32_t(std::max<int64_t>(end, item.kv_start));
  }

  void ChoosePrefillTile() {
    prefill_tile_ = in_.prefill_tiles[0];
    prefill_blocks_ = in_.prefill_blocks[0];
    if (in_.prefill_tiles[1] == 0) return;
    if (in_.fixed_split > 0 || in_.disable_split) return;  // results must not depend on the rest of the batch
    if (in_.takes_items) return ChooseForm();
    int64_t rows = 0, tiles = 0;  // take large tiles once at least half of their rows are used
    if (in_.cuda_graph) {
      rows = int64_t(in_.max_rows) * group_;
      tiles = in_.batch_size;
    } else {
      for (int32_t b = 0; b < in_.batch_size; ++b) {
        const int64_t n = int64_t(QoLen(b)) * group_;
        if (!IsDecode(n)) rows += n, ++tiles;
      }
    }
    if (rows > tiles * in_.prefill_tiles[0]) {
      prefill_tile_ = in_.prefill_tiles[1];
      prefill_blocks_ = in_.prefill_blocks[1];
      const int64_t items = rows / prefill_tile_ * in_.num_kv_heads;
      if (!in_.cuda_graph && FusesLists(prefill_tile_, in_.fused_blocks, items, in_.fused_blocks)) {
        decode_blocks_ = in_.fused_blocks;
      }
    }
  }

  /// Choose the form of the Hopper kernel (Form of prefill_sm90/shape.cuh): the one for short items where an item ends
  /// after few keys, because its beginning and its end then take as long as the rest; and where large tiles would be
  /// padding for the most part. The launches of a CUDA graph are captured, so its form does not follow the batch.
  void ChooseForm() {
    constexpr int64_t SHORT_ITEM_KEYS = 384;  // mean number of keys of the tiles
    if (in_.cuda_graph) return;
    int64_t rows = 0, tiles = 0, keys = 0;
    for (int32_t b = 0; b < in_.batch_size; ++b) {
      const int64_t n = int64_t(QoLen(b)) * group_, count = DivideUp(n, in_.prefill_tiles[0]);
      if (n <= 0 || IsDecode(n)) continue;
      rows += n;
      tiles += count;
      keys += count * MeanKeys(b);
    }
    if (tiles == 0) return;
    if (keys > tiles * SHORT_ITEM_KEYS && rows > tiles * in_.prefill_tiles[1]) return;
    prefill_tile_ = in_.prefill_tiles[1];
    prefill_blocks_ = in_.prefill_blocks[1];
  }

  /// Mean number of keys that a row of a request sees.
  int64_t MeanKeys(int32_t b) const {
    const int64_t qo_len = QoLen(b), kv_len = KvLen(b);
    const int64_t keys = in_.causal ? std::max<int64_t>(kv_len - qo_len / 2, 0) : kv_len;
    return in_.window_left >= 0 ? std::min<int64_t>(keys, int64_t(in_.window_left) + 1) : keys;
  }

  /// Divide the SMs between the lists of a fused launch on Hopper (fused/kernel_sm90.cuh), where the first blocks begin
  /// with the decode list. Sizes of a CUDA graph do not depend on the batch, so its lists are launched one after the other.
  void DivideDevice() {
    if (in_.cuda_graph || in_.fixed_split > 0 || in_.disable_split) return;
    constexpr int64_t ROWS = 128;
    int64_t decode = 0, prefill = 0, items = 0;
    for (int32_t b = 0; b < in_.batch_size; ++b) {
      const int64_t rows = int64_t(QoLen(b)) * group_, units = DivideUp(MeanKeys(b), KV_UNIT);
      if (rows <= 0) continue;
      if (IsDecode(rows)) {
        decode += units + 1;
      } else {
        prefill += DivideUp(rows, ROWS) * (units + 1);
        items += DivideUp(rows, in_.prefill_tiles[0]);
      }
    }
    if (decode == 0 || prefill == 0 || items < LEAST_FUSED_TILES) return;
    const int64_t sms = in_.prefill_blocks[0], teams = in_.fused_blocks / sms;
    const int64_t reading = ReadingSms(decode, prefill, sms);
    decode_blocks_ = int32_t(reading * teams);
    prefill_blocks_ = int32_t(sms - reading);
    prefill_tile_ = in_.prefill_tiles[0];  // the fused kernel has tiles of this size only
  }

  /// List the tiles of all decode (or prefill) requests in out_.tiles; set has_others_ if there are requests of the
  /// other kind.
  void ListTiles(bool decode) {
    List<WorkItem>& tiles = out_.tiles;
    tiles.Clear();
    const int32_t tile = decode ? in_.decode_tile : prefill_tile_;
    for (int32_t b = 0; b < in_.batch_size; ++b) {
      const int32_t rows = QoLen(b) * group_;
      if (rows <= 0) continue;
      if (IsDecode(rows) != decode) {
        has_others_ = true;
        continue;
      }
      for (int32_t row = 0; row < rows; row += tile) SetTile(*tiles.Extend(1), b, row, tile);
    }
  }

  static MergeItem MergeOf(const WorkItem& item, int32_t first_slot, int32_t count, int32_t step) {
    return MergeItem{-1, item.qo_begin, item.qo_len, item.row_begin, first_slot, count, step, 0};
  }

  /// Split of the keys of a head: `first` ranges that blocks begin with, `all` ranges in total. The further ranges are
  /// short and are taken by blocks that finish early. SMs of an H200 read at speeds that differ by 10 %: where a block
  /// has much to do, it begins with slightly less than an equal part. Otherwise splitting costs more than it gains, and
  /// there are further ranges only where the heads do not divide the blocks.
  struct Ranges {
    static constexpr int64_t KEPT = 15, PARTS = 16;  // KEPT / PARTS: fraction of an equal part that a block begins with
    static constexpr int64_t SHORT = 32;             // further ranges per equal part
    static constexpr int64_t MUCH = 192;             // threshold of `is_much`, in KV units

    Ranges(int64_t blocks, int64_t heads, bool is_much) : first(int32_t(blocks / heads)) {
      const int64_t kept = first * heads * (is_much ? KEPT : PARTS);
      all = first + int32_t(DivideUp((blocks * PARTS - kept) * SHORT, heads * PARTS));
    }
    int32_t first, all;
  };

  /// Plan the decode list: ranges of keys over the resident blocks.
  void PlanDecode() {
    constexpr int64_t PIECE_COST = 1;  // cost of starting a piece, in KV units
    constexpr int64_t MIN_PIECE = 2;   // in KV units; a shorter remainder is not worth a piece
    const int32_t heads = in_.num_kv_heads, blocks = std::max(decode_blocks_, 1);
    ListTiles(true);
    const List<WorkItem>& tiles = out_.tiles;
    if (tiles.Size() == 0 && (!in_.cuda_graph || in_.decode_tile == 0))
      return;           // blocks of a graph always read the list
    int64_t total = 0;  // KV units of one head
    for (const WorkItem& tile : tiles) total += KvUnits(tile) + PIECE_COST;
    const int64_t each = Quotient(total * heads + blocks - 1, blocks) + PIECE_COST;  // KV units per block
    const bool is_much = in_.takes_shares && each >= Ranges::MUCH;
    const Ranges ranges(blocks, heads, is_much);
    Shares shares(out_.decode, ranges.all, tiles.Size());
    const int64_t piece = ranges.first == ranges.all ? SmallestPiece(ranges.all, MIN_PIECE, each) : 0;
    int64_t size = 0, used = 0;
    auto next_range = [&] {
      used = 0;
      const int64_t number = shares.Begin(), left = ranges.all - number;
      if (piece > 0) {
        size = piece + PIECE_COST;
      } else if (number < ranges.first && ranges.first < ranges.all) {
        size = is_much ? each * Ranges::KEPT / Ranges::PARTS : each;
      } else {  // an equal part of the remaining work, including the splits to come
        const int64_t part = Quotient(total + (left - 1) * (PIECE_COST + 1), left);
        size = number == ranges.first ? part : std::max(size, part);
      }
      size = std::max<int64_t>(size, PIECE_COST + MIN_PIECE);
    };
    next_range();
    for (const WorkItem& tile : tiles) {
      const int64_t units = KvUnits(tile);
      int64_t done = 0;
      int32_t pieces = 0;
      do {  // at least one item, so that a tile without keys still writes zeros
        const int64_t left = units - done;
        // A split costs two results, their merge and 3 us at the end, so a range may end early or late to meet the end
        // of a tile.
        const int64_t slack = std::max<int64_t>(MIN_PIECE, size / 32);
        const bool is_full = used > 0 && size - used < PIECE_COST + std::min(slack, left);
        if (is_full && shares.Count() < ranges.all) next_range();
        const bool can_cut = shares.Count() < ranges.all;
        const int64_t room = std::max<int64_t>(size - used - PIECE_COST, MIN_PIECE);
        const int64_t take = can_cut && left >= room + slack ? room : left;
        WorkItem& piece = shares.Push(tile);
        piece.kv_start = int32_t(tile.kv_start + done * KV_UNIT);
        done += take;
        if (done < units) {
          piece.kv_end = int32_t(tile.kv_start + done * KV_UNIT);
          total += PIECE_COST;
        }
        if (pieces > 0 || done < units || in_.all_partial) {
          piece.slot = out_.decode_slots + pieces * heads;
          piece.merge = int32_t(out_.decode_merges.Size());
          piece.is_first = pieces == 0;
        }
        ++pieces;
        used += take + PIECE_COST;
        total -= take + PIECE_COST;
      } while (done < units);
      if (pieces == 1 && !in_.all_partial) continue;
      out_.decode_merges.Push(MergeOf(tile, out_.decode_slots, pieces, heads));
      out_.decode_slots += pieces * heads;
    }
    out_.shares = shares.End() * heads;
  }

  /// Smallest piece size (in KV units, at least `least`, below `limit`) for which all tiles make at most `count`
  /// pieces; 0 if there is none. Where tiles are few, an equal part plus the cost of splits is larger than that (H200,
  /// 4 requests of 1024 keys and 8 heads: 256 blocks instead of 160, 15.3 -> 13.9 us).
  int64_t SmallestPiece(int64_t count, int64_t least, int64_t limit) const {
    const List<WorkItem>& tiles = out_.tiles;
    if (int64_t(tiles.Size()) > count) return 0;
    int64_t total = 0;
    for (const WorkItem& tile : tiles) total += KvUnits(tile);
    for (int64_t size = std::max(least, DivideUp(total, count)); size < limit; ++size) {
      int64_t pieces = 0;
      for (const WorkItem& tile : tiles) pieces += std::max<int64_t>(1, DivideUp(KvUnits(tile), size));
      if (pieces <= count) return size;
    }
    return 0;
  }

  /// Divide a by b. Both are mostly small, and 64-bit division takes several times as long as 32-bit division.
  static int64_t Quotient(int64_t a, int64_t b) {
    return a >= 0 && a <= INT32_MAX && b <= INT32_MAX ? uint32_t(a) / uint32_t(b) : a / b;
  }

  static int64_t KvUnits(const WorkItem& item) { return DivideUp(item.kv_end - item.kv_start, KV_UNIT); }

  /// Assign slots to the items from `first` on (the pieces of one tile) if there are several.
  void SetSlots(List<WorkItem>& items, size_t first, List<MergeItem>& merges, int32_t& slots, int32_t step) const {
    const int32_t count = int32_t(items.Size() - first);
    if (count < 2 && !in_.all_partial) return;
    const int32_t merge = int32_t(merges.Size());
    merges.Push(MergeOf(items[first], slots, count, step));
    for (size_t i = first; i < items.Size(); ++i, slots += step) {
      items[i].slot = slots;
      items[i].merge = merge;
      items[i].is_first = i == first;
    }
  }

  void PlanPrefill() {
    if (!has_others_) return;
    ListTiles(false);
    const List<WorkItem>& tiles = out_.tiles;
    if (tiles.Size() == 0) return;
    const int64_t blocks = std::max(prefill_blocks_, 1), heads = in_.num_kv_heads;
    int64_t longest = 1;
    for (const WorkItem& t : tiles) longest = std::max(longest, KvUnits(t));
    int64_t chunk = longest;
    if (int64_t(tiles.Size()) * heads < blocks) {  // find the smallest chunk size that still fits in one wave
      int64_t low = std::min<int64_t>(4, longest);
      while (low < chunk) {
        const int64_t middle = (low + chunk) / 2;
        int64_t count = 0;
        for (const WorkItem& t : tiles) count += std::max<int64_t>(1, DivideUp(KvUnits(t), middle));
        if (count * heads > blocks) {
          low = middle + 1;
        } else {
          chunk = middle;
        }
      }
    }
    CutTiles(chunk * KV_UNIT, false, out_.prefill, out_.prefill_merges, out_.prefill_slots);
  }

  /// Plan splits that depend only on the request itself: at multiples of a fixed size.
  void PlanFixed() {
    const int64_t size = in_.disable_split ? INT32_MAX : DivideUp(in_.fixed_split, KV_UNIT) * KV_UNIT;
    for (const bool decode : {true, false}) {
      out_.tiles.Clear();
      if (decode ? in_.decode_tile > 0 : prefill_tile_ > 0) ListTiles(decode);
      CutTiles(size, true, decode ? out_.decode : out_.prefill, decode ? out_.decode_merges : out_.prefill_merges,
               decode ? out_.decode_slots : out_.prefill_slots);
    }
  }

  /// Split the tiles after every `size` keys, or `at_multiples` of `size`; each piece is an item for every head.
  void CutTiles(int64_t size, bool at_multiples, List<WorkItem>& items, List<MergeItem>& merges, int32_t& slots) {
    List<WorkItem>& pieces = out_.sorted;
    pieces.Clear();
    for (const WorkItem& tile : out_.tiles) {
      const size_t first = pieces.Size();
      int64_t start = tile.kv_start;
      do {
        WorkItem item = tile;
        item.kv_start = int32_t(start);
        start = std::min<int64_t>(at_multiples ? (start / size + 1) * size : start + size, tile.kv_end);
        item.kv_end = int32_t(start);
        pieces.Push(item);
      } while (start < tile.kv_end);
      SetSlots(pieces, first, merges, slots, in_.num_kv_heads);
    }
    if (&items == &out_.prefill) out_.info.is_by_head = FollowsCache(pieces);
    Sort(pieces, items, &items == &out_.prefill && out_.info.is_by_head);
  }

  /// Return true if blocks should take the items head by head. Longest first over all heads is more even, but all keys
  /// and values of the batch then pass through L2 once for every tile of rows: no gain where L2 holds them. No item may
  /// be so long that the other blocks would wait for it at the end.
  bool FollowsCache(const List<WorkItem>& items) const {
    constexpr int64_t ITEMS_PER_BLOCK = 4;  // a block must have work for as many of the longest items
    if (!in_.takes_items) return false;
    int64_t longest = 0, shortest = INT32_MAX, total = 0, keys = 0;
    for (const WorkItem& item : items) {
      longest = std::max(longest, KvUnits(item));
      shortest = std::min(shortest, KvUnits(item));
      total += KvUnits(item);
      if (item.row_begin == 0) keys += KvLen(item.request);
    }
    if (shortest < longest && keys * in_.num_kv_heads <= 2 * CACHED_KEYS) return false;
    return longest * prefill_blocks_ * ITEMS_PER_BLOCK <= total * in_.num_kv_heads;
  }

  /// Keys of a head that L2 holds beside other data: 16 MB with values, of 128 columns of 16 bits (H200: 50 MB).
  static constexpr int64_t CACHED_KEYS = 32768;

  /// Sort all items, longest first; or `by_requests`, each run of requests whose keys of a head fit into L2 by itself.
  void Sort(const List<WorkItem>& from, List<WorkItem>& to, bool by_requests) const {
    to.Resize(from.Size());
    size_t begin = 0;
    int64_t keys = 0;
    for (size_t i = 0; i < from.Size() && by_requests; ++i) {
      if (i > 0 && from[i].request == from[i - 1].request) continue;
      const int64_t more = KvLen(from[i].request);
      if (keys > 0 && keys + more > CACHED_KEYS) {
        SortRange(from, to, begin, i);
        begin = i;
        keys = 0;
      }
      keys += more;
    }
    SortRange(from, to, begin, from.Size());
  }

  /// Bucket sort of a range, longest first, with a resolution of one KV unit or 1/1023 of the longest item. Stable.
  static void SortRange(const List<WorkItem>& from, List<WorkItem>& to, size_t first, size_t last) {
    constexpr int BUCKETS = 1024;
    int32_t longest = 0, begin[BUCKETS + 1] = {};
    for (size_t i = first; i < last; ++i) longest = std::max(longest, from[i].kv_end - from[i].kv_start);
    const int32_t width = std::max(KV_UNIT, longest / (BUCKETS - 1) + 1);
    auto bucket = [&](const WorkItem& item) { return (longest - (item.kv_end - item.kv_start)) / width; };
    for (size_t i = first; i < last; ++i) ++begin[bucket(from[i]) + 1];
    for (int i = 0; i < BUCKETS; ++i) begin[i + 1] += begin[i];
    for (size_t i = first; i < last; ++i) to[first + begin[bucket(from[i])]++] = from[i];
  }

  static int64_t ItemsOffset(const PlanInput& in) {
    return IndptrOffset(in.keeps_indptr ? (in.qo_indptr != nullptr ? 2 : 1) : 0, in.batch_size);
  }

  int64_t SlotBytes(int64_t tile) const { return tile * (in_.head_dim_vo + 1) * int64_t(sizeof(float)); }

  /// Number of slots of a CUDA graph with a fixed split size. The number of pieces grows with the keys, so the graph
  /// gets as many slots as the float workspace holds: a quarter for the decode list, the rest for the prefill list.
  void ShareRoom(int64_t& decode_slots, int64_t& prefill_slots, bool decode_only) const {
    const int64_t decode = SlotBytes(in_.decode_tile), prefill = SlotBytes(prefill_tile_);
    int64_t room = decode_only ? decode_slots * decode
                               : std::max(4 * decode_slots * decode, DivideUp(4 * prefill_slots * prefill, 3));
    room = std::max(room, in_.float_bytes);
    const int64_t part = decode_only ? room : room / 4;
    decode_slots = decode > 0 ? part / decode : 0;
    prefill_slots = decode_only ? 0 : (room - part) / prefill;
  }

  /// Compute sizes and offsets. In a CUDA graph they depend only on the frozen sizes, so that a later plan fits the
  /// captured launch.
  void Layout() {
    PlanInfo& info = out_.info;
    const int64_t heads = in_.num_kv_heads;
    int64_t decode_items = out_.decode.Size(), prefill_items = out_.prefill.Size();
    int64_t decode_merges = out_.decode_merges.Size(), prefill_merges = out_.prefill_merges.Size();
    int64_t decode_slots = out_.decode_slots, prefill_slots = out_.prefill_slots;
    const bool shares = !(in_.fixed_split > 0 || in_.disable_split);
    int64_t decode_blocks = shares ? std::min(out_.shares, decode_blocks_) : decode_items * heads;
    if (in_.cuda_graph) {
      const bool decode_only = in_.prefill_tiles[0] == 0;
      const int64_t rows = int64_t(in_.max_rows) * group_;
      const int64_t decode_tiles =
          in_.decode_tile == 0 ? 0 : in_.batch_size + (decode_only ? rows / in_.decode_tile : 0);
      const int64_t prefill_tiles = decode_only ? 0 : in_.batch_size + rows / prefill_tile_;
      if (shares) {
        decode_blocks = in_.decode_tile == 0 ? 0 : in_.decode_blocks;
        const int64_t ranges =
            in_.decode_tile == 0 ? 0 : Ranges(std::max(in_.decode_blocks, 1), heads, in_.takes_shares).all;
        const int64_t cuts = std::max<int64_t>(ranges - 1, 0), cut_tiles = std::min(cuts, decode_tiles);
        decode_items = decode_tiles + ranges;
        decode_slots = (cuts + cut_tiles) * heads;
        decode_merges = cut_tiles;
        prefill_items = std::max<int64_t>(prefill_tiles, prefill_blocks_ / heads);
        prefill_slots = prefill_blocks_;  // tiles are split only while all pieces fit in one wave
        prefill_merges = std::min<int64_t>(prefill_tiles, prefill_blocks_);
        if (in_.all_partial) {
          decode_slots = decode_items * heads;
          decode_merges = decode_tiles;
          prefill_slots = std::max<int64_t>(prefill_tiles * heads, prefill_blocks_);
          prefill_merges = prefill_tiles;
        }
      } else {
        if (in_.fixed_split > 0) ShareRoom(decode_slots, prefill_slots, decode_only);
        decode_items = decode_tiles + decode_slots / heads;
        decode_blocks = decode_items * heads;
        decode_merges = std::min(decode_tiles, decode_slots / heads);
        prefill_items = prefill_tiles + prefill_slots / heads;
        prefill_merges = std::min(prefill_tiles, prefill_slots / heads);
      }
    }
    int64_t at = ItemsOffset(in_);
    auto place = [&at](int64_t bytes) {
      const int64_t offset = at;
      at = AlignUp(at + bytes);
      return offset;
    };
    info.tile = prefill_items > 0 ? prefill_tile_ : in_.decode_tile;
    info.decode_items = place(decode_items * sizeof(WorkItem));
    info.keys = 0;
    for (int32_t b = 0; b < in_.batch_size && !in_.cuda_graph; ++b) info.keys += KvLen(b);
    info.has_shares = shares;
    info.decode_tickets = place((TICKETS + decode_merges * heads) * sizeof(int32_t));
    info.decode_merges = place(decode_merges * sizeof(MergeItem));
    info.prefill_items = place(prefill_items * sizeof(WorkItem));
    info.prefill_merges = place(prefill_merges * sizeof(MergeItem));
    info.decode_blocks = decode_blocks;
    info.prefill_blocks = prefill_items * heads;
    info.decode_merge_blocks = decode_merges * heads;
    info.prefill_merge_blocks = prefill_merges * heads;
    if (in_.publishes_works) at = PublishedWorks(at, decode_items, prefill_items).End();
    info.int_bytes = at;
    at = 0;
    place(decode_slots * SlotBytes(in_.decode_tile));
    info.prefill_partial = place(prefill_slots * SlotBytes(prefill_tile_));
    info.float_bytes = at;
  }

  /// Detect batches of equal requests, whose blocks can compute their items (WorkList::equal_requests): every request
  /// is split like the first one, and their pages are consecutive.
  void DetectEqualRequests() const {
    PlanInfo& info = out_.info;
    info.qo_len = 0;
    info.chunk_size = 0;
    const int32_t heads = in_.num_kv_heads, items = out_.shares / std::max(heads, 1), batch = in_.batch_size;
    if (items == 0 || items % batch != 0 || info.decode_blocks != out_.shares || in_.cuda_graph) return;
    const int32_t chunks = items / batch;
    const WorkItem& first = out_.decode[0];
    const int64_t pages = DivideUp(first.kv_len, in_.page_size);
    WorkItem expected = first;
    for (int32_t i = 0; i < items; ++i) {
      const int32_t request = i / chunks, chunk = i % chunks;
      expected.request = request;
      expected.is_first = chunk == 0;
      expected.qo_begin = request * first.qo_len;
      expected.kv_begin = int32_t(request * pages);
      expected.row_begin = 0;
      expected.kv_start = chunk * first.kv_end;
      expected.kv_end = std::min(expected.kv_start + first.kv_end, first.kv_len);
      expected.slot = chunks > 1 ? i * heads : -1;
      expected.merge = chunks > 1 ? request : -1;
      expected.next = -1;
      if (std::memcmp(&out_.decode[i], &expected, sizeof(WorkItem)) != 0) return;
    }
    if (first.kv_end == 0 || first.qo_len > INT16_MAX) return;
    info.qo_len = int16_t(first.qo_len);
    info.chunk_size = first.kv_end;
  }

  const PlanInput& in_;
  const int32_t group_;
  int32_t prefill_tile_ = 0, prefill_blocks_ = 0, decode_blocks_ = 0;
  bool has_others_ = false;
  PlanOutput& out_;
};

}  // namespace attention
}  // namespace flashinfer
